//! Queues at their limits: a greedy host, and a modest one beside it. The test owns the gate's
//! clock, so that counts of commands are exact.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use aquifer_nvme::proto::command::{Sgl, io};
use aquifer_nvme::proto::fabrics::ANY_CONTROLLER;
use aquifer_nvme::proto::{Nqn, NvmeStatus};
use aquifer_page::{Bytes, HostName, LeaseId};
use aquifer_transport::serving::limits::{Allowance, Gate, LendingLimits, RequestRate};

use super::harness::Served;
use super::host::Host;
use crate::common::{Raw, pattern, wait_until};

/// The time in which the limits below give one command.
const STEP: Duration = Duration::from_millis(100);

/// A target with a gate, and the gate's clock in nanoseconds.
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

    /// Adds a subsystem whose lease belongs to `host`.
    fn add(&self, host: &str) -> (Nqn, LeaseId) {
        let subsystem = self.served.add(Bytes::mib(1));
        let lease = self.served.registry.namespaces.lock().unwrap()[&subsystem].lease().id();
        let name = HostName::try_from(host.to_owned()).unwrap();
        self.served.registry.borrowers.lock().unwrap().insert(lease, name);
        (subsystem, lease)
    }

    /// Returns an admin queue and its I/O queues.
    fn queues(&self, subsystem: &Nqn, count: u16) -> (Host, Vec<Host>) {
        let mut admin = Host::connect(&self.served.socket(), 0);
        let controller = admin.connect_admin(subsystem, 0);
        admin.enable();
        let queue = |number| {
            let mut host = Host::connect(&self.served.socket(), 0);
            host.connect_io(subsystem, controller, number);
            host
        };
        (admin, (1..=count).map(queue).collect())
    }

    fn pages(&self, lease: LeaseId) -> u64 {
        let all = self.gate.by_lease();
        let of_lease = all.iter().filter(|one| one.lease == lease);
        of_lease.map(|one| one.traffic.sent + one.traffic.received).sum::<Bytes>().pages()
    }

    fn waiting(&self) -> u64 {
        self.gate.by_lease().iter().map(|one| one.waiting).sum()
    }
}

fn send_reads(host: &mut Host, count: u32) {
    for _ in 0..count {
        let command = host.command(io::READ, Sgl::transport(4096)).with_blocks(0, 1);
        host.send(&command, &[]);
    }
}

fn ten_requests_a_second() -> LendingLimits {
    let host = Allowance { requests: Some(RequestRate(10)), ..Allowance::default() };
    LendingLimits { host, ..LendingLimits::default() }
}

#[test]
fn a_greedy_host_at_its_limit_holds_up_no_other() {
    let limited = Limited::new(ten_requests_a_second());
    let (greedy, of_greedy) = limited.add("greedy");
    let (modest, of_modest) = limited.add("modest");
    let (mut greedy_admin, mut crowd) = limited.queues(&greedy, 8);
    crowd.iter_mut().for_each(|host| send_reads(host, 20));
    wait_until("all queues to wait", || limited.waiting() == 8);
    let (_admin, mut hosts) = limited.queues(&modest, 1);
    const ROUNDS: u64 = 20;
    for round in 0..ROUNDS / 2 {
        let data = pattern(4096, round + 1);
        hosts[0].write(round, &data);
        limited.clock.fetch_add(STEP.as_nanos() as u64 + 1, Ordering::SeqCst);
        assert!(hosts[0].read(round, 1) == data);
        limited.clock.fetch_add(STEP.as_nanos() as u64 + 1, Ordering::SeqCst);
    }
    drop(hosts);
    let is_told = || limited.pages(of_modest) == ROUNDS && limited.waiting() == 8;
    wait_until("the modest host's queue to end", is_told);
    let taken = limited.pages(of_greedy);
    assert!((1..=ROUNDS + 1).contains(&taken), "{taken} pages for the greedy host");
    // An admin queue does not wait, so that no controller loses its keep alive.
    assert!(greedy_admin.identify(1, 0).is_ok());
    limited.served.registry.namespaces.lock().unwrap().clear();
    limited.served.target.close_lease(of_greedy);
    assert_eq!(limited.waiting(), 0, "queues that wait end with their lease");
}

#[test]
fn a_write_waits_before_its_data_is_requested() {
    let limited = Limited::new(ten_requests_a_second());
    let (subsystem, lease) = limited.add("b");
    let (_admin, mut hosts) = limited.queues(&subsystem, 1);
    let host = &mut hosts[0];
    send_reads(host, 1);
    let write = host.command(io::WRITE, Sgl::transport(4096)).with_blocks(3, 1);
    host.send(&write, &[]);
    wait_until("the write to wait", || limited.waiting() == 1 && limited.pages(lease) == 1);
    host.take_bytes(24 + 4096);
    limited.clock.fetch_add(STEP.as_nanos() as u64 + 1, Ordering::SeqCst);
    let request = host.r2t();
    let data = host.data(&request, 0, &pattern(4096, 9), true);
    host.put(&data);
    assert!(host.completion().status().is_success());
    limited.clock.fetch_add(STEP.as_nanos() as u64 + 1, Ordering::SeqCst);
    assert!(host.read(3, 1) == pattern(4096, 9));
}

#[test]
fn a_queue_over_a_limit_is_refused() {
    let most = |connections| Allowance { connections: Some(connections), ..Allowance::default() };
    let limited = Limited::new(LendingLimits { host: most(5), lease: most(3) });
    let (subsystem, _) = limited.add("b");
    let (mut admin, queues) = limited.queues(&subsystem, 2);
    let refused = |subsystem: &Nqn| {
        let mut host = Host::connect(&limited.served.socket(), 0);
        host.try_connect(subsystem, ANY_CONTROLLER, 0, 0).status()
    };
    assert_eq!(refused(&subsystem), NvmeStatus::CONNECT_BUSY, "the lease has three");
    let (second, _) = limited.add("b");
    let (_second_admin, _second) = limited.queues(&second, 1);
    assert_eq!(refused(&second), NvmeStatus::CONNECT_BUSY, "the host has five");
    let (third, _) = limited.add("c");
    let _other = limited.queues(&third, 2);
    assert!(admin.identify(1, 0).is_ok(), "a refusal ends no other queue");
    drop(queues);
    wait_until("the queues to end", || limited.served.queues() == 6);
    assert_eq!(refused(&second), NvmeStatus::SUCCESS);
}
