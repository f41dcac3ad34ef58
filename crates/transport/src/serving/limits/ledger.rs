//! The policy of limits, without clock and I/O: which request passes now, and how long others wait.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_page::LeaseId;

use super::bucket::{Bucket, as_pages};
use super::turns::{Ahead, Line, Turn};
use super::{Allowance, Borrower, ByteRate, LendingLimits, Limit, LimitReached};

/// The least time after which a request whose turn has not come asks again.
const TURN: Duration = Duration::from_micros(200);
/// The longest time that a request sleeps for those before it, as they may end at any moment.
const LONGEST_TURN: Duration = Duration::from_millis(50);

/// A connection's key: its host, then its lease.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Member {
    pub(super) borrower: Borrower,
    pub(super) lease: LeaseId,
}

/// Where others have to wait for a connection's request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Queue {
    /// Nowhere: it waits for its own lease's rates, or not at all.
    #[default]
    None,
    /// Among the leases of its host.
    AtHost,
    /// There, and its host among all hosts.
    AtTotal,
}

/// A connection's place among those that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Queued {
    queue: Queue,
    /// The bytes that its request is queued with.
    bytes: u64,
    /// Its place in the line of its lease; `None` if its request does not wait.
    place: Option<Place>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    number: u64,
    /// Its number among all requests that began to wait.
    arrival: u64,
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
    /// The number of the next request that begins to wait.
    arrivals: u64,
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
    /// The requests that wait; used for leases only.
    line: Line,
}

impl Account {
    fn new(allowance: Allowance, now: Duration) -> Self {
        Self {
            bytes: allowance.bytes.map(|rate| Bucket::new(rate.0.0, now)),
            requests: allowance.requests.map(|rate| Bucket::new(rate.0.into(), now)),
            connections: 0,
            turn: Turn::default(),
            line: Line::default(),
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

    /// Takes bytes, into debt if need be.
    fn charge(&mut self, bytes: u64) {
        if let Some(bucket) = &mut self.bytes {
            bucket.take(bytes);
        }
    }

    fn pay(&mut self, bytes: u64) {
        self.charge(bytes);
        if let Some(bucket) = &mut self.requests {
            bucket.take(1);
        }
    }

    /// Returns how long the account's rates need for these requests; `None` without a rate.
    fn time_for(&self, ahead: Ahead) -> Option<Duration> {
        let of =
            |bucket: &Option<Bucket>, tokens| bucket.as_ref().map(|bucket| bucket.time_for(tokens));
        of(&self.bytes, ahead.bytes).max(of(&self.requests, ahead.requests))
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
        Self { limits, total: None, floor: 0, arrivals: 0, hosts: BTreeMap::new() }
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
        self.step_out(member, queued);
        if queued.place.take().is_some()
            && let Some(host) = self.hosts.get_mut(&member.borrower)
            && let Some(lease) = host.leases.get_mut(&member.lease)
        {
            lease.line.leave();
        }
    }

    /// Takes a connection out of its queues. Its place in the line of its lease stays.
    fn step_out(&mut self, member: &Member, queued: &mut Queued) {
        let (was, bytes) = (std::mem::take(&mut queued.queue), queued.bytes);
        let Some(host) = self.hosts.get_mut(&member.borrower) else { return };
        if was != Queue::None
            && let Some(lease) = host.leases.get_mut(&member.lease)
        {
            lease.turn.unqueue(bytes);
        }
        if was == Queue::AtTotal {
            host.account.turn.unqueue(bytes);
        }
    }

    /// Decides about a connection's next request, of `bytes` bytes of data. Allocates nothing.
    ///
    /// A request must pass its lease's rates, then its host's, then the rate of all. Where it waits
    /// for a rate that it shares, it takes turns with the others that wait there. It sleeps until
    /// the tokens suffice for those before it, so that of many only those next in turn ask often.
    pub(super) fn ask(
        &mut self,
        member: &Member,
        queued: &mut Queued,
        bytes: u64,
        now: Duration,
    ) -> Verdict {
        self.wake(member);
        self.step_out(member, queued);
        let Some(around) = self.around(member, queued, bytes) else { return Verdict::Pass };
        let Self { total, floor, arrivals, hosts, .. } = self;
        let Some(host) = hosts.get_mut(&member.borrower) else { return Verdict::Pass };
        let Some(lease) = host.leases.get_mut(&member.lease) else { return Verdict::Pass };
        let mut line_up = |lease: &mut Account, queued: &mut Queued| {
            if queued.place.is_none() {
                lease.line.join();
                *arrivals += 1;
            }
            (queued.bytes, queued.place) = (bytes, Some(around.place));
        };

        if let Some((wait, is_bytes)) = lease.wait(now) {
            line_up(lease, queued);
            let limit = if is_bytes { Limit::LeaseBytes } else { Limit::LeaseRequests };
            return Verdict::Wait(wait + bounded(lease.time_for(around.in_line)), limit);
        }
        let of_total = total.as_ref().map_or(u64::MAX, Bucket::per_millisecond);
        let of_host = host.account.quantum().unwrap_or(of_total);
        let its_turn = lease.turn.may_pass(around.least_lease, of_host);
        let of_host_waits = host.account.wait(now);
        if of_host_waits.is_some() || !its_turn {
            line_up(lease, queued);
            lease.turn.queue(bytes, around.place.arrival);
            queued.queue = Queue::AtHost;
            let own = host.account.time_for(around.in_host);
            let of_all = || total.as_ref().map(|total| total.time_for(around.in_host.bytes));
            let rest = bounded(own.or_else(of_all));
            let (wait, is_bytes) =
                of_host_waits.unwrap_or((Duration::ZERO, host.account.bytes.is_some()));
            let limit = match (own.is_some(), is_bytes) {
                (false, _) => Limit::Total,
                (_, true) => Limit::HostBytes,
                (_, false) => Limit::HostRequests,
            };
            let least = if of_host_waits.is_some() { Duration::ZERO } else { TURN };
            return Verdict::Wait((wait + rest).max(least), limit);
        }
        if let Some(total) = total {
            let wait = total.wait(now);
            let its_turn = host.account.turn.may_pass(around.least_host, total.per_millisecond());
            if !wait.is_zero() || !its_turn {
                line_up(lease, queued);
                lease.turn.queue(bytes, around.place.arrival);
                host.account.turn.queue(bytes, around.place.arrival);
                queued.queue = Queue::AtTotal;
                let rest = bounded(Some(total.time_for(around.in_all.bytes)));
                return Verdict::Wait((wait + rest).max(TURN), Limit::Total);
            }
            total.take(bytes);
        }
        if queued.place.take().is_some() {
            lease.line.leave();
        }
        lease.pay(bytes);
        host.account.pay(bytes);
        lease.turn.pass(&mut host.floor, of_host, bytes);
        host.account.turn.pass(floor, of_total, bytes);
        Verdict::Pass
    }

    /// Charges a connection for work that its request turned out to take, as if it were bytes.
    pub(super) fn charge(&mut self, member: &Member, bytes: u64) {
        if let Some(total) = &mut self.total {
            total.take(bytes);
        }
        if let Some(host) = self.hosts.get_mut(&member.borrower) {
            let lease = host.leases.get_mut(&member.lease);
            for account in lease.into_iter().chain([&mut host.account]) {
                account.charge(bytes);
                account.turn.charge(bytes);
            }
        }
    }

    /// Returns what waits around a connection; `None` if it has not joined.
    fn around(&self, member: &Member, queued: &Queued, bytes: u64) -> Option<Around> {
        let host = self.hosts.get(&member.borrower)?;
        let lease = host.leases.get(&member.lease)?;
        let new = || Place { number: lease.line.next(), arrival: self.arrivals };
        let place = queued.place.unwrap_or_else(new);
        let in_line = lease.line.before(place.number, bytes);
        let leases = host.leases.values().map(|lease| &lease.turn);
        let mut in_host = in_line;
        let least_lease = lease.turn.among(leases, place.arrival, &mut in_host);
        // Hosts take turns at the rate of all only.
        let hosts = self.hosts.values().filter(|_| self.total.is_some());
        let hosts = hosts.map(|host| &host.account.turn);
        let mut in_all = in_host;
        let least_host = host.account.turn.among(hosts, place.arrival, &mut in_all);
        Some(Around { place, least_lease, least_host, in_line, in_host, in_all })
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

/// What waits around a connection.
struct Around {
    place: Place,
    /// What the waiting lease of its host got that got least.
    least_lease: Option<u64>,
    /// What the waiting host got that got least.
    least_host: Option<u64>,
    /// Requests before it at its own lease.
    in_line: Ahead,
    /// These, and those of its host's other leases.
    in_host: Ahead,
    /// All of them, also of other hosts.
    in_all: Ahead,
}

fn bounded(time: Option<Duration>) -> Duration {
    time.unwrap_or_default().min(LONGEST_TURN)
}

#[cfg(test)]
mod tests;
