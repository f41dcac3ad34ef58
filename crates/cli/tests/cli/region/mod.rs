//! Tests of `aquifer region` as a program, with unmodified programs that map regions.
//!
//! Each file has one subject; `framework` has the common parts.

mod copies;
mod disk_copies;
mod forgetful;
pub mod framework;
mod groups;
mod isolation;
mod lies;
mod limits;
mod lives;
mod losses;
mod pages;
mod programs;
