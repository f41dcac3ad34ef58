//! A holder on a lender, by any protocol.

use std::array;
use std::fmt;
use std::iter;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, EXTENT_SIZE, Incarnation, PAGE_SIZE, WorkerId};
use aquifer_transport::initiator::{Initiator, InitiatorError, Operation, Outcome};
use aquifer_transport::names;
use aquifer_transport::sleep::going_to_sleep;

use super::source::Source;
use super::{Holder, HolderError, Piece, PieceMut, write_zeroes};
use crate::{lock, lock_any};

/// The number of reads or writes that a call has in flight.
const MANY: usize = 64;
/// The longest single discard in bytes, which fits the 32 bits of a request.
const LONGEST_DISCARD: u64 = 1 << 30;
/// The pause between two attempts to connect: the first and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(250));
/// The shortest time for an attempt to connect, even if the timeout is nearly over.
const SHORTEST_ATTEMPT: Duration = Duration::from_secs(1);
/// Once the timeout is over: the pause between two attempts of all threads together.
const REST: Duration = Duration::from_secs(2);

/// A connection of the worker to the lease.
type Link = Box<dyn Initiator>;

/// A lease of a lender, with a connection for each worker.
///
/// If a connection breaks, the worker connects again and retries the operation, until the lender
/// has been unreachable for `io_timeout`. From then on operations fail at once, except for one now
/// and then that tries to connect. A kernel that swaps has thousands of operations and waits for
/// each of them.
///
/// If one connection breaks, all connections of its epoch end. Only then can the lender tell old
/// requests from new ones. It carries out no old request once it has accepted a newer connection.
pub struct RemoteHolder {
    source: Source,
    links: Box<[Mutex<Option<Link>>]>,
    io_timeout: Duration,
    /// A shorter timeout, in milliseconds; 0 for `io_timeout`.
    patience: AtomicU64,
    /// Milliseconds from `started` to the time when the lender was found unreachable, plus one; 0
    /// while it is reachable.
    lost_at: AtomicU64,
    /// Milliseconds from `started` to the last attempt after the timeout.
    tried_at: AtomicU64,
    started: Instant,
    /// Whether the lender's last error said that the stored data is gone.
    forgot: AtomicBool,
    closed: AtomicBool,
}

impl fmt::Debug for RemoteHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteHolder").field("source", &self.source).finish_non_exhaustive()
    }
}

impl RemoteHolder {
    /// Connects `workers` times.
    ///
    /// # Errors
    /// When the lender cannot be reached, or refuses the handshake.
    pub fn connect(
        source: Source,
        workers: usize,
        io_timeout: Duration,
    ) -> Result<Self, InitiatorError> {
        let first = source.connect(io_timeout / 2)?;
        // If connections do not see each other's writes, all workers share one.
        let more = if first.can_multi_conn() { workers.max(1) - 1 } else { 0 };
        let connect = |_| source.connect(io_timeout / 2).map(Some);
        let links = iter::once(Ok(Some(first))).chain((0..more).map(connect));
        let links = links.collect::<Result<Vec<_>, _>>()?;
        Ok(Self::with_links(source, links, io_timeout))
    }

    /// Makes a holder in which each worker connects at its first operation.
    pub fn unconnected(source: Source, workers: usize, io_timeout: Duration) -> Self {
        let links = (0..workers.max(1)).map(|_| None).collect();
        Self::with_links(source, links, io_timeout)
    }

    fn with_links(source: Source, links: Vec<Option<Link>>, io_timeout: Duration) -> Self {
        let links = links.into_iter().map(Mutex::new).collect();
        let (lost_at, tried_at, started) = (AtomicU64::new(0), AtomicU64::new(0), Instant::now());
        let (forgot, closed) = (AtomicBool::new(false), AtomicBool::new(false));
        let patience = AtomicU64::new(0);
        Self { source, links, io_timeout, patience, lost_at, tried_at, started, forgot, closed }
    }

    fn io_timeout(&self) -> Duration {
        match self.patience.load(Ordering::Relaxed) {
            0 => self.io_timeout,
            patience => Duration::from_millis(patience).min(self.io_timeout),
        }
    }

    /// Returns the incarnation of the lease's pages, if the lender tells it.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.source.incarnation()
    }

    /// Returns the size of the export or namespace, and whether it is read-only.
    ///
    /// # Errors
    /// When the lender can no longer be reached.
    pub fn facts(&self) -> Result<(Bytes, bool), HolderError> {
        let mut facts = (Bytes::ZERO, false);
        self.with(WorkerId(0), |link| {
            facts = (link.size(), link.is_read_only());
            Ok(())
        })?;
        Ok(facts)
    }

    /// Returns whether the whole range is known to be a hole that reads as zeroes.
    ///
    /// # Errors
    /// When the lender can no longer be reached, or refuses the query.
    pub fn is_hole(&self, offset: u64, length: u32) -> Result<bool, HolderError> {
        let mut hole = 0;
        self.with(WorkerId(0), |link| {
            hole = link.hole(offset, length)?;
            Ok(())
        })?;
        Ok(hole >= u64::from(length))
    }

    /// Runs `operation` on the worker's connection, and again on a new one if that breaks.
    fn with(
        &self,
        worker: WorkerId,
        mut operation: impl FnMut(&mut dyn Initiator) -> Result<(), InitiatorError>,
    ) -> Result<(), HolderError> {
        self.with_answer(worker, |link| operation(link).map(|()| true)).map(drop)
    }

    /// Runs `operation` as [`with`](Self::with) does. It returns whether the lender answered.
    fn with_answer(
        &self,
        worker: WorkerId,
        mut operation: impl FnMut(&mut dyn Initiator) -> Result<bool, InitiatorError>,
    ) -> Result<bool, HolderError> {
        let mut link = lock_any(&self.links, worker);
        let started = Instant::now();
        let mut has_failed = false;
        // Another connection of this epoch broke, so the lender ends this one too.
        let current = link.take_if(|link| link.epoch() != self.source.epoch());
        drop(current);
        if let Some(connection) = &mut *link {
            connection.set_io_timeout(self.io_timeout() / 2);
            match operation(&mut **connection) {
                Ok(has_answered) => {
                    if has_answered {
                        self.found();
                    }
                    return Ok(has_answered);
                }
                Err(error) if error.ends_connection() => {
                    self.source.broke(connection.epoch());
                    *link = None;
                    has_failed = true;
                }
                Err(error) => return Err(answer(error)),
            }
        }
        self.persist(&mut link, (started, has_failed), operation)
    }

    fn write_pieces(
        &self,
        worker: WorkerId,
        pieces: &[Piece<'_>],
        mut meanwhile: Option<&mut dyn FnMut()>,
    ) -> Result<(), HolderError> {
        self.with(worker, |link| {
            let longest = longest_transfer(link);
            let parts = pieces
                .iter()
                .flat_map(|&(offset, from)| (offset..).step_by(longest).zip(from.chunks(longest)));
            let writes = parts.map(|(offset, from)| Operation::Write { offset, from });
            let again = meanwhile.as_mut().map(|meanwhile| &mut **meanwhile as &mut dyn FnMut());
            transfer(link, writes, again)
        })
    }

    fn persist(
        &self,
        link: &mut Option<Link>,
        (started, has_failed): (Instant, bool),
        mut operation: impl FnMut(&mut dyn Initiator) -> Result<bool, InitiatorError>,
    ) -> Result<bool, HolderError> {
        going_to_sleep();
        // Without a failure, nobody says yet that the lender is away: this may be the first use.
        let is_new = !has_failed && self.lost_at.load(Ordering::Relaxed) == 0;
        let lost = if is_new { started } else { self.lost(started) };
        let io_timeout = self.io_timeout();
        let deadline = lost + io_timeout;
        let failed = |source: InitiatorError| {
            self.forgot.fetch_or(source.is_loss(), Ordering::Relaxed);
            if self.is_lost() {
                return HolderError::Lost(Box::new(source));
            }
            HolderError::Unreachable { waited: lost.elapsed(), source: Box::new(source) }
        };
        // After the timeout, no thread needs to wait to learn again that the lender is away.
        let is_closed = self.closed.load(Ordering::Relaxed);
        if is_closed || (Instant::now() >= deadline && !self.may_try()) {
            return Err(failed(self.source.broken()));
        }
        let mut backoff = BACKOFF.0;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = left.max(SHORTEST_ATTEMPT.min(io_timeout));
            // Until this operation ends, the kernel may block all threads that need memory. A name
            // lookup would be one of them.
            let attempt =
                names::from_memory(|| self.source.connect(left)).and_then(|mut connection| {
                    let done = operation(&mut *connection);
                    if done.as_ref().err().is_none_or(|error| !error.ends_connection()) {
                        *link = Some(connection);
                    } else {
                        self.source.broke(connection.epoch());
                    }
                    done
                });
            match attempt {
                Ok(has_answered) => {
                    self.found();
                    return Ok(has_answered);
                }
                Err(error) if !error.ends_connection() => return Err(answer(error)),
                Err(source)
                    if Instant::now() + backoff >= deadline
                        || source.outcome == Outcome::Forgot
                        || self.closed.load(Ordering::Relaxed) =>
                {
                    self.lost(started);
                    return Err(failed(source));
                }
                Err(_) => _ = self.lost(started),
            }
            thread::sleep(backoff);
            backoff = (backoff * 2).min(BACKOFF.1);
        }
    }

    /// Returns whether another attempt is due. If so, the caller must make it.
    fn may_try(&self) -> bool {
        let now = self.started.elapsed().as_millis() as u64;
        let last = self.tried_at.load(Ordering::Relaxed);
        let rested = now >= last + REST.as_millis() as u64;
        rested
            && self
                .tried_at
                .compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    /// Records that the lender answers.
    fn found(&self) {
        if self.lost_at.load(Ordering::Relaxed) != 0 {
            self.lost_at.store(0, Ordering::Relaxed);
            self.forgot.store(false, Ordering::Relaxed);
        }
    }

    /// Records that the lender does not answer, and returns since when.
    fn lost(&self, now: Instant) -> Instant {
        let mark = now.duration_since(self.started).as_millis() as u64 + 1;
        match self.lost_at.compare_exchange(0, mark, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => now,
            Err(before) => self.started + Duration::from_millis(before - 1),
        }
    }
}

/// Converts an error that the lender answered with.
fn answer(error: InitiatorError) -> HolderError {
    if error.outcome == Outcome::NoSpace {
        HolderError::Full(Box::new(error))
    } else {
        HolderError::Failed(Box::new(error))
    }
}

/// Returns the longest single read or write, in bytes of whole pages.
fn longest_transfer(link: &dyn Initiator) -> usize {
    (link.longest_transfer().0 as usize / PAGE_SIZE).max(1) * PAGE_SIZE
}

/// Runs all operations, [`MANY`] in flight at a time. May call `meanwhile`.
fn transfer<'a>(
    link: &mut dyn Initiator,
    mut operations: impl Iterator<Item = Operation<'a>>,
    mut meanwhile: Option<&mut dyn FnMut()>,
) -> Result<(), InitiatorError> {
    loop {
        let mut count = 0;
        let mut now: [_; MANY] = array::from_fn(|_| {
            let next = operations.next();
            count += usize::from(next.is_some());
            next.unwrap_or(Operation::Flush)
        });
        if count == 0 {
            return Ok(());
        }
        // Shortens the closure's lifetime, as `as_deref_mut` cannot.
        let again = meanwhile.as_mut().map(|meanwhile| &mut **meanwhile as &mut dyn FnMut());
        link.transfer(&mut now[..count], again)?;
    }
}

impl Holder for RemoteHolder {
    fn read(&self, worker: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        self.with(worker, |link| link.read(offset, into))
    }

    fn read_soon(
        &self,
        worker: WorkerId,
        offset: u64,
        into: &mut [u8],
        soon: Duration,
    ) -> Result<bool, HolderError> {
        self.with_answer(worker, |link| link.read_soon(offset, into, soon))
    }

    fn write(&self, worker: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError> {
        self.with(worker, |link| link.write(offset, data))
    }

    fn read_many(&self, worker: WorkerId, pieces: &mut [PieceMut<'_>]) -> Result<(), HolderError> {
        self.with(worker, |link| {
            let longest = longest_transfer(link);
            let parts = pieces.iter_mut().flat_map(|(offset, into)| {
                (*offset..).step_by(longest).zip(into.chunks_mut(longest))
            });
            let reads = parts.map(|(offset, into)| Operation::Read { offset, into });
            transfer(link, reads, None)
        })
    }

    /// Uses write-zeroes instead of trim, because a server may return any data for trimmed bytes.
    fn discard(&self, worker: WorkerId, offset: u64, length: u64) -> Result<(), HolderError> {
        self.with(worker, |link| {
            let mut at = offset;
            while at < offset + length {
                let some = (offset + length - at).min(LONGEST_DISCARD);
                if !link.write_zeroes(at, some as u32)? {
                    write_zeroes(at, some, |at, zeroes| link.write(at, zeroes))?;
                }
                at += some;
            }
            Ok(())
        })
    }

    fn flush(&self, worker: WorkerId) -> Result<(), HolderError> {
        self.with(worker, |link| if link.can_flush() { link.flush() } else { Ok(()) })
    }

    fn write_many(&self, worker: WorkerId, pieces: &[Piece<'_>]) -> Result<(), HolderError> {
        self.write_pieces(worker, pieces, None)
    }

    fn write_while(
        &self,
        worker: WorkerId,
        pieces: &[Piece<'_>],
        _: &[u64],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), HolderError> {
        self.write_pieces(worker, pieces, Some(meanwhile))
    }

    fn unreachable_for(&self) -> Option<Duration> {
        let mark = self.lost_at.load(Ordering::Relaxed).checked_sub(1)?;
        Some(self.started.elapsed().saturating_sub(Duration::from_millis(mark)))
    }

    fn is_lost(&self) -> bool {
        self.forgot.load(Ordering::Relaxed)
    }

    fn set_patience(&self, patience: Option<Duration>) {
        let patience = patience.map_or(0, |patience| patience.as_millis() as u64);
        self.patience.store(patience, Ordering::Relaxed);
    }

    fn probe(&self) {
        if self.lost_at.load(Ordering::Relaxed) == 0 {
            return;
        }
        // Spares the threads that serve I/O an attempt.
        self.tried_at.store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
        // A thread that holds the link is finding out already.
        if let Some(Ok(mut link)) = self.links.last().map(Mutex::try_lock)
            && !self.closed.load(Ordering::Relaxed)
        {
            match self.source.connect(SHORTEST_ATTEMPT) {
                Ok(connection) => {
                    *link = Some(connection);
                    self.found();
                }
                Err(error) => _ = self.forgot.fetch_or(error.is_loss(), Ordering::Relaxed),
            }
        }
    }

    fn end_older(&self) {
        self.source.end_older();
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        for link in &self.links {
            *lock(link) = None;
        }
    }
}

const _: () = assert!(EXTENT_SIZE <= LONGEST_DISCARD);
