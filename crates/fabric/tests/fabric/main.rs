//! Servers and clients of NBD and NVMe/TCP, against each other, against those of other makes, and against broken ones.

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
