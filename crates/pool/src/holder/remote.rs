//! A lease: an export of a lender, by NBD, or a namespace, by NVMe/TCP.

use std::array;
use std::fmt;
use std::iter;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_fabric::names;
use aquifer_fabric::nbd::client::Operation;
use aquifer_fabric::sleep::going_to_sleep;
use aquifer_page::{Bytes, EXTENT_SIZE, Incarnation};

use super::link::{Link, LinkError, Source};
use super::{Holder, HolderError, Piece, write_zeroes};
use crate::{lock, lock_any};

/// How many pieces [`Holder::write_many`] has under way.
const MANY: usize = 64;
/// The most that one discard asks for: a server's 32 bits hold it.
const LONGEST_DISCARD: u64 = 1 << 30;
/// Between two attempts to connect: at first, and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(250));
/// What an attempt to connect gets at least, also when patience is all but over.
const SHORTEST_ATTEMPT: Duration = Duration::from_secs(1);
/// Once patience is over: how long after one attempt to connect nobody makes another.
const REST: Duration = Duration::from_secs(2);

/// A connection, and the epoch that it belongs to.
type Joined = (Link, u64);

/// A lease of a lender, with a connection for each worker.
///
/// A connection that breaks is made anew and the operation repeated, until the lender has been unreachable for as long as
/// patience lasts. From then on operations fail at once, but for one now and then that makes an attempt, until that
/// succeeds: a kernel that swaps has thousands of them, and waits for each.
///
/// When one connection breaks, all of its epoch do: only then does the lender know which requests are of before, and
/// carries none of them out once it has let a newer connection in.
pub struct RemoteHolder {
    source: Source,
    links: Box<[Mutex<Option<Joined>>]>,
    patience: Duration,
    /// Milliseconds from `started` to when the lender was found unreachable, plus one; 0 while it is reachable.
    lost_at: AtomicU64,
    /// Milliseconds from `started` to the last attempt after patience was over.
    tried_at: AtomicU64,
    started: Instant,
    /// The lender said last that what was stored there is gone.
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
    /// When the lender cannot be reached, or does not let us in.
    pub fn connect(source: Source, workers: usize, patience: Duration) -> Result<Self, LinkError> {
        let first = source.connect(patience / 2)?;
        // Where connections do not see what others have written, all workers share one.
        let more = if first.0.can_multi_conn() { workers.max(1) - 1 } else { 0 };
        let connect = |_| source.connect(patience / 2).map(Some);
        let links = iter::once(Ok(Some(first))).chain((0..more).map(connect));
        let links = links.collect::<Result<Vec<_>, _>>()?;
        Ok(Self::with_links(source, links, patience))
    }

    /// The same, where each worker connects when it first has something to do.
    pub fn unconnected(source: Source, workers: usize, patience: Duration) -> Self {
        let links = (0..workers.max(1)).map(|_| None).collect();
        Self::with_links(source, links, patience)
    }

    fn with_links(source: Source, links: Vec<Option<Joined>>, patience: Duration) -> Self {
        let links = links.into_iter().map(Mutex::new).collect();
        let (lost_at, tried_at, started) = (AtomicU64::new(0), AtomicU64::new(0), Instant::now());
        let (forgot, closed) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { source, links, patience, lost_at, tried_at, started, forgot, closed }
    }

    /// The life of the lease's pages, where the lender tells.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.source.incarnation()
    }

    /// The size of the export or namespace, and whether it is read-only.
    ///
    /// # Errors
    /// When it cannot be reached any more.
    pub fn facts(&self) -> Result<(Bytes, bool), HolderError> {
        let mut facts = (Bytes::ZERO, false);
        self.with(0, |link| {
            facts = (link.size(), link.is_read_only());
            Ok(())
        })?;
        Ok(facts)
    }

    /// Whether all of a range is known to take no room and read as zeroes.
    ///
    /// # Errors
    /// When it cannot be reached any more.
    pub fn is_hole(&self, offset: u64, length: u32) -> Result<bool, HolderError> {
        let mut hole = 0;
        self.with(0, |link| {
            hole = link.hole(offset, length)?;
            Ok(())
        })?;
        Ok(hole >= u64::from(length))
    }

    /// Does `operation` on the worker's connection, and again on a new one if that breaks.
    fn with(
        &self,
        worker: usize,
        mut operation: impl FnMut(&mut Link) -> Result<(), LinkError>,
    ) -> Result<(), HolderError> {
        let mut link = lock_any(&self.links, worker);
        let started = Instant::now();
        // A connection of before another broke: the lender ends it, or has.
        let current = link.take_if(|(_, epoch)| *epoch != self.source.epoch());
        drop(current);
        if let Some((connection, epoch)) = &mut *link {
            match operation(connection) {
                Ok(()) => {
                    self.found();
                    return Ok(());
                }
                Err(error) if error.ends_connection() => {
                    self.source.broke(*epoch);
                    *link = None;
                }
                Err(error) => return Err(answer(error)),
            }
        }
        self.persist(&mut link, started, operation)
    }

    fn persist(
        &self,
        link: &mut Option<Joined>,
        started: Instant,
        mut operation: impl FnMut(&mut Link) -> Result<(), LinkError>,
    ) -> Result<(), HolderError> {
        going_to_sleep();
        let lost = self.lost(started);
        let deadline = lost + self.patience;
        let failed = |source: LinkError| {
            self.forgot.fetch_or(source.is_loss(), Ordering::Relaxed);
            if self.is_lost() {
                return HolderError::Lost(Box::new(source));
            }
            HolderError::Unreachable { waited: lost.elapsed(), source: Box::new(source) }
        };
        // Once it has been away for longer than patience lasts, nobody needs to find that out again by waiting.
        if Instant::now() >= deadline && !self.may_try() {
            return Err(failed(self.source.broken()));
        }
        let mut backoff = BACKOFF.0;
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).max(SHORTEST_ATTEMPT);
            // The kernel may wait for this with all that needs memory, a look-up included.
            let attempt = names::from_memory(|| self.source.connect(left)).and_then(
                |(mut connection, epoch)| {
                    let done = operation(&mut connection);
                    if done.as_ref().err().is_none_or(|error| !error.ends_connection()) {
                        connection.set_patience(self.patience / 2);
                        *link = Some((connection, epoch));
                    } else {
                        self.source.broke(epoch);
                    }
                    done
                },
            );
            match attempt {
                Ok(()) => {
                    self.found();
                    return Ok(());
                }
                Err(error) if !error.ends_connection() => return Err(answer(error)),
                Err(source)
                    if Instant::now() + backoff >= deadline
                        || source.is_final()
                        || self.closed.load(Ordering::Relaxed) =>
                {
                    return Err(failed(source));
                }
                Err(_) => {}
            }
            thread::sleep(backoff);
            backoff = (backoff * 2).min(BACKOFF.1);
        }
    }

    /// Whether it is time for another attempt, which the caller then has to make.
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

    /// Takes note that the lender answers.
    fn found(&self) {
        if self.lost_at.load(Ordering::Relaxed) != 0 {
            self.lost_at.store(0, Ordering::Relaxed);
            self.forgot.store(false, Ordering::Relaxed);
        }
    }

    /// Takes note that the lender does not answer, and tells since when.
    fn lost(&self, now: Instant) -> Instant {
        let mark = now.duration_since(self.started).as_millis() as u64 + 1;
        match self.lost_at.compare_exchange(0, mark, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => now,
            Err(before) => self.started + Duration::from_millis(before - 1),
        }
    }
}

/// The meaning of an error that the lender answered with.
fn answer(error: LinkError) -> HolderError {
    if error.is_no_space() {
        HolderError::Full(Box::new(error))
    } else {
        HolderError::Failed(Box::new(error))
    }
}

impl Holder for RemoteHolder {
    fn read(&self, worker: usize, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        self.with(worker, |link| link.read(offset, into))
    }

    fn write(&self, worker: usize, offset: u64, data: &[u8]) -> Result<(), HolderError> {
        self.with(worker, |link| link.write(offset, data))
    }

    /// Write-zeroes and not trim: what trimmed bytes read as is up to the server.
    fn discard(&self, worker: usize, offset: u64, length: u64) -> Result<(), HolderError> {
        self.with(worker, |link| {
            if !link.can_write_zeroes() {
                return write_zeroes(offset, length, |at, zeroes| link.write(at, zeroes));
            }
            let mut at = offset;
            while at < offset + length {
                let some = (offset + length - at).min(LONGEST_DISCARD);
                match link.write_zeroes(at, some as u32) {
                    // Linux's NVMe target promises it for files on whose file system it then turns out not to work.
                    Err(error) if !error.ends_connection() => {
                        write_zeroes(at, some, |at, zeroes| link.write(at, zeroes))?;
                    }
                    done => done?,
                }
                at += some;
            }
            Ok(())
        })
    }

    fn flush(&self, worker: usize) -> Result<(), HolderError> {
        self.with(worker, |link| if link.can_flush() { link.flush() } else { Ok(()) })
    }

    fn write_many(&self, worker: usize, pieces: &[Piece<'_>]) -> Result<(), HolderError> {
        self.with(worker, |link| {
            let longest = link.longest_write();
            let mut parts = pieces
                .iter()
                .flat_map(|&(offset, from)| (offset..).step_by(longest).zip(from.chunks(longest)));
            loop {
                let mut count = 0;
                let mut operations: [_; MANY] = array::from_fn(|_| match parts.next() {
                    Some((offset, from)) => {
                        count += 1;
                        Operation::Write { offset, from }
                    }
                    None => Operation::Write { offset: 0, from: &[] },
                });
                if count == 0 {
                    return Ok(());
                }
                link.write_all(&mut operations[..count])?;
            }
        })
    }

    fn unreachable_for(&self) -> Option<Duration> {
        let mark = self.lost_at.load(Ordering::Relaxed).checked_sub(1)?;
        Some(self.started.elapsed().saturating_sub(Duration::from_millis(mark)))
    }

    fn is_lost(&self) -> bool {
        self.forgot.load(Ordering::Relaxed)
    }

    fn probe(&self) {
        if self.lost_at.load(Ordering::Relaxed) == 0 {
            return;
        }
        // Threads that serve I/O need not try as well.
        self.tried_at.store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
        // Whoever has the link is finding out already.
        if let Some(Ok(mut link)) = self.links.last().map(Mutex::try_lock) {
            match self.source.connect(SHORTEST_ATTEMPT) {
                Ok((mut connection, epoch)) => {
                    connection.set_patience(self.patience / 2);
                    *link = Some((connection, epoch));
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
