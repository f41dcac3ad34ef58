//! Tests of a group's disk caches. The tests need root.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod cache;
mod common;
mod lending;
