//! The policy of limits, without clock and I/O: which request passes now, and how long others wait.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_page::LeaseId;

use super::bucket::{Bucket, as_pages};
use super::turns::Turn;
use super::{Allowance, Borrower, ByteRate, LendingLimits, Limit, LimitReached};

/// Time after which a request whose turn has not come asks again.
const TURN: Duration = Duration::from_micros(200);

/// A connection's key: its host, then its lease.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Member {
    pub(super) borrower: Borrower,
    pub(super) lease: LeaseId,
}

/// Where a connection's request is queued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Queued {
    /// Nowhere: no other borrower has to wait for it.
    #[default]
    No,
    /// Among the leases of its host.
    AtHost,
    /// There, and its host among all hosts.
    AtTotal,
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It may pass, and has paid.
    Pass,
    /// It must ask again after this time.
    Wait(Duration, Limit),
}

/// What hosts and leases have left.
#[derive(Debug)]
pub(super) struct Ledger {
    limits: LendingLimits,
    total: Option<Bucket>,
    /// Where hosts start that were idle.
    floor: u64,
    hosts: BTreeMap<Borrower, Host>,
}

#[derive(Debug)]
struct Host {
    account: Account,
    /// Where leases start that were idle.
    floor: u64,
    leases: BTreeMap<LeaseId, Account>,
}

#[derive(Debug)]
struct Account {
    bytes: Option<Bucket>,
    requests: Option<Bucket>,
    connections: u32,
    turn: Turn,
}

impl Account {
    fn new(allowance: Allowance, now: Duration) -> Self {
        Self {
            bytes: allowance.bytes.map(|rate| Bucket::new(rate.0.0, now)),
            requests: allowance.requests.map(|rate| Bucket::new(rate.0.into(), now)),
            connections: 0,
            turn: Turn::default(),
        }
    }

    /// Returns the longer wait of the two buckets, if there is any, and whether it is for bytes.
    fn wait(&mut self, now: Duration) -> Option<(Duration, bool)> {
        let wait = |bucket: &mut Option<Bucket>| {
            bucket.as_mut().map_or(Duration::ZERO, |bucket| bucket.wait(now))
        };
        let (bytes, requests) = (wait(&mut self.bytes), wait(&mut self.requests));
        let longest = bytes.max(requests);
        (!longest.is_zero()).then_some((longest, bytes >= requests))
    }

    fn pay(&mut self, bytes: u64) {
        if let Some(bucket) = &mut self.bytes {
            bucket.take(bytes);
        }
        if let Some(bucket) = &mut self.requests {
            bucket.take(1);
        }
    }

    /// Returns what the account may take in a millisecond, if it has a rate.
    fn quantum(&self) -> Option<u64> {
        let bytes = self.bytes.as_ref().map(Bucket::per_millisecond);
        let requests = self.requests.as_ref().map(|bucket| as_pages(bucket.per_millisecond()));
        bytes.into_iter().chain(requests).min()
    }

    /// Returns whether the account can be made anew without a gain for its borrower.
    fn is_spent(&mut self, now: Duration) -> bool {
        let full =
            |bucket: &mut Option<Bucket>| bucket.as_mut().is_none_or(|bucket| bucket.is_full(now));
        self.connections == 0 && full(&mut self.bytes) && full(&mut self.requests)
    }
}

impl Ledger {
    pub(super) fn new(limits: LendingLimits) -> Self {
        Self { limits, total: None, floor: 0, hosts: BTreeMap::new() }
    }

    /// Sets the bytes a second of all borrowers together.
    pub(super) fn set_total(&mut self, rate: Option<ByteRate>, now: Duration) {
        match (&mut self.total, rate) {
            (Some(bucket), Some(rate)) => bucket.set_rate(rate.0.0, now),
            (None, None) => {}
            (total, rate) => {
                *total = rate.map(|rate| Bucket::new(rate.0.0, now));
                // What hosts got while they shared nothing must not count against them.
                self.forget_turns();
            }
        }
    }

    /// Returns whether any request may have to wait.
    pub(super) fn can_wait(&self) -> bool {
        self.total.is_some() || self.limits.has_rates()
    }

    /// Checks whether a connection would be admitted.
    pub(super) fn check(&self, member: &Member) -> Result<(), LimitReached> {
        let host = self.hosts.get(&member.borrower);
        let has = |account: Option<&Account>| account.map_or(0, |account| account.connections);
        let of_host = has(host.map(|host| &host.account));
        if self.limits.host.connections.is_some_and(|most| of_host >= most) {
            return Err(LimitReached::Host(member.borrower.clone(), of_host));
        }
        let of_lease = has(host.and_then(|host| host.leases.get(&member.lease)));
        if self.limits.lease.connections.is_some_and(|most| of_lease >= most) {
            return Err(LimitReached::Lease(member.lease, of_lease));
        }
        Ok(())
    }

    /// Takes in a connection; [`leave`](Self::leave) must follow.
    pub(super) fn join(&mut self, member: &Member, now: Duration) -> Result<(), LimitReached> {
        self.check(member)?;
        self.forget_spent(now);
        let LendingLimits { host: of_host, lease: of_lease } = self.limits;
        let host = self.hosts.entry(member.borrower.clone()).or_insert_with(|| Host {
            account: Account::new(of_host, now),
            floor: 0,
            leases: BTreeMap::new(),
        });
        host.account.connections += 1;
        let lease = host.leases.entry(member.lease);
        lease.or_insert_with(|| Account::new(of_lease, now)).connections += 1;
        Ok(())
    }

    /// Removes a connection. Its debts stay until they are paid, also if it comes back.
    pub(super) fn leave(&mut self, member: &Member, queued: &mut Queued) {
        self.unqueue(member, queued);
        if let Some(host) = self.hosts.get_mut(&member.borrower) {
            host.account.connections -= 1;
            if let Some(lease) = host.leases.get_mut(&member.lease) {
                lease.connections -= 1;
            }
        }
    }

    fn forget_turns(&mut self) {
        self.floor = 0;
        for host in self.hosts.values_mut() {
            host.account.turn.reset();
            host.floor = 0;
            host.leases.values_mut().for_each(|lease| lease.turn.reset());
        }
    }

    fn forget_spent(&mut self, now: Duration) {
        self.hosts.retain(|_, host| {
            host.leases.retain(|_, lease| !lease.is_spent(now));
            !host.leases.is_empty() || !host.account.is_spent(now)
        });
    }

    /// Gives up a connection's place among those that wait.
    pub(super) fn unqueue(&mut self, member: &Member, queued: &mut Queued) {
        let was = std::mem::take(queued);
        let Some(host) = self.hosts.get_mut(&member.borrower) else { return };
        if was != Queued::No
            && let Some(lease) = host.leases.get_mut(&member.lease)
        {
            lease.turn.unqueue();
        }
        if was == Queued::AtTotal {
            host.account.turn.unqueue();
        }
    }

    /// Decides about a connection's next request, of `bytes` bytes of data. Allocates nothing.
    ///
    /// A request must pass its lease's rates, then its host's, then the rate of all. Where it waits
    /// for a rate that it shares, it takes turns with the others that wait there.
    pub(super) fn ask(
        &mut self,
        member: &Member,
        queued: &mut Queued,
        bytes: u64,
        now: Duration,
    ) -> Verdict {
        self.wake(member);
        self.unqueue(member, queued);
        let least_host = self.hosts.values().filter_map(|host| host.account.turn.waits_at()).min();
        let Self { total, floor, hosts, .. } = self;
        let Some(host) = hosts.get_mut(&member.borrower) else { return Verdict::Pass };
        let least_lease = host.leases.values().filter_map(|lease| lease.turn.waits_at()).min();
        let Some(lease) = host.leases.get_mut(&member.lease) else { return Verdict::Pass };

        if let Some((wait, bytes)) = lease.wait(now) {
            let limit = if bytes { Limit::LeaseBytes } else { Limit::LeaseRequests };
            return Verdict::Wait(wait, limit);
        }
        let of_total = total.as_ref().map_or(u64::MAX, Bucket::per_millisecond);
        let of_host = host.account.quantum().unwrap_or(of_total);
        let its_turn = lease.turn.may_pass(least_lease, of_host);
        let of_host_waits = host.account.wait(now);
        if of_host_waits.is_some() || !its_turn {
            lease.turn.queue();
            *queued = Queued::AtHost;
            let (wait, bytes) = of_host_waits.unwrap_or((TURN, host.account.bytes.is_some()));
            let limited = host.account.quantum().is_some();
            return Verdict::Wait(
                wait,
                match (limited, bytes) {
                    (false, _) => Limit::Total,
                    (_, true) => Limit::HostBytes,
                    (_, false) => Limit::HostRequests,
                },
            );
        }
        if let Some(total) = total {
            let wait = total.wait(now);
            let its_turn = host.account.turn.may_pass(least_host, total.per_millisecond());
            if !wait.is_zero() || !its_turn {
                lease.turn.queue();
                host.account.turn.queue();
                *queued = Queued::AtTotal;
                return Verdict::Wait(wait.max(TURN), Limit::Total);
            }
            total.take(bytes);
        }
        lease.pay(bytes);
        host.account.pay(bytes);
        lease.turn.pass(&mut host.floor, of_host, bytes);
        host.account.turn.pass(floor, of_total, bytes);
        Verdict::Pass
    }

    /// Moves a host and a lease that were idle up to those that were not.
    fn wake(&mut self, member: &Member) {
        if let Some(host) = self.hosts.get_mut(&member.borrower) {
            host.account.turn.wake(self.floor);
            if let Some(lease) = host.leases.get_mut(&member.lease) {
                lease.turn.wake(host.floor);
            }
        }
    }
}

#[cfg(test)]
mod tests;
