//! `aquifer region` as a program, with unmodified programs that map regions.
//!
//! One file a subject; `framework` is what they are written with.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../common/mod.rs"]
mod common;
mod demo;
mod framework;
mod groups;
mod isolation;
mod limits;
mod losses;
mod pages;
mod programs;
#[path = "../../../store/tests/rank/mod.rs"]
mod rank;
