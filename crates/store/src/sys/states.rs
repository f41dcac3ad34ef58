//! The page states of a lease, and locks on ranges of them.

use std::io;
use std::ops::Range;
use std::slice;

use super::mapping::Mapping;
use crate::lock::PageState;
use crate::span::runs;

/// A [`PageState`] for each page of a lease.
#[derive(Debug)]
pub(super) struct States {
    mapping: Mapping,
    pages: usize,
}

impl States {
    /// Makes the states of `pages` holes that no thread holds.
    pub(super) fn new(pages: usize) -> io::Result<Self> {
        Ok(Self { mapping: Mapping::zeroed(pages.max(1) * size_of::<PageState>())?, pages })
    }

    pub(super) fn all(&self) -> &[PageState] {
        // SAFETY: the mapping is as long as `pages` states, page-aligned, zeroed (a valid state,
        // all atomics) and only ever used through this function.
        unsafe { slice::from_raw_parts(self.mapping.base().cast(), self.pages) }
    }

    /// Returns the first of `pages` that is stored or locked.
    pub(super) fn first_not_idle(&self, pages: Range<usize>) -> Option<usize> {
        self.all()[pages.clone()]
            .iter()
            .position(|state| !state.is_idle_hole())
            .map(|at| pages.start + at)
    }

    /// Returns the runs of stored pages and holes in `pages`, a snapshot without locks.
    pub(super) fn peek_runs(
        &self,
        pages: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, bool)> {
        let states = self.all();
        runs(pages, |page| states[page].stored())
    }

    /// Sets whether `pages` are stored; the caller holds them for writing.
    pub(super) fn set_stored(&self, pages: &Range<usize>, stored: bool) {
        self.all()[pages.clone()].iter().for_each(|state| state.set_stored(stored));
    }

    /// Locks all of `pages` for reading, in ascending order.
    pub(super) fn read(&self, pages: Range<usize>) -> ReadLock<'_> {
        self.all()[pages.clone()].iter().for_each(PageState::read);
        ReadLock { states: self, pages }
    }

    /// Locks all of `pages` for reading if none is held for writing.
    pub(super) fn try_read(&self, pages: Range<usize>) -> Option<ReadLock<'_>> {
        let taken = self.all()[pages.clone()].iter().position(|state| !state.try_read());
        // Dropping this lock releases the pages that were locked.
        let end = taken.map_or(pages.end, |at| pages.start + at);
        let lock = ReadLock { states: self, pages: pages.start..end };
        taken.is_none().then_some(lock)
    }

    /// Locks all of `pages` for writing, in ascending order.
    pub(super) fn write(&self, pages: Range<usize>) -> WriteLock<'_> {
        self.all()[pages.clone()].iter().for_each(PageState::write);
        WriteLock { states: self, pages }
    }
}

/// Pages held for reading.
#[derive(Debug)]
pub(super) struct ReadLock<'a> {
    states: &'a States,
    pub(super) pages: Range<usize>,
}

impl Drop for ReadLock<'_> {
    fn drop(&mut self) {
        self.states.all()[self.pages.clone()].iter().for_each(PageState::unlock_read);
    }
}

/// Pages held for writing.
#[derive(Debug)]
pub(super) struct WriteLock<'a> {
    states: &'a States,
    pub(super) pages: Range<usize>,
}

impl Drop for WriteLock<'_> {
    fn drop(&mut self) {
        self.states.all()[self.pages.clone()].iter().for_each(PageState::unlock_write);
    }
}

/// Checks that the caller holds `inner`.
///
/// # Panics
/// If not all of `inner` is in `outer`, the held pages.
pub(super) fn assert_within(inner: &Range<usize>, outer: &Range<usize>) {
    assert!(outer.start <= inner.start && inner.end <= outer.end, "only pages that are held");
}
