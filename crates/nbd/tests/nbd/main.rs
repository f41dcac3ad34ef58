//! Tests of the NBD server and client, with each other, with other implementations and with broken
//! peers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../../store/tests/store/alone/mod.rs"]
mod alone;
#[path = "../../../transport/tests/transport/certificates/mod.rs"]
mod certificates;
mod client;
mod client_server;
#[path = "../../../transport/tests/transport/common/mod.rs"]
mod common;
mod counting;
mod exports;
mod freezing;
mod nbd_server;
mod nbdkit;
mod operations;
#[path = "../../../store/tests/store/common/mod.rs"]
mod stores;
