//! Which pages are dirty, and how a crash at any point affects that. All other modules ask this
//! one.
//!
//! A page that is here is **dirty unless two things prove that the volume has the same**:
//! - The table says that the page is stored and not dirty.
//! - Each program that maps the page has a mark in its page table: no write since the last scan.
//!
//! An empty page table entry proves nothing. The program or the kernel can drop an entry, and its
//! mark with it. A program that has not attached to this engine proves nothing either. When a
//! program is gone, all pages that it may have written to are dirty.
//!
//! While a program has memory pinned, its marks prove nothing, and no page may leave. A device
//! writes to pinned memory without a mark. It would continue to write to a page that has left the
//! file.
//!
//! The engine scans the marks, updates the table, and then arms the marks of exactly those pages.
//! So at every moment the mark or the table tells of a write, and a crash loses neither. The thread
//! that moves a page judges it; no other thread arms its mark meanwhile.

use std::collections::HashSet;
use std::io;
use std::ops::Range;

use aquifer_page::Bytes;

use super::Engine;
use super::cache::Cache;
use crate::error::RegionError;
use crate::file::runs;
use crate::lock;
use crate::table::{Page, Place};

impl Page {
    /// Returns whether the table alone requires a write to the volume before the page may leave.
    pub(super) fn is_known_dirty(self) -> bool {
        self.dirty || !self.stored
    }
}

/// The state of a page that an earlier engine left.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The page is in this state.
    Is(Page),
    /// The page is in this state, and the file has other content in its place, which must go.
    IsNot(Page),
    /// The page was only in the file, and is not there any more.
    Lost,
}

/// Returns the state of a page after a crash that left it as `was`. A page that is `in_file` is
/// present, whatever the table says. `shared` says that the page may be mapped from a frame of the
/// group.
pub(super) fn after_crash(was: Page, in_file: bool, shared: bool) -> Found {
    let is = Page { wanted: false, ..was };
    match (was.place, in_file) {
        // The page is still with the source host, which sends it; the file holds zeroes that it
        // replaces.
        (Place::Zero | Place::Remote | Place::Leaving, true) if was.awaiting_source => {
            Found::IsNot(is.without_frame())
        }
        // A program may have it in its page table; a fault tells if not. Its mark tells of writes.
        // No mark tells of a page that was half written back, discarded or shared. No lender has a
        // page from another host.
        (place, true) => {
            let was_sure = matches!(place, Place::Resident | Place::Unmapped | Place::Filling);
            let dirty = is.is_known_dirty() || !was_sure || was.awaiting_source || shared;
            Found::Is(Page { dirty, awaiting_source: false, ..is.at(Place::Resident) })
        }
        (_, false) if shared => Found::Is(is.at(Place::Shared)),
        (Place::Lost, false) => Found::Lost,
        (Place::Resident | Place::Unmapped, false) if !was.awaiting_source => Found::Lost,
        (_, false) => Found::Is(is.without_frame()),
    }
}

impl Engine {
    /// Records in the table the resident pages that programs may have written to, then arms their
    /// marks. A destination host has old versions of these. The caller holds the cache's lock.
    pub(super) fn note_dirty(&self, cache: &mut Cache, pages: &Range<u64>) -> io::Result<()> {
        let is_mapped = |page: &u64| self.table.get(*page).place == Place::Resident;
        let here = runs(pages.clone().filter(is_mapped));
        let mut unproven: Vec<u64> = self.unproven(cache, &here)?.into_iter().collect();
        unproven.sort_unstable();
        for page in &unproven {
            let is = self.table.get(*page);
            if !is.dirty {
                self.table.set(*page, Page { dirty: true, ..is });
            }
        }
        cache.outgoing.iter_mut().for_each(|outgoing| outgoing.changed(&unproven));
        let unproven = runs(unproven);
        self.programs().iter().try_for_each(|program| program.mapping.notice_writes(&unproven))
    }

    /// Returns the pages among these that a program may have written to since their marks were
    /// armed.
    pub(super) fn unproven(
        &self,
        cache: &mut Cache,
        pages: &[Range<u64>],
    ) -> io::Result<HashSet<u64>> {
        if !self.is_known_now(cache) {
            return Ok(pages.iter().cloned().flatten().collect());
        }
        let mut unproven = HashSet::new();
        self.programs().iter().try_for_each(|program| program.unproven(pages, &mut unproven))?;
        Ok(unproven)
    }

    /// Returns why no page may leave, if a program has memory pinned.
    pub(super) fn pinned_by(&self) -> Option<RegionError> {
        self.programs().iter().find_map(|program| {
            let pinned = program.process.pinned();
            (pinned > Bytes::ZERO).then(|| RegionError::Pinned { program: program.name(), pinned })
        })
    }

    /// Returns whether this engine serves every program that may have pages mapped. A program that
    /// ended without reattaching may have written to any page that it had mapped.
    pub(super) fn is_known(&self) -> bool {
        self.is_known_now(&mut lock(&self.cache))
    }

    /// As [`is_known`](Self::is_known), with the cache locked.
    pub(super) fn is_known_now(&self, cache: &mut Cache) -> bool {
        let mut surviving_mappings = lock(&self.programs.surviving);
        if surviving_mappings.missing() == 0 {
            return true;
        }
        if surviving_mappings.look() {
            self.lose_marks(cache);
        }
        surviving_mappings.missing() == 0
    }

    /// Marks all pages dirty that may be mapped, as a program's page table is gone with its marks.
    pub(super) fn lose_marks(&self, cache: &mut Cache) {
        self.lose_marks_of(cache, 0..self.table.pages());
    }

    /// Does the same for these pages. The table knows the state of a page that was unmapped
    /// earlier.
    pub(super) fn lose_marks_of(&self, cache: &mut Cache, pages: Range<u64>) {
        let may_be_mapped = |page: &u64| {
            matches!(self.table.get(*page).place, Place::Resident | Place::Filling | Place::Leaving)
        };
        let lost: Vec<u64> = pages.filter(may_be_mapped).collect();
        for page in &lost {
            let is = self.table.get(*page);
            if !is.dirty {
                self.table.set(*page, Page { dirty: true, ..is });
            }
        }
        cache.outgoing.iter_mut().for_each(|outgoing| outgoing.changed(&lost));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    fn page(place: Place, stored: bool, dirty: bool, awaiting_source: bool) -> Page {
        Page { place, stored, dirty, wanted: false, awaiting_source }
    }

    #[test]
    fn a_page_on_its_way_is_dirty_once_a_program_has_died() {
        let engine = Engine::bare(4);
        let clean = |place| page(place, true, false, false);
        let places = [Place::Resident, Place::Filling, Place::Leaving, Place::Unmapped];
        (0..).zip(places).for_each(|(at, place)| engine.table.set(at, clean(place)));
        engine.lose_marks(&mut lock(&engine.cache));
        let dirty: Vec<_> = (0..4).map(|at| engine.table.get(at).dirty).collect();
        // A page outside all page tables was judged when it left them.
        assert_eq!(dirty, [true, true, true, false]);
        // The thread that was mapping the page for another program does not know of that.
        engine.complete_fill(1, clean(Place::Resident), false);
        assert!(engine.table.get(1).dirty);
    }

    #[test]
    fn a_crash_makes_dirty_what_nothing_proves_clean() {
        let is_dirty = |was| match after_crash(was, true, false) {
            Found::Is(is) => is.dirty,
            other => panic!("{other:?}"),
        };
        assert!(!is_dirty(page(Place::Resident, true, false, false)));
        assert!(!is_dirty(page(Place::Unmapped, true, false, false)));
        assert!(is_dirty(page(Place::Leaving, true, false, false)));
        assert!(is_dirty(page(Place::Remote, true, false, false)));
        assert!(is_dirty(page(Place::Resident, false, false, false)));
        assert!(is_dirty(page(Place::Filling, true, false, true)));
    }

    #[test]
    fn zeroes_in_the_place_of_a_page_that_is_coming_go() {
        let was = page(Place::Leaving, false, true, true);
        let nowhere = page(Place::Zero, false, false, true);
        assert_eq!(after_crash(was, true, false), Found::IsNot(nowhere));
    }
}
