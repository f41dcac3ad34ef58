//! The NBD server against real clients, hand-made ones, and broken ones.
#![allow(clippy::unwrap_used)]

mod broken;
#[path = "../common/mod.rs"]
mod common;
mod harness;
mod protocol;
mod server;
mod tls;
mod tools;
