//! Tests of the NBD and NVMe/TCP servers and clients, with each other, with other implementations
//! and with broken peers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../../store/tests/store/alone/mod.rs"]
mod alone;
mod certificates;
mod channel;
mod client;
mod client_server;
mod common;
mod counting;
mod freezing;
mod nbd_server;
mod nbdkit;
mod nvme_initiator;
mod nvme_target;
mod operations;
mod tls;
mod tls_authority;
