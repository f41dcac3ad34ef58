//! Absence of allocations in the target between a command and its completion.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use aquifer_nvme::proto::command::{DSM_DEALLOCATE, DsmRange, Sgl, io};
use aquifer_nvme::proto::pdu::digests;
use aquifer_page::Bytes;
use aquifer_transport::serving::limits::{Allowance, ByteRate, Gate, LendingLimits, RequestRate};
use zerocopy::IntoBytes;

use super::harness::Served;
use super::host::Host;
use crate::alone::alone;
use crate::common::{Raw, pattern};
use crate::counting::allocations;

/// Sends each of `requests` and reads a reply of its length, a hundred times in all. Returns the
/// allocations of the process; this function itself makes none.
fn talk(host: &mut Host, requests: &[(Vec<u8>, usize)], reply: &mut [u8]) -> u64 {
    let before = allocations();
    for _ in 0..100 {
        for (request, length) in requests {
            host.stream.write_all(request).unwrap();
            host.stream.read_exact(&mut reply[..*length]).unwrap();
        }
    }
    allocations() - before
}

#[test]
fn commands_are_carried_out_without_allocating() {
    alone("nvme_target::allocations::commands_are_carried_out_without_allocating", || {
        commands_allocate_nothing(&Served::new(Bytes::mib(4)));
    });
}

#[test]
fn commands_that_wait_for_a_limit_allocate_nothing() {
    alone("nvme_target::allocations::commands_that_wait_for_a_limit_allocate_nothing", || {
        let served = Served::new(Bytes::mib(4));
        let requests = Some(RequestRate(2000));
        let host = Allowance { requests, ..Allowance::default() };
        let gate = Gate::new(LendingLimits { host, ..LendingLimits::default() });
        gate.set_total(Some(ByteRate(Bytes::gib(4))));
        assert!(served.registry.gate.set(Arc::clone(&gate)).is_ok());
        commands_allocate_nothing(&served);
        assert!(gate.by_lease()[0].waited > Duration::ZERO);
    });
}

fn commands_allocate_nothing(served: &Served) {
    served.lease.write(0, &pattern(1 << 20, 1)).unwrap();
    let page = pattern(4096, 2);
    for (digests, digest) in [(0, 0), (digests::HEADER | digests::DATA, 4)] {
        let (_admin, controller) = served.admin_with(digests, 0);
        let mut host = served.io(controller, 1, digests);
        let command =
            |opcode, sgl, block, blocks| host_command(opcode, sgl).with_blocks(block, blocks);
        let read = host.capsule(&command(io::READ, Sgl::transport(4096), 0, 1), &[]);
        let long_read = host.capsule(&command(io::READ, Sgl::transport(1 << 19), 0, 128), &[]);
        let write = host.capsule(&command(io::WRITE, Sgl::in_capsule(4096), 2, 1), &page);
        let compare = host.capsule(&command(io::COMPARE, Sgl::in_capsule(4096), 2, 1), &page);
        let new_page = host.capsule(&command(io::WRITE, Sgl::in_capsule(4096), 512, 1), &page);
        let zeroes = host.capsule(&command(io::WRITE_ZEROES, Sgl::NONE, 512, 1), &[]);
        let range = DsmRange { attributes: 0.into(), blocks: 1.into(), start: 512.into() };
        let trim =
            host_command(io::DATASET_MANAGEMENT, Sgl::in_capsule(16)).with(11, DSM_DEALLOCATE);
        let trim = host.capsule(&trim, range.as_bytes());
        // Requested data carries the tag of the only transfer, so each round can repeat it.
        let asked = command(io::WRITE, Sgl::transport(65536), 64, 16);
        let asked_pdu = host.capsule(&asked, &[]);
        host.put(&asked_pdu);
        let request = host.r2t();
        let data = host.data(&request, 0, &pattern(65536, 3), true);
        host.put(&data);
        host.completion();

        let done = 24 + digest;
        let answer = 24 + digest + 4096 + digest;
        for (what, requests) in [
            ("reads", vec![(read.clone(), answer)]),
            ("long reads", vec![(long_read, 2 * (24 + 2 * digest) + (1 << 19))]),
            ("writes", vec![(write.clone(), done)]),
            ("compares", vec![(compare, done)]),
            ("new pages and trims", vec![([&new_page[..], &trim].concat(), 2 * done)]),
            ("new pages and zeroes", vec![([new_page, zeroes].concat(), 2 * done)]),
            ("a batch", vec![([write, read].concat(), done + answer)]),
            ("data that is asked for", vec![(asked_pdu, done), (data, done)]),
        ] {
            let mut reply = vec![0; 1 << 20];
            // The first round is not measured: threads allocate when they start.
            talk(&mut host, &requests, &mut reply);
            assert_eq!(talk(&mut host, &requests, &mut reply), 0, "{what}, digests: {digests}");
        }
    }
}

fn host_command(opcode: u8, sgl: Sgl) -> aquifer_nvme::proto::Command {
    aquifer_nvme::proto::Command::new(opcode, 1, 1, sgl)
}
