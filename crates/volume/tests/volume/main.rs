//! Volumes over real lenders that die, lie and come back.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod allocation;
mod common;
mod copies;
#[path = "../../../nbd/tests/nbd/counting/mod.rs"]
mod counting;
mod disk_copies;
mod evacuate;
mod failures;
mod fencing;
mod lies;
mod losses;
mod model;
mod moves;
mod our_lender;
mod pairs;
mod reads;
mod upkeep;
mod volume;
