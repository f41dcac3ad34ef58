//! Caches of a group as their clients find them. Need root.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod balance;
mod cache;
mod common;
mod lending;
