//! The pages of a lease in either kind of file, and locks on ranges of them.

use std::ops::Range;

use super::states::States;
use crate::lock::PageState;

/// The pages of a lease, each with a state.
pub(crate) trait LeasePages: Sized {
    /// Returns the states of all pages.
    fn states(&self) -> &States;

    /// Returns the number of pages, stored or not.
    fn pages(&self) -> usize {
        self.states().all().len()
    }

    /// Returns the first of `pages` that is stored or locked.
    fn first_not_idle(&self, pages: Range<usize>) -> Option<usize> {
        let mut states = self.states().all()[pages.clone()].iter();
        states.position(|state| !state.is_idle_hole()).map(|at| pages.start + at)
    }

    /// Returns whether a page is stored, a snapshot without a lock.
    fn stored(&self, page: usize) -> bool {
        self.states().all()[page].stored()
    }

    /// Locks all of `pages` for reading, in ascending order.
    fn read(&self, pages: Range<usize>) -> Held<'_, Self, READ> {
        self.states().all()[pages.clone()].iter().for_each(PageState::read);
        Held { of: self, pages }
    }

    /// Locks all of `pages` for reading if none is held for writing.
    fn try_read(&self, pages: Range<usize>) -> Option<Held<'_, Self, READ>> {
        let mut states = self.states().all()[pages.clone()].iter();
        let taken = states.position(|state| !state.try_read());
        // Dropping this lock releases the pages that were locked.
        let end = taken.map_or(pages.end, |at| pages.start + at);
        let held = Held { of: self, pages: pages.start..end };
        taken.is_none().then_some(held)
    }

    /// Locks all of `pages` for writing, in ascending order.
    fn write(&self, pages: Range<usize>) -> Held<'_, Self, WRITE> {
        self.states().all()[pages.clone()].iter().for_each(PageState::write);
        Held { of: self, pages }
    }
}

/// The mode of pages held for reading.
pub(crate) const READ: bool = false;
/// The mode of pages held for writing.
pub(crate) const WRITE: bool = true;

/// Locked pages, in the mode [`READ`] or [`WRITE`], until this value is dropped.
#[derive(Debug)]
pub(crate) struct Held<'a, P: LeasePages, const MODE: bool> {
    pub(super) of: &'a P,
    pages: Range<usize>,
}

impl<P: LeasePages, const MODE: bool> Held<'_, P, MODE> {
    /// Returns all held pages.
    pub(crate) fn pages(&self) -> Range<usize> {
        self.pages.clone()
    }

    /// Returns whether a page is stored.
    pub(crate) fn stored(&self, page: usize) -> bool {
        self.of.stored(page)
    }

    /// Checks that all of `pages` are held.
    ///
    /// # Panics
    /// If not.
    pub(super) fn assert_held(&self, pages: &Range<usize>) {
        let held = &self.pages;
        assert!(held.start <= pages.start && pages.end <= held.end, "only pages that are held");
    }
}

impl<P: LeasePages, const MODE: bool> Drop for Held<'_, P, MODE> {
    fn drop(&mut self) {
        let unlock: fn(&PageState) =
            if MODE == WRITE { PageState::unlock_write } else { PageState::unlock_read };
        self.of.states().all()[self.pages.clone()].iter().for_each(unlock);
    }
}
