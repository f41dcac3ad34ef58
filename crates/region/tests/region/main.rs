//! Regions with their engines in this process, over lenders of this project.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;
mod handover;
#[cfg(target_arch = "x86_64")]
mod kvm;
mod model;
mod process;
mod remapped;
mod sharing;
mod together;
mod upkeep;
