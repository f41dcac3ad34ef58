//! `aquifer region` as a program, with unmodified programs that map regions.
//!
//! One file a subject; `framework` is what they are written with.

mod demo;
mod forgetful;
mod framework;
mod groups;
mod isolation;
mod limits;
mod lives;
mod losses;
mod pages;
mod programs;
