//! A holder of one or two copies of each page: on two leases, or on a lease and this host's disk.
//! The second one may lag behind: a write ends before it is there.
//!
//! Each copy has its own tags. A copy that missed a write of a page has no known tag for it, so no
//! reader takes an old version there. What a copy lacks is copied from the other one later.

mod pace;
mod reading;
mod repair;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::iter;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, LeaseId, PAGE_SIZE, WorkerId};
use aquifer_transport::initiator::{InitiatorError, Outcome};
use aquifer_transport::sleep::going_to_sleep;

use self::pace::Pace;
use super::turns::Turns;
use super::verified::{BATCH, is_whole};
use super::{Holder, HolderError, LaggingHolder, Piece, PieceMut, Sealed, VerifiedHolder, Wrong};
use crate::events::{Events, Happening};
use crate::tags::Tags;
use crate::target::LeaseTarget;

const PAGE: u64 = PAGE_SIZE as u64;

/// Bytes that a worker encrypts at a time.
const ROOM: usize = BATCH * PAGE_SIZE;

/// How long the lender of one of two copies may keep a request waiting, before the other copy
/// serves it.
const PATIENCE: Duration = Duration::from_millis(500);

/// The pause between attempts to reach either lender.
const RETRY: Duration = Duration::from_millis(100);

/// One copy: a holder that verifies pages, and the tags that it compares.
pub(crate) struct Copy {
    /// The lease; `None` for a file on this host's disk.
    pub(crate) target: Option<LeaseTarget>,
    pub(crate) holder: VerifiedHolder,
    pub(crate) tags: Arc<Tags>,
    pace: Pace,
}

/// The second copy of a lease's pages.
pub(crate) struct Second {
    pub(crate) copy: Copy,
    /// The holder of a copy that lags behind.
    pub(crate) lagging: Option<LaggingHolder>,
    /// The file of a copy on this host's disk. It is read only if the first copy fails.
    pub(crate) file: Option<DiskFile>,
    /// Whether the copies have the same cipher, so that one encryption does for both.
    pub(crate) shares_cipher: bool,
    /// How long an operation waits if neither copy can serve it.
    pub(crate) io_timeout: Duration,
    pub(crate) events: Arc<Events>,
    /// Whether a copy may lack pages that the other has.
    pub(crate) is_behind: Arc<AtomicBool>,
    /// Whether a copy had no room, so that new extents should go elsewhere.
    pub(crate) has_full: AtomicBool,
    /// The reads that went to the other copy as well, since the lender of one was late.
    pub(crate) late_reads: AtomicU64,
}

/// The file of a copy on this host's disk.
pub(crate) struct DiskFile {
    /// The id of the copy's tags in the ledger.
    pub(crate) id: LeaseId,
    pub(crate) path: PathBuf,
}

/// A lease's pages: one copy, or two while there is a second lease for them.
pub(crate) struct Copies {
    pub(crate) first: Copy,
    second: RwLock<Option<Arc<Second>>>,
    /// Held shared during a change of pages, and exclusively while a second copy begins or ends.
    changes: RwLock<()>,
    /// While there are two copies, changes of the same pages take turns, so that both copies see
    /// them in the same order.
    turns: Turns,
    /// The next page to [verify](Self::scrub).
    scrubbed: AtomicU64,
}

/// The result of an operation on one copy.
type Done = Result<(), HolderError>;

/// As [`Done`], of a read; false if the page has not come in time.
type SoonDone = Result<bool, HolderError>;

impl Copy {
    pub(crate) fn new(
        target: Option<LeaseTarget>,
        holder: VerifiedHolder,
        tags: Arc<Tags>,
    ) -> Self {
        Self { target, holder, tags, pace: Pace::default() }
    }

    /// Reads, and notes how long that takes.
    fn read(&self, worker: WorkerId, at: u64, into: &mut [u8]) -> Done {
        let begun = Instant::now();
        let done = self.run(|holder| holder.read(worker, at, into));
        if done.is_ok() {
            self.pace.note(begun.elapsed());
        }
        done
    }

    /// Reads as [`read`](Self::read) does, but returns false if the page does not come `soon`.
    fn read_soon(&self, worker: WorkerId, at: u64, into: &mut [u8], soon: Duration) -> SoonDone {
        let (begun, mut is_here) = (Instant::now(), false);
        self.run(|holder| {
            is_here = holder.read_soon(worker, at, into, soon)?;
            Ok(())
        })?;
        self.pace.note(begun.elapsed());
        Ok(is_here)
    }

    pub(crate) fn answers(&self) -> bool {
        self.holder.unreachable_for().is_none() && !self.holder.is_lost()
    }

    /// Runs the operation, unless the lender is known to be away.
    fn run(&self, operation: impl FnOnce(&VerifiedHolder) -> Done) -> Done {
        let away = || {
            let place = self.target.as_ref().map_or_else(String::new, LeaseTarget::uri);
            InitiatorError::new(&place, Outcome::Ended, "no answer so far")
        };
        if self.holder.is_lost() {
            return Err(HolderError::Lost(Box::new(away())));
        }
        if let Some(waited) = self.holder.unreachable_for() {
            return Err(HolderError::Unreachable { waited, source: Box::new(away()) });
        }
        operation(&self.holder)
    }

    fn forget(&self, bytes: &Range<u64>) {
        touched(bytes).for_each(|page| self.tags.forget(page));
    }
}

/// Returns the pages that bytes touch.
fn touched(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / PAGE..bytes.end.div_ceil(PAGE)
}

impl Copies {
    pub(crate) fn one(first: Copy) -> Self {
        Self {
            first,
            second: RwLock::default(),
            changes: RwLock::default(),
            turns: Turns::default(),
            scrubbed: AtomicU64::new(0),
        }
    }

    pub(crate) fn second(&self) -> Option<Arc<Second>> {
        self.second.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns whether two lenders have each page, so that a read asks the second if the first is
    /// late.
    pub(crate) fn has_a_choice(&self) -> bool {
        self.second().is_some_and(|second| second.file.is_none())
    }

    /// Begins a second copy. Waits for the changes under way.
    pub(crate) fn begin_second(&self, second: Arc<Second>) {
        let _alone = self.changes.write().unwrap_or_else(PoisonError::into_inner);
        for copy in [&self.first, &second.copy] {
            copy.holder.set_patience(Some(PATIENCE));
        }
        *self.second.write().unwrap_or_else(PoisonError::into_inner) = Some(second);
    }

    /// Ends the second copy, unless the first of so many pages lacks one or does not answer. Waits
    /// for the changes under way. Returns whether the second copy has ended.
    pub(crate) fn end_second_if_whole(&self, worker: WorkerId, pages: u64) -> bool {
        // Only a request finds out that an idle lender is gone, or has lost its pages.
        let page = (0..pages).find(|page| !self.first.tags.is_unknown(*page)).unwrap_or(0);
        let has_answered = self.first.read(worker, page * PAGE, &mut [0; PAGE_SIZE]).is_ok();
        if !has_answered && !self.first.tags.is_unknown(page) {
            return false;
        }
        let _alone = self.changes.write().unwrap_or_else(PoisonError::into_inner);
        let is_needed = !self.first.answers() || self.missing(0..pages, true).0 > Bytes::ZERO;
        if !is_needed {
            *self.second.write().unwrap_or_else(PoisonError::into_inner) = None;
            self.first.holder.set_patience(None);
        }
        !is_needed
    }

    /// Ends the second copy. Waits for the changes under way.
    pub(crate) fn end_second(&self) {
        let _alone = self.changes.write().unwrap_or_else(PoisonError::into_inner);
        *self.second.write().unwrap_or_else(PoisonError::into_inner) = None;
        self.first.holder.set_patience(None);
    }

    /// Begins a change, during which no second copy begins or ends.
    fn change(&self) -> (RwLockReadGuard<'_, ()>, Option<Arc<Second>>) {
        let changing = self.changes.read().unwrap_or_else(PoisonError::into_inner);
        (changing, self.second())
    }

    /// Changes these bytes in both copies. One of them is enough: the other one is behind then.
    ///
    /// `first` changes the first copy. It may call its second argument while that lender works, and
    /// then `other` changes the second copy at the same time.
    fn in_both(
        &self,
        second: &Second,
        bytes: impl Iterator<Item = Range<u64>> + Clone,
        first: impl Fn(&VerifiedHolder, &mut dyn FnMut(Option<Sealed<'_>>)) -> Done,
        other: impl Fn(&VerifiedHolder, Option<Sealed<'_>>) -> Done,
    ) -> Done {
        second.patiently(self, || {
            let _turn = self.turns.take(bytes.clone().map(|bytes| touched(&bytes)));
            let is_tried = Cell::new(false);
            let mut done = None;
            let mut change_other = |sealed: Option<Sealed<'_>>| {
                let change = || {
                    second.copy.run(|holder| {
                        is_tried.set(true);
                        other(holder, sealed)
                    })
                };
                done.get_or_insert_with(change);
            };
            let one = self.first.run(|holder| {
                is_tried.set(true);
                first(holder, &mut change_other)
            });
            change_other(None);
            let other = done.unwrap_or(Ok(()));
            let behind = match (one, other) {
                (Ok(()), Ok(())) => return Ok(()),
                (Ok(()), Err(error)) => (&second.copy, error),
                (Err(error), Ok(())) => match second.keep_alone() {
                    Ok(()) => (&self.first, error),
                    Err(other) => {
                        bytes.clone().for_each(|bytes| {
                            [&self.first, &second.copy].iter().for_each(|copy| copy.forget(&bytes));
                        });
                        return Err(second.worse(error, other));
                    }
                },
                (Err(one), Err(other)) => {
                    if is_tried.get() {
                        // A part of it may be done in one copy, and not in the other.
                        let both = [&self.first, &second.copy];
                        both.iter().for_each(|copy| {
                            bytes.clone().for_each(|bytes| copy.forget(&bytes));
                        });
                    }
                    return Err(second.worse(one, other));
                }
            };
            // Its tags may be those of the version before.
            bytes.clone().for_each(|bytes| behind.0.forget(&bytes));
            let is_full = second.file.is_none() && matches!(behind.1, HolderError::Full(_));
            second.has_full.fetch_or(is_full, Ordering::Relaxed);
            second.falls_behind(behind.0, &behind.1);
            Ok(())
        })
    }

    /// Writes to both copies, as many pages at a time as a worker can encrypt at a time.
    fn write_both(&self, worker: WorkerId, second: &Second, pieces: &[Piece<'_>]) -> Done {
        let parts = pieces.iter().flat_map(|&(offset, data)| {
            let most = if is_whole(offset, data.len()) { ROOM } else { data.len().max(1) };
            (offset..).step_by(most).zip(data.chunks(most))
        });
        let mut parts = parts.peekable();
        while parts.peek().is_some() {
            let mut group: [Piece<'_>; BATCH] = [(0, &[]); BATCH];
            let (mut count, mut length) = (0, 0);
            while count < BATCH
                && let Some(part) =
                    parts.next_if(|(_, data)| count == 0 || length + data.len() <= ROOM)
            {
                group[count] = part;
                (count, length) = (count + 1, length + part.1.len());
            }
            let group = &group[..count];
            let bytes = group.iter().map(|(at, data)| *at..*at + data.len() as u64);
            self.in_both(
                second,
                bytes,
                |holder, meanwhile| {
                    holder.write_while(worker, group, &mut |sealed| {
                        meanwhile(Some(sealed).filter(|_| second.shares_cipher));
                    })
                },
                |holder, sealed| match sealed {
                    Some(sealed) => holder.write_sealed(worker, sealed),
                    None => holder.write_many(worker, group),
                },
            )?;
        }
        Ok(())
    }

    /// Returns whether no copy is known to have the page's last version.
    pub(crate) fn is_unknown(&self, page: u64) -> bool {
        self.first.tags.is_unknown(page)
            && self.second().is_none_or(|second| second.copy.tags.is_unknown(page))
    }

    /// Records that it is not known which version of the page any copy has.
    pub(crate) fn forget(&self, page: u64) {
        // A repair may be about to say what the second copy has.
        let _turn = self.turns.take(iter::once(page..page + 1));
        self.first.tags.forget(page);
        self.second().iter().for_each(|second| second.copy.tags.forget(page));
    }

    /// Returns how many of these pages only the second copy, and only the first copy, has.
    /// `strictly` counts a page that is being written as lacking.
    pub(crate) fn missing(&self, pages: Range<u64>, strictly: bool) -> (Bytes, Bytes) {
        let Some(second) = self.second() else { return (Bytes::ZERO, Bytes::ZERO) };
        let lacks = |copy: &Copy, page| match strictly {
            true => copy.tags.is_unknown(page),
            false => copy.tags.is_lacking(page),
        };
        let (mut first_lacks, mut second_lacks) = (0, 0);
        for page in pages {
            match (lacks(&self.first, page), lacks(&second.copy, page)) {
                (true, false) => first_lacks += PAGE,
                (false, true) => second_lacks += PAGE,
                _ => {}
            }
        }
        (Bytes(first_lacks), Bytes(second_lacks))
    }

    /// Returns whether each copy answers, as far as is known.
    pub(crate) fn all_answer(&self) -> bool {
        self.first.answers() && self.second().is_none_or(|second| second.copy.answers())
    }

    /// Returns whether one of two copies may lack pages.
    pub(crate) fn may_be_behind(&self) -> bool {
        self.second().is_some_and(|second| second.is_behind.load(Ordering::Acquire))
    }

    /// Returns whether a copy had no room.
    pub(crate) fn has_full(&self) -> bool {
        self.second().is_some_and(|second| second.has_full.load(Ordering::Relaxed))
    }
}

impl Second {
    /// A copy that may lack all pages, and does not lag.
    pub(crate) fn new(
        copy: Copy,
        shares_cipher: bool,
        (io_timeout, events): (Duration, Arc<Events>),
    ) -> Self {
        Self {
            copy,
            lagging: None,
            file: None,
            shares_cipher,
            io_timeout,
            events,
            is_behind: Arc::new(AtomicBool::new(true)),
            has_full: AtomicBool::new(false),
            late_reads: AtomicU64::new(0),
        }
    }

    fn falls_behind(&self, copy: &Copy, why: &HolderError) {
        fall_behind(&self.is_behind, &self.events, copy.target.as_ref(), why);
    }

    /// Makes sure that this process can end now, after a change that only the second copy has.
    fn keep_alone(&self) -> Done {
        self.lagging.as_ref().map_or(Ok(()), |lagging| lagging.flush(WorkerId(0)))
    }

    /// Returns the error that says more about what to do.
    fn worse(&self, one: HolderError, other: HolderError) -> HolderError {
        match &self.file {
            // The lender may come back, whatever is wrong with the disk.
            Some(_) if !matches!(one, HolderError::Wrong(_)) => one,
            _ => worse(one, other),
        }
    }

    /// Repeats the operation while neither lender answers, until the volume's timeout. If both have
    /// been away for that long, no other operation needs to wait to learn it again: the threads
    /// that wait here also serve pages of other lenders.
    fn patiently(&self, copies: &Copies, mut operation: impl FnMut() -> Done) -> Done {
        let begun = Instant::now();
        loop {
            let done = operation();
            let is_away = matches!(done, Err(HolderError::Unreachable { .. }));
            let waited = || copies.unreachable_for().unwrap_or_default().max(begun.elapsed());
            if !is_away || waited() >= self.io_timeout {
                return done;
            }
            going_to_sleep();
            thread::sleep(RETRY);
            [&copies.first, &self.copy].iter().for_each(|copy| copy.holder.probe());
        }
    }
}

/// Notes that a copy may lack pages that the other one has.
pub(crate) fn fall_behind(
    is_behind: &AtomicBool,
    events: &Events,
    target: Option<&LeaseTarget>,
    why: &HolderError,
) {
    if !is_behind.swap(true, Ordering::AcqRel)
        && let Some(target) = target
    {
        let (lease, lender) = (target.lease, target.lender.clone());
        let why = why.to_string();
        events.happened(Happening::CopyBehind { lease, lender, why });
    }
}

/// Returns the error that says more about what to do.
fn worse(one: HolderError, other: HolderError) -> HolderError {
    let rank = |error: &HolderError| match error {
        HolderError::Full(_) => 5,
        HolderError::Failed(_) => 4,
        // It may come back with the page.
        HolderError::Unreachable { .. } => 3,
        HolderError::Lost(_) => 2,
        HolderError::Wrong(Wrong::Zeroes | Wrong::Other) => 1,
        HolderError::Wrong(Wrong::Unknown) => 0,
    };
    if rank(&other) > rank(&one) { other } else { one }
}

impl Holder for Copies {
    fn read(&self, worker: WorkerId, offset: u64, into: &mut [u8]) -> Done {
        let Some(second) = self.second() else {
            return self.first.holder.read(worker, offset, into);
        };
        second.patiently(self, || self.read_either(worker, &second, offset, into))
    }

    fn read_many(&self, worker: WorkerId, pieces: &mut [PieceMut<'_>]) -> Done {
        let Some(second) = self.second() else {
            return self.first.holder.read_many(worker, pieces);
        };
        let (better, _) = self.by_pace(&second);
        if better.run(|holder| holder.read_many(worker, pieces)).is_ok() {
            return Ok(());
        }
        pieces.iter_mut().try_for_each(|(offset, into)| {
            second.patiently(self, || self.read_either(worker, &second, *offset, into))
        })
    }

    fn write(&self, worker: WorkerId, offset: u64, data: &[u8]) -> Done {
        let (_changing, second) = self.change();
        match second {
            None => self.first.holder.write(worker, offset, data),
            Some(second) => self.write_both(worker, &second, &[(offset, data)]),
        }
    }

    fn write_many(&self, worker: WorkerId, pieces: &[Piece<'_>]) -> Done {
        let (_changing, second) = self.change();
        match second {
            None => self.first.holder.write_many(worker, pieces),
            Some(second) => self.write_both(worker, &second, pieces),
        }
    }

    fn discard(&self, worker: WorkerId, offset: u64, length: u64) -> Done {
        let (_changing, second) = self.change();
        let Some(second) = second else {
            return self.first.holder.discard(worker, offset, length);
        };
        let bytes = iter::once(offset..offset + length);
        let discard = |holder: &VerifiedHolder| holder.discard(worker, offset, length);
        self.in_both(&second, bytes, |first, _| discard(first), |other, _| discard(other))
    }

    fn flush(&self, worker: WorkerId) -> Done {
        let (_changing, second) = self.change();
        match second {
            None => self.first.holder.flush(worker),
            Some(second) => {
                let flush = |holder: &VerifiedHolder| holder.flush(worker);
                let other = |other: &VerifiedHolder, _: Option<Sealed<'_>>| {
                    if second.lagging.is_some() { Ok(()) } else { flush(other) }
                };
                self.in_both(&second, iter::empty(), |first, _| flush(first), other)
            }
        }
    }

    fn unreachable_for(&self) -> Option<Duration> {
        let first = self.first.holder.unreachable_for()?;
        self.second().map_or(Some(first), |second| {
            second.copy.holder.unreachable_for().map(|other| other.min(first))
        })
    }

    fn is_lost(&self) -> bool {
        self.first.holder.is_lost()
            && self.second().is_none_or(|second| second.copy.holder.is_lost())
    }

    fn probe(&self) {
        self.first.holder.probe();
        self.second().iter().for_each(|second| second.copy.holder.probe());
    }

    fn end_older(&self) {
        self.first.holder.end_older();
        self.second().iter().for_each(|second| second.copy.holder.end_older());
    }

    fn close(&self) {
        self.first.holder.close();
        self.second().iter().for_each(|second| second.copy.holder.close());
    }
}
