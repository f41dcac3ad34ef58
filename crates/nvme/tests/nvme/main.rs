//! Tests of the NVMe/TCP target and initiator, with each other and with broken peers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../../store/tests/store/alone/mod.rs"]
mod alone;
#[path = "../../../transport/tests/transport/common/mod.rs"]
mod common;
#[path = "../../../nbd/tests/nbd/counting/mod.rs"]
mod counting;
#[path = "../../../nbd/tests/nbd/operations/in_flight.rs"]
mod in_flight;
mod nvme_initiator;
mod nvme_target;
#[path = "../../../store/tests/store/common/mod.rs"]
mod stores;
