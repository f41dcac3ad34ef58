//! The gate that all connections of a lender's servers pass, each request in its turn.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, LeaseId, lock};

use super::ledger::{Ledger, Member, Queued, Verdict};
use super::{Borrower, ByteRate, LendingLimits, Limit, LimitReached};

/// The longest time that a request waits before it asks again: a connection that ends meanwhile, or
/// a limit that is lifted, is seen within it.
const SLICE: Duration = Duration::from_millis(50);
/// The shortest: below it, sleeping costs more than it waits.
const LEAST_SLICE: Duration = Duration::from_micros(100);

/// The limits of one lender, for all servers of its leases.
///
/// Its lock covers arithmetic only: no thread waits or does I/O while it holds it. If no request
/// can wait, no request takes it.
pub struct Gate {
    /// Whether a request may have to wait.
    is_active: AtomicBool,
    books: Mutex<Books>,
    traffic: Counters,
    clock: Box<dyn Fn() -> Duration + Send + Sync>,
}

#[derive(Debug)]
struct Books {
    ledger: Ledger,
    leases: BTreeMap<Member, Arc<LeaseCounters>>,
}

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
struct Counters {
    received: AtomicU64,
    sent: AtomicU64,
}

#[derive(Debug, Default)]
struct LeaseCounters {
    traffic: Counters,
    waited_ns: AtomicU64,
    waiting: AtomicU64,
    /// The last limit, as an index of [`LIMITS`] plus 1.
    limit: AtomicU64,
}

const LIMITS: [Limit; 5] =
    [Limit::LeaseBytes, Limit::LeaseRequests, Limit::HostBytes, Limit::HostRequests, Limit::Total];

impl Counters {
    fn add(&self, traffic: Traffic) {
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

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("books", &self.books).finish_non_exhaustive()
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
            books: Mutex::new(Books { ledger, leases: BTreeMap::new() }),
            traffic: Counters::default(),
            clock: Box::new(clock),
        })
    }

    /// Sets the rate that all borrowers share; `None` for no limit.
    pub fn set_total(&self, rate: Option<ByteRate>) {
        let mut books = self.books();
        books.ledger.set_total(rate, (self.clock)());
        self.is_active.store(books.ledger.can_wait(), Ordering::Relaxed);
    }

    /// Checks whether [`enter`](Self::enter) would admit a connection now.
    ///
    /// # Errors
    /// [`LimitReached`], which names the limit and its value.
    pub fn check(&self, borrower: &Borrower, lease: LeaseId) -> Result<(), LimitReached> {
        self.books().ledger.check(&Member { borrower: borrower.clone(), lease })
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
        let mut books = self.books();
        books.ledger.join(&member, (self.clock)())?;
        let counters = Arc::clone(books.leases.entry(member.clone()).or_default());
        drop(books);
        let (gate, queued, traffic) = (Arc::clone(self), Queued::No, Traffic::default());
        Ok(Pass { gate, member, counters, queued, since: None, traffic })
    }

    /// Forgets what borrowers did with a lease that is gone.
    pub fn forget(&self, lease: LeaseId) {
        self.books().leases.retain(|member, _| member.lease != lease);
    }

    /// Returns the bytes of all borrowers since the start.
    pub fn traffic(&self) -> Traffic {
        self.traffic.get()
    }

    /// Returns what each borrower did with each lease.
    pub fn by_lease(&self) -> Vec<LeaseTraffic> {
        let report = |(member, counters): (&Member, &Arc<LeaseCounters>)| LeaseTraffic {
            borrower: member.borrower.clone(),
            lease: member.lease,
            traffic: counters.traffic.get(),
            waited: Duration::from_nanos(counters.waited_ns.load(Ordering::Relaxed)),
            waiting: counters.waiting.load(Ordering::Relaxed),
            limit: (counters.limit.load(Ordering::Relaxed) as usize)
                .checked_sub(1)
                .and_then(|index| LIMITS.get(index).copied()),
        };
        self.books().leases.iter().map(report).collect()
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        // No change can panic half way.
        lock(&self.books)
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
            self.gate.books().ledger.unqueue(&self.member, &mut self.queued);
            prepare(connection)?;
            while let Some(time) = self.ask(bytes) {
                pause(connection, time)?;
            }
        }
        self.traffic.sent.0 += traffic.sent.0;
        self.traffic.received.0 += traffic.received.0;
        Ok(())
    }

    /// Asks for a turn for a request of so many bytes. Returns the time to wait before the next
    /// question, if it has to wait.
    fn ask(&mut self, bytes: u64) -> Option<Duration> {
        if !self.gate.is_active.load(Ordering::Relaxed) && self.since.is_none() {
            return None;
        }
        let now = (self.gate.clock)();
        let verdict = self.gate.books().ledger.ask(&self.member, &mut self.queued, bytes, now);
        match verdict {
            Verdict::Pass => {
                self.end_wait(now);
                None
            }
            Verdict::Wait(wait, limit) => {
                if self.since.is_none() {
                    self.since = Some(now);
                    self.tell_traffic();
                    self.counters.waiting.fetch_add(1, Ordering::Relaxed);
                }
                let index = LIMITS.iter().position(|one| *one == limit).map_or(0, |at| at + 1);
                self.counters.limit.store(index as u64, Ordering::Relaxed);
                Some(wait.clamp(LEAST_SLICE, SLICE))
            }
        }
    }

    /// Adds the counted bytes to the lease's, once for many requests.
    pub fn tell_traffic(&mut self) {
        let traffic = std::mem::take(&mut self.traffic);
        self.counters.traffic.add(traffic);
        self.gate.traffic.add(traffic);
    }

    fn end_wait(&mut self, now: Duration) {
        if let Some(since) = self.since.take() {
            let waited = now.saturating_sub(since).as_nanos() as u64;
            self.counters.waited_ns.fetch_add(waited, Ordering::Relaxed);
            self.counters.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.tell_traffic();
        self.end_wait((self.gate.clock)());
        self.gate.books().ledger.leave(&self.member, &mut self.queued);
    }
}

#[cfg(test)]
mod tests {
    use aquifer_page::HostName;

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
}
