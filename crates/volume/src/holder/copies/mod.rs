//! A holder of one or two copies of each page, on two leases.
//!
//! Each copy has its own tags. A copy that missed a write of a page has no known tag for it, so no
//! reader takes an old version there. What a copy lacks is copied from the other one later.

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::iter;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, PAGE_SIZE, PAGES_PER_EXTENT, WorkerId};
use aquifer_transport::initiator::{InitiatorError, Outcome};
use aquifer_transport::sleep::going_to_sleep;

use super::turns::Turns;
use super::verified::{BATCH, is_whole};
use super::{Holder, HolderError, Piece, PieceMut, Wrong};
use crate::events::{Events, Happening};
use crate::tags::Tags;
use crate::target::LeaseTarget;

const PAGE: u64 = PAGE_SIZE as u64;

/// Bytes that a worker encrypts at a time.
const ROOM: usize = BATCH * PAGE_SIZE;

/// Pages that a repair copies at a time, while writes of these wait.
const RUN: u64 = 64;

/// How long the lender of one of two copies may keep a request waiting, before the other copy
/// serves it.
const PATIENCE: Duration = Duration::from_millis(500);

/// The pause between attempts to reach either lender.
const RETRY: Duration = Duration::from_millis(100);

/// One copy: a holder that verifies pages, and the tags that it compares.
pub(crate) struct Copy {
    /// The lease; `None` for the spill file.
    pub(crate) target: Option<LeaseTarget>,
    pub(crate) holder: Box<dyn Holder>,
    pub(crate) tags: Arc<Tags>,
}

/// The second copy of a lease's pages.
pub(crate) struct Second {
    pub(crate) copy: Copy,
    /// How long an operation waits if neither copy can serve it.
    pub(crate) io_timeout: Duration,
    pub(crate) events: Arc<Events>,
    /// Whether a copy may lack pages that the other has.
    pub(crate) is_behind: AtomicBool,
    /// Whether a copy had no room, so that new extents should go elsewhere.
    pub(crate) has_full: AtomicBool,
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
}

/// The result of an operation on one copy.
type Done = Result<(), HolderError>;

impl Copy {
    pub(crate) fn answers(&self) -> bool {
        self.holder.unreachable_for().is_none() && !self.holder.is_lost()
    }

    /// Runs the operation, unless the lender is known to be away.
    fn run(&self, operation: impl FnOnce(&dyn Holder) -> Done) -> Done {
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
        operation(&*self.holder)
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
        }
    }

    pub(crate) fn second(&self) -> Option<Arc<Second>> {
        self.second.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Begins a second copy. Waits for the changes under way.
    pub(crate) fn begin_second(&self, second: Arc<Second>) {
        let _alone = self.changes.write().unwrap_or_else(PoisonError::into_inner);
        for copy in [&self.first, &second.copy] {
            copy.holder.set_patience(Some(PATIENCE));
        }
        *self.second.write().unwrap_or_else(PoisonError::into_inner) = Some(second);
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

    /// Changes these bytes in both copies. One of them is enough: the other one is behind then. The
    /// operation may call its second argument while the lender works, for the other lender to work
    /// at the same time.
    fn in_both(
        &self,
        second: &Second,
        bytes: impl Iterator<Item = Range<u64>> + Clone,
        operation: impl Fn(&dyn Holder, &mut dyn FnMut()) -> Done,
    ) -> Done {
        second.patiently(self, || {
            let _turn = self.turns.take(bytes.clone().map(|bytes| touched(&bytes)));
            let is_tried = Cell::new(false);
            let operation = |holder: &dyn Holder, meanwhile: &mut dyn FnMut()| {
                is_tried.set(true);
                operation(holder, meanwhile)
            };
            let mut other = None;
            let mut change_other = || {
                let change = || second.copy.run(|holder| operation(holder, &mut || ()));
                other.get_or_insert_with(change);
            };
            let one = self.first.run(|holder| operation(holder, &mut change_other));
            change_other();
            let other = other.unwrap_or(Ok(()));
            let behind = match (one, other) {
                (Ok(()), Ok(())) => return Ok(()),
                (Ok(()), Err(error)) => (&second.copy, error),
                (Err(error), Ok(())) => (&self.first, error),
                (Err(one), Err(other)) => {
                    if is_tried.get() {
                        // A part of it may be done in one copy, and not in the other.
                        let both = [&self.first, &second.copy];
                        both.iter().for_each(|copy| {
                            bytes.clone().for_each(|bytes| copy.forget(&bytes));
                        });
                    }
                    return Err(worse(one, other));
                }
            };
            // Its tags may be those of the version before.
            bytes.clone().for_each(|bytes| behind.0.forget(&bytes));
            let is_full = matches!(behind.1, HolderError::Full(_));
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
            self.in_both(second, bytes, |holder, meanwhile| {
                holder.write_and(worker, group, meanwhile)
            })?;
        }
        Ok(())
    }

    /// Reads from the first copy, or else from the second.
    fn read_either(&self, worker: WorkerId, second: &Second, at: u64, into: &mut [u8]) -> Done {
        let bytes = at..at + into.len() as u64;
        if touched(&bytes).count() == 1 {
            let Err(error) = self.read_page(second, &self.first, worker, at, into) else {
                return Ok(());
            };
            return match self.read_page(second, &second.copy, worker, at, into) {
                Ok(()) => {
                    second.falls_behind(&self.first, &error);
                    Ok(())
                }
                Err(other) => Err(worse(error, other)),
            };
        }
        let Err(error) = self.first.run(|holder| holder.read(worker, at, into)) else {
            return Ok(());
        };
        let is_away = !matches!(error, HolderError::Wrong(_));
        if is_away && second.copy.run(|holder| holder.read(worker, at, into)).is_ok() {
            second.falls_behind(&self.first, &error);
            return Ok(());
        }
        // Each copy may have what the other lacks.
        let mut rest = into;
        let mut at = at;
        while !rest.is_empty() {
            let length = (PAGE - at % PAGE).min(rest.len() as u64);
            let (now, later) = rest.split_at_mut(length as usize);
            self.read_either(worker, second, at, now)?;
            (at, rest) = (at + length, later);
        }
        Ok(())
    }

    /// Reads a page, or a part of one, from a copy. If that proves the copy wrong, it forgets the
    /// page.
    fn read_page(
        &self,
        second: &Second,
        copy: &Copy,
        worker: WorkerId,
        at: u64,
        into: &mut [u8],
    ) -> Done {
        let first_look = copy.run(|holder| holder.read(worker, at, into));
        if !is_another_page(&first_look) {
            return first_look;
        }
        // A change may have ended meanwhile: this time none is under way.
        let bytes = at..at + into.len() as u64;
        let _turn = self.turns.take(iter::once(touched(&bytes)));
        let look = copy.run(|holder| holder.read(worker, at, into));
        if is_another_page(&look) {
            copy.forget(&bytes);
            look.as_ref().err().into_iter().for_each(|error| second.falls_behind(copy, error));
        }
        look
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

    /// Returns whether one of two copies may lack pages.
    pub(crate) fn may_be_behind(&self) -> bool {
        self.second().is_some_and(|second| second.is_behind.load(Ordering::Acquire))
    }

    /// Copies what one copy lacks from the other. Calls `go_on` after each run of pages, and stops
    /// if that returns false. Returns whether both copies are whole.
    pub(crate) fn repair(
        &self,
        worker: WorkerId,
        pages: u64,
        buffer: &mut [u8],
        mut go_on: impl FnMut() -> bool,
    ) -> Result<bool, HolderError> {
        let Some(second) = self.second() else { return Ok(true) };
        if !self.first.answers() || !second.copy.answers() {
            return Ok(false);
        }
        if !second.is_behind.swap(false, Ordering::AcqRel) {
            return Ok(true);
        }
        let done = self.repair_all(worker, &second, pages, buffer, &mut go_on);
        match done {
            Ok(true) => second.has_full.store(false, Ordering::Relaxed),
            _ => second.is_behind.store(true, Ordering::Release),
        }
        done
    }

    fn repair_all(
        &self,
        worker: WorkerId,
        second: &Second,
        pages: u64,
        buffer: &mut [u8],
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<bool, HolderError> {
        let need = |page: u64| Need::of(&self.first, &second.copy, page);
        let (mut at, mut failed) = (0, None);
        while let Some(first) = (at..pages).find(|page| need(*page).is_some()) {
            // A long run of zeroes is one discard.
            let kind = need(first);
            let is_zero = kind.is_some_and(|need| need.is_zero);
            let most = first + if is_zero { PAGES_PER_EXTENT } else { RUN };
            let end = (first..most.min(pages)).find(|page| need(*page) != kind);
            let end = end.unwrap_or(most.min(pages));
            at = end;
            let turn = self.turns.take(iter::once(first..end));
            if !self.second().is_some_and(|now| std::ptr::eq(&*now, second)) {
                return Ok(false);
            }
            // A change may have come first.
            let is_same = |kind: &Need| (first..end).all(|page| need(page) == Some(*kind));
            let Some(kind) = kind.filter(is_same) else {
                at = first;
                if go_on() {
                    continue;
                }
                return Ok(false);
            };
            let (from, to) = match kind.by_first {
                true => (&self.first, &second.copy),
                false => (&second.copy, &self.first),
            };
            let done = copy(worker, from, to, kind.is_zero, first..end, buffer);
            if done.is_err() {
                // One page may be to blame: it stays, and the others go on.
                for page in first..end {
                    let done = copy(worker, from, to, kind.is_zero, page..page + 1, buffer);
                    let Err(error) = done else { continue };
                    if matches!(error, HolderError::Unreachable { .. } | HolderError::Lost(_)) {
                        return Err(error);
                    }
                    if let HolderError::Wrong(Wrong::Zeroes | Wrong::Other) = error {
                        // No change is under way, so the source does not have it either.
                        from.tags.forget(page);
                    }
                    failed = Some(error);
                }
            }
            drop(turn);
            if !go_on() {
                return Ok(false);
            }
        }
        failed.map_or(Ok(true), Err)
    }

    /// Returns whether a copy had no room.
    pub(crate) fn has_full(&self) -> bool {
        self.second().is_some_and(|second| second.has_full.load(Ordering::Relaxed))
    }
}

/// Returns whether the copy returned another page than the one stored there, or seems to have.
fn is_another_page(read: &Done) -> bool {
    matches!(read, Err(HolderError::Wrong(Wrong::Zeroes | Wrong::Other)))
}

/// What the repair of a page needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Need {
    /// The first copy has it, and not the second.
    by_first: bool,
    /// The page is zeroes.
    is_zero: bool,
}

impl Need {
    fn of(first: &Copy, second: &Copy, page: u64) -> Option<Self> {
        let (one, other) = (first.tags.is_lacking(page), second.tags.is_lacking(page));
        let from = if other { first } else { second };
        (one != other).then(|| Self { by_first: other, is_zero: from.tags.is_of_zeroes(page) })
    }
}

fn copy(
    worker: WorkerId,
    from: &Copy,
    to: &Copy,
    is_zero_run: bool,
    pages: Range<u64>,
    buffer: &mut [u8],
) -> Done {
    let (at, length) = (pages.start * PAGE, (pages.end - pages.start) * PAGE);
    if is_zero_run {
        return to.run(|holder| holder.discard(worker, at, length));
    }
    let data = &mut buffer[..length as usize];
    from.run(|holder| holder.read(worker, at, data))?;
    to.run(|holder| holder.write(worker, at, data))
}

impl Second {
    fn falls_behind(&self, copy: &Copy, why: &HolderError) {
        if !self.is_behind.swap(true, Ordering::AcqRel)
            && let Some(target) = &copy.target
        {
            let (lease, lender) = (target.lease, target.lender.clone());
            let why = why.to_string();
            self.events.happened(Happening::CopyBehind { lease, lender, why });
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
        if self.first.run(|holder| holder.read_many(worker, pieces)).is_ok() {
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
        self.in_both(&second, bytes, |holder, _| holder.discard(worker, offset, length))
    }

    fn flush(&self, worker: WorkerId) -> Done {
        let (_changing, second) = self.change();
        match second {
            None => self.first.holder.flush(worker),
            Some(second) => self.in_both(&second, iter::empty(), |holder, _| holder.flush(worker)),
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
