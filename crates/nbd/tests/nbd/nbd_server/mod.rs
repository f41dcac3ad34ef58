//! Tests of the NBD server with real clients, hand-made ones and broken ones.

mod allocations;
mod broken;
mod harness;
mod limits;
mod protocol;
mod server;
mod tls;
mod tools;
