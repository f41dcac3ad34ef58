//! A test that the server allocates nothing between a request and its reply.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use aquifer_nbd::proto::command;
use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_transport::serving::limits::{Allowance, ByteRate, Gate, LendingLimits, RequestRate};

use super::harness::{Client, Served, request};
use crate::alone::alone;
use crate::common::pattern;
use crate::counting::allocations;

/// Sends `requests` and receives `reply.len()` bytes, 100 times; returns the allocations of all
/// threads.
///
/// This side allocates nothing meanwhile.
fn talk(client: &mut Client, requests: &[u8], reply: &mut [u8]) -> u64 {
    let before = allocations();
    for _ in 0..100 {
        client.stream.write_all(requests).unwrap();
        client.stream.read_exact(reply).unwrap();
    }
    allocations() - before
}

#[test]
fn requests_are_answered_without_allocating() {
    alone("nbd_server::allocations::requests_are_answered_without_allocating", || {
        requests_allocate_nothing(&Served::new(Bytes::mib(4)));
    });
}

#[test]
fn requests_that_wait_for_a_limit_allocate_nothing() {
    alone("nbd_server::allocations::requests_that_wait_for_a_limit_allocate_nothing", || {
        let served = Served::new(Bytes::mib(4));
        let requests = Some(RequestRate(2000));
        let host = Allowance { requests, ..Allowance::default() };
        let gate = Gate::new(LendingLimits { host, ..LendingLimits::default() });
        gate.set_total(Some(ByteRate(Bytes::gib(4))));
        assert!(served.registry.gate.set(Arc::clone(&gate)).is_ok());
        requests_allocate_nothing(&served);
        assert!(gate.by_lease()[0].waited > Duration::ZERO);
    });
}

fn requests_allocate_nothing(served: &Served) {
    served.lease.write(0, &pattern(1 << 20, 1)).unwrap();
    let page = pattern(PAGE_SIZE, 2);
    for (structured, head) in [(false, 16), (true, 28)] {
        let mut client = served.client(structured);
        let read = request(command::READ, 0, 1, 0, 4096);
        let long_read = request(command::READ, 0, 1, 0, 1 << 18);
        let write = [request(command::WRITE, 0, 1, 8192, 4096), page.clone()].concat();
        let new_page = [request(command::WRITE, 0, 1, 2 << 20, 4096), page.clone()].concat();
        let trim = request(command::TRIM, 0, 1, 2 << 20, 4096);
        for (what, requests, reply) in [
            ("reads", read.clone(), head + 4096),
            ("long reads", long_read, head + (1 << 18)),
            ("writes", write.clone(), 16),
            ("new pages and trims", [new_page, trim].concat(), 32),
            ("a batch", [write, read].concat(), 16 + head + 4096),
        ] {
            let mut reply = vec![0; reply];
            // A first run without a check, as threads allocate when they start.
            talk(&mut client, &requests, &mut reply);
            assert_eq!(
                talk(&mut client, &requests, &mut reply),
                0,
                "{what}, structured: {structured}"
            );
        }
    }
}
