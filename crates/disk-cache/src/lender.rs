//! A cache of the same group on another host that keeps pages for this one. Each page that it keeps
//! has left the memory here and is on the disk as well.
//!
//! The lender may lose, drop or change pages. This host keeps a hash of each page, and reads any
//! page with another hash from the disk. The lender cannot read the pages: each is encrypted for
//! its place, with a key that only this host has.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, io};

use aquifer_nbd::client::{Connection, NbdError, Operation, Target};
use aquifer_page::{Bytes, LeaseId, PAGE_SIZE, is_zero, lock};
use aquifer_volume::{Encryption, PageCipher};
use quick_cache::{DefaultHashBuilder, UnitWeighter, unsync};
use twox_hash::XxHash3_64;

use super::LenderStatus;
use super::pages::Key;

const PAGE: u64 = PAGE_SIZE as u64;

/// Timeout of a lender's answer; after it, the disk is read.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Pause before a failed lender is connected again.
const RETRY: Duration = Duration::from_secs(1);

/// Least time for which a full lender is sent nothing.
const REST: Duration = Duration::from_secs(1);

/// Most pages in the queue. Further pages are not sent.
const QUEUE: usize = 1024;

/// Most ranges that wait until the lender drops them. Further ranges stay there until their disk is
/// closed.
const FORGOTTEN: usize = 1024;

/// Most tasks of one batch.
const BATCH: usize = 64;

/// Most pages of one trim.
const LONGEST: u64 = 1 << 19;

/// Bits of the number of a page, and of a disk, that a lender can keep: an offset has 62 bits.
const PAGES: u32 = 36;
const DISKS: u32 = 14;

/// A lender. Dropping it closes all connections to it, upon which it drops the pages.
pub(super) struct PageLender {
    inner: Arc<Inner>,
    queue: Option<SyncSender<Task>>,
    sending: Option<JoinHandle<()>>,
}

struct Inner {
    target: Arc<Target>,
    known: Mutex<Known>,
    /// Idle connections.
    idle: Mutex<Vec<Connection>>,
    /// Whether the lender answers. Only the sending thread reconnects, so that a reader waits for a
    /// dead lender once at most.
    is_up: AtomicBool,
    /// Whether the lender has no memory now.
    is_full: AtomicBool,
    ends: AtomicBool,
    /// Number of pages in the queue.
    queued: AtomicU64,
    cipher: Option<PageCipher>,
    seed: u64,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    sent: AtomicU64,
    read: AtomicU64,
    dropped: AtomicU64,
    wrong: AtomicU64,
}

/// The pages that the lender keeps.
struct Known {
    pages: unsync::Cache<Key, Is, UnitWeighter, DefaultHashBuilder>,
    next: u64,
    /// The range of each disk within which the lender may keep pages, also pages that this host no
    /// longer knows: `pages` is bounded, and a batch may fail after some of it arrived.
    reach: HashMap<u32, Range<u64>>,
    /// The ranges that the lender must drop.
    forgotten: Vec<Forgotten>,
}

/// Consecutive pages that this host will not read again.
#[derive(Clone, Copy)]
struct Forgotten {
    first: Key,
    pages: u64,
}

#[derive(Clone, Copy)]
struct Is {
    hash: u64,
    /// A unique number of this version of the page.
    number: u64,
    /// Whether the page has arrived there.
    there: bool,
}

/// A task of the sending thread.
enum Task {
    Keep(Keep),
    /// Lets the lender drop the forgotten pages.
    Forget,
}

/// A page to be sent.
struct Keep {
    key: Key,
    number: u64,
    page: Box<[u8]>,
}

impl fmt::Debug for PageLender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageLender({})", self.inner.target)
    }
}

impl PageLender {
    /// Connects to `target`, now or later, and keeps at most `most` there. Pages are encrypted if
    /// `is_encrypted`.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(super) fn new(target: Target, most: Bytes, is_encrypted: bool) -> io::Result<Self> {
        let pages = most.0 / PAGE;
        let hash = DefaultHashBuilder::default();
        // Starts with no capacity, and grows on demand.
        let pages = unsync::Cache::with(0, pages, UnitWeighter, hash, Default::default());
        let known = Known { pages, next: 0, reach: HashMap::new(), forgotten: Vec::new() };
        let place = LeaseId::random();
        let inner = Arc::new(Inner {
            target: Arc::new(target),
            known: Mutex::new(known),
            idle: Mutex::default(),
            is_up: AtomicBool::new(false),
            is_full: AtomicBool::new(false),
            ends: AtomicBool::new(false),
            queued: AtomicU64::new(0),
            cipher: is_encrypted.then(|| PageCipher::new(&Encryption::random(), place)),
            seed: place.0 as u64,
            counts: Counts::default(),
        });
        let (queue, tasks) = mpsc::sync_channel(QUEUE);
        let theirs = inner.clone();
        let sending =
            thread::Builder::new().name("lender".to_owned()).spawn(move || theirs.send(&tasks))?;
        Ok(Self { inner, queue: Some(queue), sending: Some(sending) })
    }

    pub(super) fn status(&self) -> LenderStatus {
        let Inner { target, is_up, counts, .. } = &*self.inner;
        let bytes = |pages: &AtomicU64| Bytes(pages.load(Ordering::Relaxed) * PAGE);
        LenderStatus {
            lender: target.to_string(),
            answers: is_up.load(Ordering::Relaxed),
            has: Bytes(lock(&self.inner.known).pages.len() as u64 * PAGE),
            sent_bytes: bytes(&counts.sent),
            read_bytes: bytes(&counts.read),
            dropped_bytes: bytes(&counts.dropped),
            wrong_bytes: bytes(&counts.wrong),
        }
    }

    /// Sends a page, unless the lender has it or is busy; `fill` copies its content. The content
    /// equals the disk's; a writer that changes the disk waits with [`forget`](Self::forget) until
    /// this returns.
    pub(super) fn offer(&self, key: Key, fill: impl FnOnce(&mut [u8]) -> bool) {
        let Inner { known, is_up, is_full, queued, seed, .. } = &*self.inner;
        let has_place = key.page >> PAGES == 0 && key.disk >> DISKS == 0;
        let takes_more = is_up.load(Ordering::Relaxed) && !is_full.load(Ordering::Relaxed);
        if !has_place || !takes_more || queued.load(Ordering::Relaxed) >= QUEUE as u64 {
            return;
        }
        let mut known = lock(known);
        if known.pages.get(&key).is_some() {
            return;
        }
        let mut page = vec![0; PAGE_SIZE].into_boxed_slice();
        if !fill(&mut page) {
            return;
        }
        let number = known.next;
        known.next += 1;
        known.pages.insert(key, Is { hash: hash(*seed, &page), number, there: false });
        queued.fetch_add(1, Ordering::Relaxed);
        if !self.tell(Task::Keep(Keep { key, number, page })) {
            queued.fetch_sub(1, Ordering::Relaxed);
            known.pages.remove(&key);
            return;
        }
        let reach = known.reach.entry(key.disk).or_insert(key.page..key.page);
        *reach = reach.start.min(key.page)..reach.end.max(key.page + 1);
    }

    /// Forgets a page that is about to change.
    pub(super) fn forget(&self, key: Key) {
        lock(&self.inner.known).pages.remove(&key);
    }

    /// Forgets pages and lets the lender drop them.
    pub(super) fn give_back(&self, first: Key, pages: u64) {
        let range = first.page..first.page.saturating_add(pages);
        let mut known = lock(&self.inner.known);
        if pages <= known.pages.len() as u64 {
            for page in range.clone() {
                known.pages.remove(&Key { page, ..first });
            }
        } else {
            known.pages.retain(|key, _| key.disk != first.disk || !range.contains(&key.page));
        }
        let Some(reach) = known.reach.get(&first.disk) else { return };
        let gone = range.start.max(reach.start)..range.end.min(reach.end);
        let is_all = gone == *reach;
        if gone.is_empty() || !is_all && known.forgotten.len() >= FORGOTTEN {
            return;
        }
        if is_all {
            known.reach.remove(&first.disk);
        }
        let first = Key { page: gone.start, ..first };
        known.forgotten.push(Forgotten { first, pages: gone.end - gone.start });
        drop(known);
        // The thread of a full queue looks soon by itself.
        self.tell(Task::Forget);
    }

    fn tell(&self, task: Task) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.try_send(task).is_ok())
    }

    /// Reads consecutive pages; returns whether the lender had all of them. The caller excludes
    /// writers.
    pub(super) fn read(&self, first: Key, into: &mut [u8]) -> bool {
        self.inner.read(first, into)
    }
}

impl Drop for PageLender {
    fn drop(&mut self) {
        self.inner.ends.store(true, Ordering::Release);
        self.queue = None;
        if let Some(sending) = self.sending.take() {
            // The panic hook has reported a panic there.
            let _ = sending.join();
        }
    }
}

impl Inner {
    fn read(&self, first: Key, into: &mut [u8]) -> bool {
        let keys = || (first.page..).map(|page| Key { page, ..first });
        let pages = into.len() / PAGE_SIZE;
        let known = {
            let known = lock(&self.known);
            let is = |key| known.pages.get(&key).filter(|is| is.there).copied();
            keys().take(pages).map(is).collect::<Option<Vec<_>>>()
        };
        let Some(known) = known else { return false };
        let read = self.with_connection(|connection| connection.read(place(first), into));
        if read.is_none() {
            return false;
        }
        let mut all = true;
        for ((key, is), page) in keys().zip(known).zip(into.chunks_exact_mut(PAGE_SIZE)) {
            let nothing = is_zero(page);
            if let Some(cipher) = &self.cipher {
                cipher.decrypt(place(key), page, |_, _| ());
            }
            if hash(self.seed, page) == is.hash {
                continue;
            }
            all = false;
            self.gone(key, is.number);
            let counter = if nothing { &self.counts.dropped } else { &self.counts.wrong };
            if counter.fetch_add(1, Ordering::Relaxed) == 0 && !nothing {
                tracing::warn!(
                    lender = %self.target,
                    "the lender returned a wrong page: this cache reads the page from the disk"
                );
            }
        }
        if all {
            self.counts.read.fetch_add(pages as u64, Ordering::Relaxed);
        }
        all
    }

    /// Returns a connection, idle or new, if the lender is up. The caller returns it to the idle
    /// ones.
    fn connection(&self) -> Option<Connection> {
        if !self.is_up.load(Ordering::Relaxed) {
            return None;
        }
        let idle = lock(&self.idle).pop();
        idle.or_else(|| self.connect())
    }

    fn connect(&self) -> Option<Connection> {
        Connection::connect(self.target.clone(), TIMEOUT).inspect_err(|error| self.fail(error)).ok()
    }

    /// Marks the lender as down and forgets its pages: it drops them when the connections end.
    fn fail(&self, error: &NbdError) {
        if self.is_up.swap(false, Ordering::Relaxed) {
            tracing::warn!("{error}: this cache reads the lender's pages from the disks");
        } else {
            tracing::debug!("{error}");
        }
        lock(&self.idle).clear();
        lock(&self.known).pages.clear();
    }

    /// Forgets this version of a page.
    fn gone(&self, key: Key, number: u64) {
        let mut known = lock(&self.known);
        if known.pages.peek(&key).is_some_and(|is| is.number == number) {
            known.pages.remove(&key);
        }
    }

    /// Connects, and performs tasks until the lender is dropped.
    fn send(&self, tasks: &Receiver<Task>) {
        let (mut again, mut rests) = (Instant::now(), Instant::now());
        while !self.ends.load(Ordering::Acquire) {
            if !self.is_up.load(Ordering::Relaxed) && again <= Instant::now() {
                again = Instant::now() + RETRY;
                if let Some(connection) = self.connect() {
                    tracing::info!(lender = %self.target, "connected to the lender");
                    lock(&self.idle).push(connection);
                    self.is_up.store(true, Ordering::Relaxed);
                }
            }
            if rests.elapsed() >= REST {
                self.is_full.store(false, Ordering::Relaxed);
            }
            let first = match tasks.recv_timeout(REST) {
                Ok(task) => Some(task),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let mut batch: Vec<_> = first
                .into_iter()
                .chain(tasks.try_iter().take(BATCH - 1))
                .filter_map(|task| match task {
                    Task::Keep(keep) => Some(keep),
                    Task::Forget => None,
                })
                .collect();
            self.queued.fetch_sub(batch.len() as u64, Ordering::Relaxed);
            // A page of the batch that was forgotten before is no longer known, and one that was
            // evicted again after it was forgotten is written after the lender dropped it.
            let trimmed = self.forget_all();
            let was_full = self.is_full.load(Ordering::Relaxed);
            let sent = trimmed && !was_full && self.send_all(&mut batch);
            if !was_full && self.is_full.load(Ordering::Relaxed) {
                rests = Instant::now();
            }
            self.done(&batch, sent);
        }
    }

    /// Lets the lender drop the pages that were forgotten, also while it is full; returns whether
    /// it did. A lender that fails is asked again once it answers.
    fn forget_all(&self) -> bool {
        let forgotten = std::mem::take(&mut lock(&self.known).forgotten);
        if forgotten.is_empty() {
            return true;
        }
        let done = self.with_connection(|connection| {
            // The lender drops the pages when the connections end, or writes over them.
            if !connection.can_trim() {
                return Ok(());
            }
            let mut trims = Vec::new();
            for Forgotten { first, pages } in &forgotten {
                let end = first.page + *pages;
                for page in (first.page..end).step_by(LONGEST as usize) {
                    let length = (LONGEST.min(end - page) * PAGE) as u32;
                    trims.push(Operation::Trim { offset: place(Key { page, ..*first }), length });
                }
            }
            match connection.run(&mut trims) {
                Err(error) if !error.ends_connection() => {
                    tracing::debug!("{error}: the lender keeps pages that nobody reads");
                    Ok(())
                }
                done => done,
            }
        });
        if done.is_none() {
            lock(&self.known).forgotten.extend(forgotten);
        }
        done.is_some()
    }

    /// Sends the pages of a batch that are still known; returns whether the lender keeps all of
    /// them.
    fn send_all(&self, batch: &mut [Keep]) -> bool {
        let current = |keep: &&mut Keep| {
            lock(&self.known).pages.peek(&keep.key).is_some_and(|is| is.number == keep.number)
        };
        let mut writes: Vec<_> = batch
            .iter_mut()
            .filter(current)
            .map(|Keep { key, page, .. }| {
                let offset = place(*key);
                if let Some(cipher) = &self.cipher {
                    cipher.encrypt(offset, page, |_, _| ());
                }
                Operation::Write { offset, from: page }
            })
            .collect();
        if writes.is_empty() {
            return true;
        }
        let mut is_full = false;
        let sent = self.with_connection(|connection| match connection.run(&mut writes) {
            Err(error) if error.is_no_space() => {
                is_full = true;
                Ok(())
            }
            done => done,
        });
        self.is_full.store(is_full, Ordering::Relaxed);
        sent.is_some() && !is_full
    }

    /// Calls `run` with a connection; returns `None` if the lender does not answer.
    fn with_connection<T>(
        &self,
        run: impl FnOnce(&mut Connection) -> Result<T, NbdError>,
    ) -> Option<T> {
        let mut connection = self.connection()?;
        match run(&mut connection) {
            Ok(done) => {
                lock(&self.idle).push(connection);
                Some(done)
            }
            Err(error) => {
                self.fail(&error);
                None
            }
        }
    }

    /// Marks the pages of a batch as arrived, or forgets them.
    fn done(&self, batch: &[Keep], sent: bool) {
        for Keep { key, number, .. } in batch {
            if !sent {
                self.gone(*key, *number);
                continue;
            }
            let mut known = lock(&self.known);
            if let Some(mut is) = known.pages.peek_mut(key).filter(|is| is.number == *number) {
                is.there = true;
                self.counts.sent.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Returns the offset of a page in the lender's export.
fn place(key: Key) -> u64 {
    (u64::from(key.disk) << PAGES | key.page) * PAGE
}

fn hash(seed: u64, page: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(seed, page)
}
