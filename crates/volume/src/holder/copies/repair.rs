//! The copying of what one of two copies lacks from the other one.

use std::iter;
use std::ops::Range;
use std::sync::atomic::Ordering;

use aquifer_page::{PAGE_SIZE, PAGES_PER_EXTENT, WorkerId};

use super::{Copies, Copy, Done, Holder as _, HolderError, LaggingHolder, PAGE, Second, Wrong};

/// Pages that a repair copies at a time, while writes of these wait.
pub(super) const RUN: u64 = 64;

/// Pages of each copy that are read in one turn, only to verify them.
const SCRUBBED: usize = 16;

impl Copies {
    /// Reads the next pages of both copies that hold data, and verifies them. So a lender that is
    /// gone, and pages that changed there, are found although no program reads them.
    pub(crate) fn scrub(&self, worker: WorkerId, pages: u64) {
        let Some(second) = self.second() else { return };
        let both = [&self.first, &second.copy];
        let from = self.scrubbed.load(Ordering::Relaxed).min(pages);
        let has_data =
            |copy: &Copy, page| !copy.tags.is_lacking(page) && !copy.tags.is_of_zeroes(page);
        let is_stored = |page: &u64| both.iter().any(|copy| has_data(copy, *page));
        let mut next: Vec<_> =
            (from..pages).chain(0..from).filter(is_stored).take(SCRUBBED).collect();
        if next.is_empty() {
            // A read also shows whether a lender answers.
            next.push(0);
        }
        self.scrubbed.store(next.last().map_or(0, |page| page + 1), Ordering::Relaxed);
        let mut data = [0; PAGE_SIZE];
        for copy in both {
            for page in &next {
                let at = page * PAGE;
                let done = match copy.tags.is_lacking(*page) {
                    true => copy.read(worker, at, &mut data),
                    false => self.read_page(&second, copy, worker, at, &mut data),
                };
                if matches!(done, Err(HolderError::Unreachable { .. } | HolderError::Lost(_))) {
                    break;
                }
            }
        }
    }

    /// Copies what one copy lacks from the other, in the order of these ranges of pages. Calls
    /// `go_on` after each run of pages, and stops if that returns false. Returns whether both
    /// copies are whole.
    pub(crate) fn repair(
        &self,
        worker: WorkerId,
        order: impl IntoIterator<Item = Range<u64>>,
        buffer: &mut [u8],
        mut go_on: impl FnMut() -> bool,
    ) -> Result<bool, HolderError> {
        let Some(second) = self.second() else { return Ok(true) };
        let is_stalled = second.lagging.as_ref().is_some_and(LaggingHolder::is_stalled);
        if is_stalled || !self.first.answers() || !second.copy.answers() {
            return Ok(false);
        }
        if !second.is_behind.swap(false, Ordering::AcqRel) {
            return Ok(true);
        }
        let (mut all, mut order) = (Ok(true), order.into_iter());
        // A page that cannot be copied does not keep the others waiting.
        let mut done = loop {
            let Some(pages) = order.next() else { break all };
            match self.repair_pages(worker, &second, pages, buffer, &mut go_on) {
                Ok(true) => {}
                Ok(false) => break Ok(false),
                Err(error) => {
                    let is_over =
                        matches!(error, HolderError::Unreachable { .. } | HolderError::Lost(_));
                    all = Err(error);
                    if is_over {
                        break all;
                    }
                }
            }
        };
        if matches!(done, Ok(true)) {
            // What the second copy got may have yet to reach it.
            done = second.lagging.as_ref().map_or(Ok(()), |copy| copy.flush(worker)).map(|()| true);
        }
        match done {
            Ok(true) => second.has_full.store(false, Ordering::Relaxed),
            _ => second.is_behind.store(true, Ordering::Release),
        }
        done
    }

    fn repair_pages(
        &self,
        worker: WorkerId,
        second: &Second,
        pages: Range<u64>,
        buffer: &mut [u8],
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<bool, HolderError> {
        let need = |page: u64| Need::of(&self.first, &second.copy, page);
        let (mut at, mut failed) = (pages.start, None);
        while let Some(first) = (at..pages.end).find(|page| need(*page).is_some()) {
            // A long run of zeroes is one discard.
            let kind = need(first);
            let is_zero = kind.is_some_and(|need| need.is_zero);
            while let Some(copy) = &second.lagging
                && !copy.wait_for_half()
            {
                if copy.is_stalled() || !go_on() {
                    return Ok(false);
                }
            }
            let most = first + if is_zero { PAGES_PER_EXTENT } else { RUN };
            let most = most.min(pages.end);
            let end = (first..most).find(|page| need(*page) != kind).unwrap_or(most);
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
