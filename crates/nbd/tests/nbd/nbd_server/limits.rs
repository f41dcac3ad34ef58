//! Connections at their limits: a greedy borrower, and a modest one beside it. The test owns the
//! gate's clock, so that counts of requests are exact.

use std::io::{ErrorKind, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use aquifer_nbd::proto::{command, option, reply};
use aquifer_page::{Bytes, HostName, LeaseId, PAGE_SIZE};
use aquifer_transport::serving::limits::{
    Allowance, ByteRate, Gate, LendingLimits, Limit, RequestRate,
};

use super::harness::{Client, Served, info_payload, request};
use crate::common::{Raw, pattern, wait_until};

/// Bytes of a reply to a read of a page.
const REPLY: usize = 16 + PAGE_SIZE;
/// The time in which the limits below give one request.
const STEP: Duration = Duration::from_millis(100);

/// A server with a gate, and the gate's clock in nanoseconds.
struct Limited {
    served: Served,
    gate: Arc<Gate>,
    clock: Arc<AtomicU64>,
}

impl Limited {
    fn new(limits: LendingLimits) -> Self {
        let served = Served::new(Bytes::mib(1));
        let clock = Arc::new(AtomicU64::new(0));
        let time = Arc::clone(&clock);
        let now = move || Duration::from_nanos(time.load(Ordering::SeqCst));
        let gate = Gate::with_clock(limits, now);
        assert!(served.registry.gate.set(Arc::clone(&gate)).is_ok());
        Self { served, gate, clock }
    }

    /// Adds an export whose lease belongs to `host`.
    fn add(&self, host: &str) -> LeaseId {
        let lease = self.served.add(host, Bytes::mib(1)).id();
        let name = HostName::try_from(host.to_owned()).unwrap();
        self.served.registry.borrowers.lock().unwrap().insert(lease, name);
        lease
    }

    fn advance(&self) {
        self.clock.fetch_add(STEP.as_nanos() as u64 + 1, Ordering::SeqCst);
    }

    /// Returns a client of an export, after it has sent `count` reads of a page.
    fn reading(&self, export: &str, count: u64) -> Client {
        let mut client = Client::greeted(&self.served.socket());
        client.go(export);
        for cookie in 0..count {
            client.request(command::READ, 0, cookie, 0, PAGE_SIZE as u32);
        }
        client
    }

    /// Returns the pages that the server has sent of a lease.
    fn pages(&self, lease: LeaseId) -> u64 {
        let sent = |one: &aquifer_transport::serving::limits::LeaseTraffic| one.traffic.sent;
        let all = self.gate.by_lease();
        all.iter().filter(|one| one.lease == lease).map(sent).sum::<Bytes>().pages()
    }

    fn waiting(&self) -> u64 {
        self.gate.by_lease().iter().map(|one| one.waiting).sum()
    }
}

fn requests(rate: u32) -> Allowance {
    Allowance { requests: Some(RequestRate(rate)), ..Allowance::default() }
}

fn no_limits() -> LendingLimits {
    LendingLimits { host: Allowance::default(), lease: Allowance::default() }
}

/// Asserts that nothing more has arrived at a client.
fn assert_silent(client: &mut Client) {
    client.stream.set_nonblocking(true).unwrap();
    let error = client.stream.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    client.stream.set_nonblocking(false).unwrap();
}

#[test]
fn a_request_over_a_rate_waits_and_gets_no_error() {
    let bytes = Some(ByteRate(Bytes(10 * PAGE_SIZE as u64)));
    let lease = Allowance { bytes, ..Allowance::default() };
    let limited = Limited::new(LendingLimits { lease, ..no_limits() });
    let lease = limited.served.lease.id();
    limited.served.lease.write(0, &pattern(PAGE_SIZE, 3)).unwrap();
    let mut client = limited.reading("", 10);
    for served in 1..=10u64 {
        if served < 10 {
            wait_until("the requests to be in their places", || {
                limited.waiting() == 1 && limited.pages(lease) == served
            });
        }
        assert_eq!(client.simple_reply(), (served - 1, 0));
        assert!(client.take_bytes(PAGE_SIZE) == pattern(PAGE_SIZE, 3));
        assert_silent(&mut client);
        limited.advance();
    }
    let report = &limited.gate.by_lease()[0];
    assert_eq!(report.limit, Some(Limit::LeaseBytes));
    assert!(report.waited >= STEP * 8, "{:?}", report.waited);
}

#[test]
fn writes_over_a_rate_wait_too() {
    let limited = Limited::new(LendingLimits { lease: requests(10), ..no_limits() });
    let mut client = limited.reading("", 0);
    for number in 0..3u64 {
        let head = request(command::WRITE, 0, number, number * PAGE_SIZE as u64, 4096);
        client.put(&[head, pattern(PAGE_SIZE, number + 1)].concat());
    }
    for number in 0..3u64 {
        assert_eq!(client.simple_reply(), (number, 0));
        if number < 2 {
            wait_until("the requests to be in their places", || limited.waiting() == 1);
            let mut next = vec![1; PAGE_SIZE];
            limited.served.lease.read((number + 1) * PAGE_SIZE as u64, &mut next).unwrap();
            assert!(next == [0; PAGE_SIZE], "no write is stored before its turn");
        }
        limited.advance();
    }
    for number in 0..3u64 {
        let mut page = vec![0; PAGE_SIZE];
        limited.served.lease.read(number * PAGE_SIZE as u64, &mut page).unwrap();
        assert!(page == pattern(PAGE_SIZE, number + 1));
    }
}

#[test]
fn a_greedy_host_at_its_limit_holds_up_no_other() {
    let limited = Limited::new(LendingLimits { host: requests(10), ..no_limits() });
    let (greedy, modest) = (limited.add("greedy"), limited.add("modest"));
    let _crowd: Vec<_> = (0..8).map(|_| limited.reading("greedy", 100)).collect();
    wait_until("the requests to be in their places", || limited.waiting() == 8);
    let mut client = limited.reading("modest", 0);
    const ROUNDS: u64 = 20;
    for _ in 0..ROUNDS {
        // Each read is within the modest host's rate, so it is answered though time stands still.
        assert!(client.read(0, PAGE_SIZE as u32) == [0; PAGE_SIZE]);
        limited.advance();
    }
    drop(client);
    wait_until("the requests to be in their places", || {
        limited.pages(modest) == ROUNDS && limited.waiting() == 8
    });
    let taken = limited.pages(greedy);
    assert!((1..=ROUNDS + 1).contains(&taken), "{taken} pages for the greedy host");
}

#[test]
fn hosts_take_turns_at_what_the_lender_can_give() {
    let limited = Limited::new(no_limits());
    let (greedy, modest) = (limited.add("greedy"), limited.add("modest"));
    limited.gate.set_total(Some(ByteRate(Bytes(10 * PAGE_SIZE as u64))));
    let mut crowd: Vec<_> = (0..8).map(|_| limited.reading("greedy", 100)).collect();
    crowd.push(limited.reading("modest", 100));
    const ROUNDS: u64 = 24;
    for round in 1..=ROUNDS {
        let sum = || limited.pages(greedy) + limited.pages(modest);
        wait_until("the requests to be in their places", || {
            limited.waiting() == 9 && sum() == round
        });
        limited.advance();
    }
    let modest = limited.pages(modest);
    assert!(modest >= ROUNDS / 2 - 2, "{modest} of {ROUNDS} pages for the modest host");
    let report = limited.gate.by_lease();
    assert!(report.iter().all(|one| one.limit == Some(Limit::Total)), "{report:?}");
    // Without a limit, all that waits goes on.
    limited.gate.set_total(None);
    for client in &mut crowd {
        client.take_bytes(100 * REPLY);
    }
    assert_eq!(limited.waiting(), 0);
}

#[test]
fn a_connection_over_a_limit_is_refused_by_name() {
    let most = |connections| Allowance { connections: Some(connections), ..Allowance::default() };
    let limits = LendingLimits { host: most(3), lease: most(2) };
    let limited = Limited::new(limits);
    let (first, _) = (limited.add("b"), limited.served.add("c", Bytes::mib(1)));
    let second = limited.served.add("b2", Bytes::mib(1)).id();
    let name = HostName::try_from("b".to_owned()).unwrap();
    limited.served.registry.borrowers.lock().unwrap().insert(second, name);

    let refusal = |export: &str| {
        let mut client = Client::greeted(&limited.served.socket());
        client.option(option::GO, &info_payload(export));
        let (kind, text) = client.option_replies(option::GO).pop().unwrap();
        assert_eq!(kind, reply::ERR_POLICY);
        String::from_utf8(text).unwrap()
    };
    let mut kept: Vec<_> = (0..2).map(|_| limited.reading("b", 1)).collect();
    let of_lease = format!("lease {first} has 2 connections, the lender's limit for a lease");
    assert_eq!(refusal("b"), of_lease);
    kept.push(limited.reading("b2", 1));
    assert_eq!(refusal("b2"), "host b has 3 connections here, the lender's limit for a host");
    kept.push(limited.reading("c", 1));
    for client in &mut kept {
        client.take_bytes(REPLY);
    }
    drop(kept.remove(2));
    wait_until("the requests to be in their places", || limited.served.connections() == 3);
    limited.reading("b2", 1).take_bytes(REPLY);
}

#[test]
fn a_request_that_waits_ends_with_its_lease() {
    let limited = Limited::new(LendingLimits { lease: requests(10), ..no_limits() });
    let client = limited.reading("", 3);
    let _other = limited.reading("", 3);
    wait_until("the requests to be in their places", || limited.waiting() == 2);
    drop(client);
    wait_until("the requests to be in their places", || {
        limited.waiting() == 1 && limited.served.connections() == 1
    });
    let lease = limited.served.lease.id();
    limited.served.registry.leases.lock().unwrap().clear();
    limited.served.server.close_lease(lease);
    assert_eq!((limited.waiting(), limited.served.connections()), (0, 0));
}
