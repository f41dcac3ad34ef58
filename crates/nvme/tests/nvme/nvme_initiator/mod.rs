//! The NVMe/TCP initiator, against our target and against targets that break the rules.

mod access;
mod allocations;
mod broken;
mod content;
mod controller;
mod middle;

use std::sync::Arc;

use aquifer_nvme::initiator::{Connection, Target};
use aquifer_transport::Address;

use crate::common::TIMEOUT;
use crate::nvme_target::harness::Served;
use crate::nvme_target::host::HOST;

/// Returns the address of the served subsystem.
fn target(served: &Served) -> Target {
    Target::new(Address::Unix(served.socket()), served.subsystem.clone(), HOST.parse().unwrap())
}

fn connect(served: &Served) -> Connection {
    Connection::connect(Arc::new(target(served)), TIMEOUT).unwrap()
}

fn read(connection: &mut Connection, offset: u64, length: usize) -> Vec<u8> {
    let mut data = vec![0xee; length];
    connection.read(offset, &mut data).unwrap();
    data
}
