//! The NVMe/TCP target against hosts made by hand, good and broken ones.
#![allow(clippy::unwrap_used)]

mod admin;
mod authentication;
mod broken;
#[path = "../common/mod.rs"]
mod common;
mod connect;
mod events;
mod harness;
mod host;
mod io;
