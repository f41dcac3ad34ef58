//! The page states of a lease.

use std::io;
use std::ops::Range;
use std::slice;

use super::mapping::Mapping;
use crate::lock::PageState;
use crate::span::runs;

/// A [`PageState`] for each page of a lease.
#[derive(Debug)]
pub(crate) struct States {
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
}
