//! The NVMe/TCP initiator, against our target and against targets that break the rules.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../nvme_target/harness.rs"]
#[allow(dead_code)]
mod harness;
#[path = "../nvme_target/host.rs"]
#[allow(dead_code)]
mod host;
mod middle;
#[path = "../operations/mod.rs"]
mod operations;

mod access;
mod broken;
mod content;
mod controller;

use std::sync::Arc;

use aquifer_fabric::Address;
use aquifer_fabric::nvme::initiator::{Connection, Target};
use common::PATIENCE;
use harness::Served;

/// What leads to the subsystem that is served.
fn target(served: &Served) -> Target {
    Target::new(Address::Unix(served.socket()), served.subsystem.clone(), host::HOST.parse().unwrap())
}

fn connect(served: &Served) -> Connection {
    Connection::connect(Arc::new(target(served)), PATIENCE).unwrap()
}

fn read(connection: &mut Connection, offset: u64, length: usize) -> Vec<u8> {
    let mut data = vec![0xee; length];
    connection.read(offset, &mut data).unwrap();
    data
}
