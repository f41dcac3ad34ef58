//! Sequences of requests with a clock of their own: what each borrower gets, and in which order.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use aquifer_page::{Bytes, HostName};
use proptest::prelude::*;

use super::super::RequestRate;
use super::*;

const PAGE: u64 = 4096;
const SECOND: Duration = Duration::from_secs(1);

fn member(host: &str, lease: u128) -> Member {
    let host = HostName::try_from(host.to_owned()).unwrap();
    Member { borrower: Borrower::Host(host), lease: LeaseId(lease) }
}

fn none() -> LendingLimits {
    LendingLimits { host: Allowance::default(), lease: Allowance::default() }
}

fn bytes(rate: u64) -> Allowance {
    Allowance { bytes: Some(ByteRate(Bytes(rate))), ..Allowance::default() }
}

fn requests(rate: u32) -> Allowance {
    Allowance { requests: Some(RequestRate(rate)), ..Allowance::default() }
}

/// A client that sends its next request `pause` after the last one passed.
struct Client {
    member: Member,
    bytes: u64,
    pause: Duration,
    queued: Queued,
    passed: Vec<Duration>,
    asked: Duration,
    longest: Duration,
}

impl Client {
    fn new(member: Member, bytes: u64, pause: Duration) -> Self {
        let (queued, passed, asked) = (Queued::default(), Vec::new(), Duration::ZERO);
        Self { member, bytes, pause, queued, passed, asked, longest: Duration::ZERO }
    }

    fn got(&self) -> u64 {
        self.passed.len() as u64 * self.bytes
    }
}

/// Runs clients against a ledger until `end`. Returns how often they asked.
fn run(ledger: &mut Ledger, clients: &mut [Client], end: Duration) -> u64 {
    let mut asked = 0;
    for client in &*clients {
        ledger.join(&client.member, Duration::ZERO).unwrap();
    }
    let mut next: BinaryHeap<_> =
        (0..clients.len()).map(|index| Reverse((Duration::ZERO, index))).collect();
    while let Some(Reverse((now, index))) = next.pop().filter(|Reverse((now, _))| *now < end) {
        let client = &mut clients[index];
        asked += 1;
        let then = match ledger.ask(&client.member, &mut client.queued, client.bytes, now) {
            Verdict::Pass => {
                client.passed.push(now);
                client.longest = client.longest.max(now - client.asked);
                client.asked = now + client.pause;
                client.asked
            }
            Verdict::Wait(wait, _) => now + wait.max(Duration::from_nanos(1)),
        };
        next.push(Reverse((then, index)));
    }
    asked
}

#[test]
fn no_request_waits_where_no_limit_is_set() {
    let mut ledger = Ledger::new(none());
    let (one, mut queued) = (member("b", 1), Queued::default());
    ledger.join(&one, Duration::ZERO).unwrap();
    assert!(!ledger.can_wait());
    for _ in 0..1000 {
        let verdict = ledger.ask(&one, &mut queued, 32 << 20, Duration::ZERO);
        assert_eq!(verdict, Verdict::Pass);
    }
}

#[test]
fn a_verdict_names_the_limit_for_which_a_request_waits() {
    let limits = [
        (LendingLimits { lease: bytes(10), ..none() }, Limit::LeaseBytes),
        (LendingLimits { lease: requests(10), ..none() }, Limit::LeaseRequests),
        (LendingLimits { host: bytes(10), ..none() }, Limit::HostBytes),
        (LendingLimits { host: requests(10), ..none() }, Limit::HostRequests),
    ];
    for (limits, limit) in limits {
        let mut ledger = Ledger::new(limits);
        assert!(ledger.can_wait());
        let (one, mut queued) = (member("b", 1), Queued::default());
        ledger.join(&one, Duration::ZERO).unwrap();
        let mut ask = || ledger.ask(&one, &mut queued, PAGE, Duration::ZERO);
        assert_eq!(ask(), Verdict::Pass);
        let Verdict::Wait(_, why) = ask() else { panic!("{limit:?}: the burst is one request") };
        assert_eq!(why, limit);
    }
}

#[test]
fn a_limited_host_slows_no_other_host() {
    let mut ledger = Ledger::new(LendingLimits { host: bytes(1 << 20), ..none() });
    let mut clients: Vec<_> =
        (0..64).map(|_| Client::new(member("greedy", 1), PAGE, Duration::ZERO)).collect();
    clients.push(Client::new(member("modest", 2), PAGE, Duration::from_millis(10)));
    run(&mut ledger, &mut clients, SECOND * 10);
    let greedy: u64 = clients[..64].iter().map(Client::got).sum();
    let rate = (1 << 20) * 10;
    assert!((rate..rate + (1 << 20) / 10 + 2 * PAGE).contains(&greedy), "{greedy}");
    assert_eq!(clients[64].longest, Duration::ZERO, "the modest host never waits");
    assert_eq!(clients[64].passed.len(), 1000);
}

#[test]
fn hosts_share_a_rate_however_many_connections_they_have() {
    let mut ledger = Ledger::new(none());
    ledger.set_total(Some(ByteRate(Bytes::mib(100))), Duration::ZERO);
    let greedy = |_| Client::new(member("greedy", 1), 16 * PAGE, Duration::ZERO);
    let mut clients: Vec<_> = (0..64).map(greedy).collect();
    clients.push(Client::new(member("other", 2), PAGE, Duration::ZERO));
    run(&mut ledger, &mut clients, SECOND);
    let (greedy, other) = (clients[..64].iter().map(Client::got).sum::<u64>(), clients[64].got());
    assert!(greedy + other >= (99 << 20), "no rate is left unused: {greedy} + {other}");
    assert!(other >= (greedy + other) * 2 / 5, "{other} beside {greedy}");
}

#[test]
fn a_modest_host_waits_for_one_turn_at_most() {
    let mut ledger = Ledger::new(none());
    ledger.set_total(Some(ByteRate(Bytes::mib(100))), Duration::ZERO);
    let greedy = |_| Client::new(member("greedy", 1), 16 * PAGE, Duration::ZERO);
    let mut clients: Vec<_> = (0..64).map(greedy).collect();
    clients.push(Client::new(member("modest", 2), PAGE, Duration::from_millis(5)));
    run(&mut ledger, &mut clients, SECOND);
    let modest = &clients[64];
    // A quantum, a debt of one request, and the time between two looks.
    assert!(modest.longest <= Duration::from_millis(3), "{:?}", modest.longest);
    assert!(modest.passed.len() >= 125, "{}", modest.passed.len());
}

/// Runs 1,000 clients in so many hosts and leases of a host. Returns how often they asked, and what
/// each got.
fn crowd(limits: LendingLimits, total: Option<u64>, hosts: u32, leases: u32) -> (u64, Vec<u64>) {
    let mut ledger = Ledger::new(limits);
    ledger.set_total(total.map(|rate| ByteRate(Bytes(rate))), Duration::ZERO);
    let client = |number: u32| {
        let (host, lease) = (number % hosts, number / hosts % leases);
        let member = member(&format!("h{host}"), u128::from(host * leases + lease));
        Client::new(member, PAGE, Duration::from_nanos(1))
    };
    let mut clients: Vec<_> = (0..1000).map(client).collect();
    let asked = run(&mut ledger, &mut clients, SECOND);
    (asked, clients.iter().map(|client| client.passed.len() as u64).collect())
}

#[test]
fn of_1000_that_wait_only_the_next_ones_ask_often() {
    for rate in [1 << 20, 100 << 20] {
        let own = bytes(rate);
        let shared = [(1, 1), (1, 40), (10, 10), (1000, 1)];
        let of_total = shared.map(|shape| (none(), Some(rate), shape));
        let of_host =
            [(1, 1), (1, 40)].map(|shape| (LendingLimits { host: own, ..none() }, None, shape));
        let of_lease = (LendingLimits { lease: own, ..none() }, None, (1, 1));
        for (limits, total, (hosts, leases)) in
            of_total.into_iter().chain(of_host).chain([of_lease])
        {
            let (asked, got) = crowd(limits, total, hosts, leases);
            let passed: u64 = got.iter().sum();
            let what = format!("{rate} B/s, {hosts} hosts, {leases} leases, {limits:?}");
            // A burst of a tenth of a second, and at least one request.
            assert!(passed * PAGE >= rate * 104 / 100, "{what}: {passed} passed");
            // Each asks 20 times a second at least, and more often as its turn comes near.
            assert!(asked <= 25_000 + 5 * passed, "{what}: {asked} asked for {passed}");
            let most = got.iter().max().unwrap();
            assert!(*most <= 2 * passed / 1000 + 40, "{what}: one got {most} of {passed}");
        }
    }
}

#[test]
fn leases_of_a_host_take_turns_too() {
    let mut ledger = Ledger::new(LendingLimits { host: requests(10_000), ..none() });
    let mut clients: Vec<_> =
        (0..32).map(|_| Client::new(member("b", 1), PAGE, Duration::ZERO)).collect();
    clients.push(Client::new(member("b", 2), PAGE, Duration::ZERO));
    run(&mut ledger, &mut clients, SECOND);
    let many: u64 = clients[..32].iter().map(Client::got).sum();
    let one = clients[32].got();
    assert!((many + one) / PAGE >= 10_000, "{many} + {one}");
    assert!(one * 5 >= (many + one) * 2, "{one} beside {many}");
}

#[test]
fn what_hosts_got_before_a_limit_does_not_count() {
    let mut ledger = Ledger::new(none());
    let client = || vec![Client::new(member("early", 1), 64 << 20, Duration::from_micros(1))];
    run(&mut ledger, &mut client(), Duration::from_millis(10));
    ledger.set_total(Some(ByteRate(Bytes::mib(100))), Duration::ZERO);
    let pause = Duration::ZERO;
    let mut both = ["early", "late"].map(|host| Client::new(member(host, 1), 16 * PAGE, pause));
    run(&mut ledger, &mut both, SECOND);
    assert!(both[0].got() >= 40 << 20, "{} beside {}", both[0].got(), both[1].got());
}

#[test]
fn a_client_that_reconnects_still_owes() {
    let mut ledger = Ledger::new(LendingLimits { lease: bytes(1000), ..none() });
    let (one, mut queued) = (member("b", 1), Queued::default());
    for now in [Duration::ZERO, SECOND, SECOND * 2] {
        ledger.join(&one, now).unwrap();
        let passes = ledger.ask(&one, &mut queued, PAGE, now) == Verdict::Pass;
        assert_eq!(passes, now.is_zero(), "at {now:?}");
        ledger.leave(&one, &mut queued);
    }
    ledger.join(&one, SECOND * 5).unwrap();
    assert_eq!(ledger.ask(&one, &mut queued, PAGE, SECOND * 5), Verdict::Pass);
}

#[test]
fn a_client_that_leaves_its_queue_holds_up_nobody() {
    let mut ledger = Ledger::new(none());
    ledger.set_total(Some(ByteRate(Bytes(PAGE * 10))), Duration::ZERO);
    let (one, two) = (member("b", 1), member("c", 2));
    let (mut first, mut second) = (Queued::default(), Queued::default());
    ledger.join(&one, Duration::ZERO).unwrap();
    ledger.join(&two, Duration::ZERO).unwrap();
    assert_eq!(ledger.ask(&one, &mut first, PAGE, Duration::ZERO), Verdict::Pass);
    assert_ne!(ledger.ask(&two, &mut second, PAGE, Duration::ZERO), Verdict::Pass);
    assert_eq!(second.queue, Queue::AtTotal);
    // The third request of the first host would be ahead of the second host's turn.
    let later = Duration::from_millis(200);
    assert_eq!(ledger.ask(&one, &mut first, 2 * PAGE, later), Verdict::Pass);
    let late = SECOND;
    assert!(matches!(ledger.ask(&one, &mut first, PAGE, late), Verdict::Wait(..)));
    ledger.leave(&two, &mut second);
    assert_eq!(ledger.ask(&one, &mut first, PAGE, late), Verdict::Pass);
}

#[test]
fn connections_over_a_limit_are_refused_by_name() {
    let most = |connections| Allowance { connections: Some(connections), ..Allowance::default() };
    let mut ledger = Ledger::new(LendingLimits { host: most(3), lease: most(2) });
    let (one, two) = (member("b", 1), member("b", 2));
    let mut join = |member: &Member| ledger.join(member, Duration::ZERO);
    assert_eq!((join(&one), join(&one)), (Ok(()), Ok(())));
    assert_eq!(join(&one), Err(LimitReached::Lease(LeaseId(1), 2)));
    assert_eq!(join(&two), Ok(()));
    let full = join(&two).unwrap_err();
    assert_eq!(full.to_string(), "host b has 3 connections here, the lender's limit for a host");
    assert_eq!(join(&member("c", 3)), Ok(()), "another host has its own");
    ledger.leave(&one, &mut Queued::default());
    assert_eq!(ledger.join(&two, Duration::ZERO), Ok(()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Each client: host, lease, pages a request, microseconds between requests.
    #[test]
    fn no_host_is_starved_and_no_rate_exceeded(
        all in prop::collection::vec((0usize..3, 0u128..2, 1u64..32, 0u64..2000), 1..24),
        total in 10u64..200,
        host in prop::option::of(5u64..200),
    ) {
        let limits = match host {
            Some(host) => LendingLimits { host: bytes(host << 20), ..none() },
            None => none(),
        };
        let mut ledger = Ledger::new(limits);
        ledger.set_total(Some(ByteRate(Bytes::mib(total))), Duration::ZERO);
        let mut clients: Vec<_> = all
            .iter()
            .map(|&(host, lease, pages, pause)| {
                let member = member(["b", "c", "d"][host], host as u128 * 10 + lease);
                // No request takes no time at all.
                Client::new(member, pages * PAGE, Duration::from_micros(pause + 1))
            })
            .collect();
        let end = SECOND / 2;
        run(&mut ledger, &mut clients, end);
        let (mut got, mut wants) = ([0; 3], [false; 3]);
        for (client, (host, ..)) in clients.iter().zip(&all) {
            got[*host] += client.got();
            wants[*host] = true;
        }
        let sum: u64 = got.iter().sum();
        let slack = 32 * PAGE;
        prop_assert!(sum <= (total << 20) * 6 / 10 + slack, "burst and rate: {sum}");
        if let Some(host) = host {
            prop_assert!(got.iter().all(|got| *got <= (host << 20) * 6 / 10 + slack));
        }
        // A host gets an equal share, unless it asked for less, or its own limit is less.
        let hosts = wants.iter().filter(|wants| **wants).count() as u64;
        let own_limits = host.map_or(u64::MAX, |host| (host << 20) * hosts);
        let fair = (total << 20).min(own_limits) / 2 / hosts;
        for (index, got) in got.iter().enumerate().filter(|(index, _)| wants[*index]) {
            let own = clients.iter().zip(&all).filter(|(_, (host, ..))| *host == index);
            let demand: u64 = own
                .map(|(client, _)| {
                    // A client that waits the longest quantum before each request asks this often.
                    let every = client.pause + Duration::from_millis(4);
                    client.bytes * (end.as_nanos() / every.as_nanos()) as u64
                })
                .sum();
            prop_assert!(*got + slack >= demand.min(fair * 8 / 10), "{got} of {demand}, {fair}");
        }
    }
}
