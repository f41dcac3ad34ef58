//! The gate that all connections of a lender's servers pass, each request in its turn.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, LeaseId, lock};

use super::books::{Books, LeaseCounters, LeaseTraffic, Traffic};
use super::ledger::{Ledger, Member, Queued, Verdict};
use super::{Borrower, ByteRate, LendingLimits, LimitReached};

/// The longest time that a request waits before it asks again: a connection that ends meanwhile, or
/// a limit that is lifted, is seen within it.
const SLICE: Duration = Duration::from_millis(50);
/// The shortest: below it, sleeping costs more than it waits.
const LEAST_SLICE: Duration = Duration::from_micros(100);
/// Freed bytes that cost a lender as much as one byte that it sends or receives.
const FREED_PER_BYTE: u64 = 8;
/// The most that one discard counts, in bytes: its pages may have been free before.
const MOST_FREED: u64 = 1 << 20;

/// The limits of one lender, for all servers of its leases.
///
/// Its lock covers arithmetic only: no thread waits or does I/O while it holds it. If no request
/// can wait, no request takes it.
pub struct Gate {
    /// Whether a request may have to wait.
    is_active: AtomicBool,
    state: Mutex<State>,
    clock: Box<dyn Fn() -> Duration + Send + Sync>,
}

#[derive(Debug)]
struct State {
    ledger: Ledger,
    books: Books,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Gate {
    /// Makes the gate of a lender.
    pub fn new(limits: LendingLimits) -> Arc<Self> {
        let start = Instant::now();
        Self::with_clock(limits, move || start.elapsed())
    }

    /// Makes a gate that reads the time from `clock`, for tests.
    pub fn with_clock(
        limits: LendingLimits,
        clock: impl Fn() -> Duration + Send + Sync + 'static,
    ) -> Arc<Self> {
        let ledger = Ledger::new(limits);
        Arc::new(Self {
            is_active: AtomicBool::new(ledger.can_wait()),
            state: Mutex::new(State { ledger, books: Books::default() }),
            clock: Box::new(clock),
        })
    }

    /// Sets the rate that all borrowers share; `None` for no limit.
    pub fn set_total(&self, rate: Option<ByteRate>) {
        let mut state = self.state();
        state.ledger.set_total(rate, (self.clock)());
        self.is_active.store(state.ledger.can_wait(), Ordering::Relaxed);
    }

    /// Checks whether [`enter`](Self::enter) would admit a connection now.
    ///
    /// # Errors
    /// [`LimitReached`], which names the limit and its value.
    pub fn check(&self, borrower: &Borrower, lease: LeaseId) -> Result<(), LimitReached> {
        self.state().ledger.check(&Member { borrower: borrower.clone(), lease })
    }

    /// Admits a connection to a lease.
    ///
    /// # Errors
    /// [`LimitReached`], which names the limit and its value.
    pub fn enter(
        self: &Arc<Self>,
        borrower: Borrower,
        lease: LeaseId,
    ) -> Result<Pass, LimitReached> {
        let member = Member { borrower, lease };
        let mut state = self.state();
        state.ledger.join(&member, (self.clock)())?;
        let counters = state.books.of(&member);
        drop(state);
        let (gate, queued, traffic) = (Arc::clone(self), Queued::default(), Traffic::default());
        Ok(Pass { gate, member, counters, queued, since: None, traffic })
    }

    /// Forgets what borrowers did with a lease that is gone.
    pub fn forget(&self, lease: LeaseId) {
        self.state().books.forget(lease);
    }

    /// Returns the bytes of all borrowers since the start. What a connection moves after its lease
    /// was [forgotten](Self::forget) does not count.
    pub fn traffic(&self) -> Traffic {
        self.state().books.traffic()
    }

    /// Returns what each borrower did with each lease. Of those that have left, only the last few
    /// hundred are told apart: others are summed up for each lease as [`Borrower::Former`].
    pub fn by_lease(&self) -> Vec<LeaseTraffic> {
        self.state().books.by_lease()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No change can panic half way.
        lock(&self.state)
    }
}

/// One connection's admission, until dropped.
#[derive(Debug)]
pub struct Pass {
    gate: Arc<Gate>,
    member: Member,
    counters: Arc<LeaseCounters>,
    queued: Queued,
    /// When the present request began to wait.
    since: Option<Duration>,
    /// Bytes that `counters` do not have yet.
    traffic: Traffic,
}

impl Pass {
    /// Waits until a request that moves these bytes may go on, and counts them. Before the wait it
    /// calls `prepare`, which may block: others take their turns meanwhile. Then it calls `pause`
    /// with each slice of the wait. The caller reads no further requests until this returns.
    ///
    /// Allocates nothing. Costs one load if no limit is set.
    ///
    /// # Errors
    /// That of `prepare` or `pause`, which ends the wait: as if the connection has ended.
    pub fn wait<C, E>(
        &mut self,
        traffic: Traffic,
        connection: &mut C,
        prepare: impl FnOnce(&mut C) -> Result<(), E>,
        mut pause: impl FnMut(&mut C, Duration) -> Result<(), E>,
    ) -> Result<(), E> {
        let bytes = traffic.sent.0.saturating_add(traffic.received.0);
        if self.ask(bytes).is_some() {
            // A borrower that reads no replies can block here. Nobody may wait for its turn.
            self.gate.state().ledger.unqueue(&self.member, &mut self.queued);
            prepare(connection)?;
            while let Some(time) = self.ask(bytes) {
                pause(connection, time)?;
            }
        }
        self.traffic.sent.0 += traffic.sent.0;
        self.traffic.received.0 += traffic.received.0;
        Ok(())
    }

    /// Charges the borrower for a discard of so many bytes, after its [`wait`](Self::wait): an
    /// eighth of them, but at most 1 MiB. Later requests wait for it. (A tmpfs frees a page in 0.6
    /// us, and copies one in 0.7 to 1.5 us, besides the work for the network.)
    pub fn freed(&mut self, bytes: Bytes) {
        let charge = (bytes.0 / FREED_PER_BYTE).min(MOST_FREED);
        if charge > 0 && self.gate.is_active.load(Ordering::Relaxed) {
            self.gate.state().ledger.charge(&self.member, charge);
        }
    }

    /// Asks for a turn for a request of so many bytes. Returns the time to wait before the next
    /// question, if it has to wait.
    fn ask(&mut self, bytes: u64) -> Option<Duration> {
        if !self.gate.is_active.load(Ordering::Relaxed) && self.since.is_none() {
            return None;
        }
        let now = (self.gate.clock)();
        let verdict = self.gate.state().ledger.ask(&self.member, &mut self.queued, bytes, now);
        match verdict {
            Verdict::Pass => {
                self.end_wait(now);
                None
            }
            Verdict::Wait(wait, limit) => {
                if self.since.is_none() {
                    self.since = Some(now);
                    self.tell_traffic();
                    self.counters.begin_wait();
                }
                self.counters.waits_for(limit);
                Some(wait.clamp(LEAST_SLICE, SLICE))
            }
        }
    }

    /// Adds the counted bytes to the lease's, once for many requests.
    pub fn tell_traffic(&mut self) {
        let traffic = std::mem::take(&mut self.traffic);
        self.counters.traffic.add(traffic);
    }

    fn end_wait(&mut self, now: Duration) {
        if let Some(since) = self.since.take() {
            self.counters.end_wait(now.saturating_sub(since));
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let now = (self.gate.clock)();
        self.tell_traffic();
        self.end_wait(now);
        self.counters.leave(now);
        self.gate.state().ledger.leave(&self.member, &mut self.queued);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use aquifer_page::HostName;

    use super::super::Allowance;
    use super::super::books::FORMER_APART;
    use super::*;

    const PAGE: Traffic = Traffic { sent: Bytes(4096), received: Bytes::ZERO };

    #[test]
    fn nobody_waits_for_a_borrower_that_takes_no_answers() {
        let time = Arc::new(AtomicU64::new(0));
        let clock = Arc::clone(&time);
        let now = move || Duration::from_millis(clock.load(Ordering::SeqCst));
        let gate = Gate::with_clock(LendingLimits::default(), now);
        gate.set_total(Some(ByteRate(Bytes(4096 * 1000))));
        let enter = |name: &str, lease| {
            let host = HostName::try_from(name.to_owned()).expect("a name");
            gate.enter(Borrower::Host(host), LeaseId(lease)).expect("no limit of connections")
        };
        let (mut lazy, mut other) = (enter("lazy", 1), enter("other", 2));
        // Each look at the clock is a millisecond later, and too many are an error.
        let later = |looks: &mut u32, _| {
            time.fetch_add(1, Ordering::SeqCst);
            *looks += 1;
            if *looks < 100 { Ok(()) } else { Err("it waits for ever") }
        };
        lazy.wait(PAGE, &mut 0, |_| Ok(()), later).expect("the first passes");
        // Its next request waits. First it would send answers, which blocks.
        let block =
            |_: &mut u32| (0..50).try_for_each(|_| other.wait(PAGE, &mut 0, |_| Ok(()), later));
        lazy.wait(PAGE, &mut 0, block, later).expect("the other host goes on");
    }

    #[test]
    fn strangers_without_end_leave_few_entries_and_right_sums() {
        let time = Arc::new(AtomicU64::new(0));
        let clock = Arc::clone(&time);
        let now = move || Duration::from_nanos(clock.fetch_add(1, Ordering::SeqCst));
        let gate = Gate::with_clock(LendingLimits::default(), now);
        let use_once = |number: u32, lease| {
            let borrower = Borrower::Address(std::net::Ipv4Addr::from_bits(number).into());
            let mut pass = gate.enter(borrower, LeaseId(lease)).expect("no limit is reached");
            let done = pass.wait(PAGE, &mut (), |_| Ok(()), |_, _| Err("no request waits"));
            assert_eq!(done, Ok(()));
            pass
        };
        let stays = use_once(0, 1);
        let others = 4 * FORMER_APART as u32;
        (1..others).for_each(|number| drop(use_once(number, u128::from(number % 2))));
        drop(use_once(others - 1, 1));
        let all = gate.by_lease();
        // One that has a connection, and for each lease one of all that have left.
        assert_eq!(all.len(), FORMER_APART + 3);
        let sum = all.iter().map(|one| one.traffic.sent).sum::<Bytes>();
        // The connection that stays tells its bytes when it waits for requests.
        assert_eq!(sum, Bytes(PAGE.sent.0 * u64::from(others)));
        assert_eq!(gate.traffic(), Traffic { sent: sum, received: Bytes::ZERO });
        let last = Borrower::Address(std::net::Ipv4Addr::from_bits(others - 1).into());
        assert!(all.iter().any(|one| one.borrower == last), "the last ones are told apart");
        gate.forget(LeaseId(0));
        assert!(gate.by_lease().iter().all(|one| one.lease == LeaseId(1)));
        assert_eq!(gate.traffic().sent, sum, "a lease that is gone has had its bytes");
        drop(stays);
        assert_eq!(gate.traffic().sent, sum.saturating_add(PAGE.sent));
    }

    #[test]
    fn a_discard_makes_the_next_request_wait() {
        let bytes = Some(ByteRate(Bytes::mib(1)));
        let lease = Allowance { bytes, ..Allowance::default() };
        let limits = LendingLimits { lease, ..LendingLimits::default() };
        let gate = Gate::with_clock(limits, || Duration::ZERO);
        let mut pass = gate.enter(Borrower::Local, LeaseId(1)).expect("no limit is reached");
        // The burst is a tenth of a second: 102 KiB.
        let waits = |pass: &mut Pass| {
            pass.wait(Traffic::default(), &mut (), |()| Ok(()), |(), _| Err("it waits")).is_err()
        };
        pass.freed(Bytes::kib(8 * 100));
        assert!(!waits(&mut pass), "100 KiB are charged");
        pass.freed(Bytes::kib(8 * 3));
        assert!(waits(&mut pass), "103 KiB are charged");
        assert_eq!(gate.traffic(), Traffic::default(), "no byte was moved");
    }
}
