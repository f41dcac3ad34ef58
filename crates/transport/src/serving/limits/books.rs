//! The books of a gate: what each borrower moved, and how long it waited.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use aquifer_page::{Bytes, LeaseId};

use super::ledger::Member;
use super::{Borrower, Limit};

/// The traffic and the waits of each borrower at each lease.
#[derive(Debug, Default)]
pub(super) struct Books {
    leases: BTreeMap<Member, Arc<LeaseCounters>>,
    /// Bytes of leases that are gone.
    of_gone: Traffic,
}

/// Borrowers without a connection that the books keep apart, for `status` and `why`. More could
/// come without end: anybody can have many addresses.
pub(super) const FORMER_APART: usize = 256;

/// Bytes that borrowers wrote and read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that borrowers wrote.
    pub received: Bytes,
    /// Bytes that borrowers read.
    pub sent: Bytes,
}

/// What a borrower did with one lease, and how long it waited.
#[derive(Clone, Debug)]
pub struct LeaseTraffic {
    /// The host.
    pub borrower: Borrower,
    /// The lease.
    pub lease: LeaseId,
    /// Bytes since its first connection.
    pub traffic: Traffic,
    /// The time that its requests waited because of limits, all connections together.
    pub waited: Duration,
    /// Its connections whose request waits now.
    pub waiting: u64,
    /// The limit for which a request waited last; `None` if none did.
    pub limit: Option<Limit>,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    received: AtomicU64,
    sent: AtomicU64,
}

#[derive(Debug, Default)]
pub(super) struct LeaseCounters {
    pub(super) traffic: Counters,
    waited_ns: AtomicU64,
    waiting: AtomicU64,
    /// When the last connection ended.
    left_ns: AtomicU64,
    /// The last limit, as an index of [`LIMITS`] plus 1.
    limit: AtomicU64,
}

const LIMITS: [Limit; 5] =
    [Limit::LeaseBytes, Limit::LeaseRequests, Limit::HostBytes, Limit::HostRequests, Limit::Total];

impl Counters {
    pub(super) fn add(&self, traffic: Traffic) {
        // An addition of zero would take the cache line from other connections.
        for (counter, bytes) in [(&self.received, traffic.received), (&self.sent, traffic.sent)] {
            if bytes > Bytes::ZERO {
                counter.fetch_add(bytes.0, Ordering::Relaxed);
            }
        }
    }

    fn get(&self) -> Traffic {
        let get = |counter: &AtomicU64| Bytes(counter.load(Ordering::Relaxed));
        Traffic { received: get(&self.received), sent: get(&self.sent) }
    }
}

impl LeaseCounters {
    fn is_in_use(this: &Arc<Self>) -> bool {
        // The books have one reference, and each connection another.
        Arc::strong_count(this) > 1
    }

    /// Records that a connection's request begins to wait.
    pub(super) fn begin_wait(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the limit for which a request waits.
    pub(super) fn waits_for(&self, limit: Limit) {
        let index = LIMITS.iter().position(|one| *one == limit).map_or(0, |at| at + 1);
        self.limit.store(index as u64, Ordering::Relaxed);
    }

    /// Records that a connection's request has waited this long.
    pub(super) fn end_wait(&self, waited: Duration) {
        self.waited_ns.fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// Records that a connection ends.
    pub(super) fn leave(&self, now: Duration) {
        self.left_ns.store(now.as_nanos() as u64, Ordering::Relaxed);
    }

    fn report(&self, member: &Member) -> LeaseTraffic {
        LeaseTraffic {
            borrower: member.borrower.clone(),
            lease: member.lease,
            traffic: self.traffic.get(),
            waited: Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed)),
            waiting: self.waiting.load(Ordering::Relaxed),
            limit: (self.limit.load(Ordering::Relaxed) as usize)
                .checked_sub(1)
                .and_then(|index| LIMITS.get(index).copied()),
        }
    }
}

impl Traffic {
    fn plus(self, other: Self) -> Self {
        Self {
            received: self.received.saturating_add(other.received),
            sent: self.sent.saturating_add(other.sent),
        }
    }
}

impl Books {
    /// Returns the figures of a borrower at a lease. Its first connection opens them.
    pub(super) fn of(&mut self, member: &Member) -> Arc<LeaseCounters> {
        if !self.leases.contains_key(member) {
            self.sum_up_former();
        }
        Arc::clone(self.leases.entry(member.clone()).or_default())
    }

    /// Forgets a lease that is gone, but for its bytes in the sum.
    pub(super) fn forget(&mut self, lease: LeaseId) {
        let Self { leases, of_gone } = self;
        leases.retain(|member, counters| {
            let stays = member.lease != lease;
            if !stays {
                *of_gone = of_gone.plus(counters.traffic.get());
            }
            stays
        });
    }

    /// Returns all bytes.
    pub(super) fn traffic(&self) -> Traffic {
        let all = self.leases.values().map(|counters| counters.traffic.get());
        all.fold(self.of_gone, Traffic::plus)
    }

    pub(super) fn by_lease(&self) -> Vec<LeaseTraffic> {
        self.leases.iter().map(|(member, counters)| counters.report(member)).collect()
    }

    /// Adds the figures of the borrower that left first to those of the lease's former borrowers,
    /// if too many have left.
    fn sum_up_former(&mut self) {
        let apart = |(member, counters): &(&Member, &Arc<LeaseCounters>)| {
            member.borrower != Borrower::Former && !LeaseCounters::is_in_use(counters)
        };
        let former = self.leases.iter().filter(apart);
        if former.clone().count() < FORMER_APART {
            return;
        }
        let left = |counters: &LeaseCounters| counters.left_ns.load(Ordering::Relaxed);
        let first = former.min_by_key(|(_, counters)| left(counters));
        let Some(first) = first.map(|(member, _)| member.clone()) else { return };
        let Some(counters) = self.leases.remove(&first) else { return };
        let all = Member { borrower: Borrower::Former, ..first };
        let all = self.leases.entry(all).or_default();
        all.traffic.add(counters.traffic.get());
        all.waited_ns.fetch_add(counters.waited_ns.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}
