//! The states of a region's pages, read from the files that the engine shares, without a request.

use aquifer_page::{Bytes, EXTENT_SIZE, ExtentIndex, PAGE_SIZE};
use aquifer_region_client::Run;
use aquifer_volume::LeaseTarget;
use serde::Serialize;

use super::files::Files;
use crate::error::RegionError;
use crate::extent_map::ExtentMap;
use crate::file::present;
use crate::table::{Page, Place, Table};

/// The state of a page (\[Jo20\], section 4.2: the status of a local page).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum PageState {
    /// Nowhere: it was never written, or was discarded, and reads as zeroes.
    Zero = 0,
    /// With a lender only. Soon after a migration, perhaps still with the source host.
    Remote = 1,
    /// In the local cache, and equal to a lender's as far as is known. The engine finds a program's
    /// write only when it scans or evicts the page.
    Resident = 2,
    /// In the local cache, and known to differ from a lender's.
    Dirty = 3,
    /// Kept once for several regions of the group.
    Shared = 4,
}

impl From<Page> for PageState {
    fn from(page: Page) -> Self {
        match page.place {
            // The page is with the source host.
            Place::Zero | Place::Remote if page.awaiting_source => Self::Remote,
            Place::Zero => Self::Zero,
            Place::Remote => Self::Remote,
            Place::Shared => Self::Shared,
            _ if page.dirty || !page.stored => Self::Dirty,
            _ => Self::Resident,
        }
    }
}

/// Consecutive pages in the same state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Pages {
    /// The first page.
    pub first: u64,
    /// The number of pages.
    pub count: u64,
    /// Their state.
    pub state: PageState,
}

impl Pages {
    /// Groups pages of the same state into runs.
    pub(super) fn runs(first: u64, states: impl IntoIterator<Item = PageState>) -> Vec<Self> {
        let mut runs: Vec<Self> = Vec::new();
        for (page, state) in (first..).zip(states) {
            match runs.last_mut() {
                Some(run) if run.state == state => run.count += 1,
                _ => runs.push(Self { first: page, count: 1, state }),
            }
        }
        runs
    }
}

/// The place of an extent, part of the metadata by which another host reaches the region's pages
/// (\[Jo20\], section 3.3).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Extent {
    /// The offset of its first byte in the region.
    pub from: Bytes,
    /// The lease that holds the extent, with its lender.
    pub lease: LeaseTarget,
    /// The offset of its first byte in the lease.
    pub at: Bytes,
}

/// Returns the states of these pages, while the engine runs.
pub(super) fn states(files: &Files, pages: Run) -> Result<Vec<PageState>, RegionError> {
    let spec = files.read()?;
    let all = spec.size.pages();
    if pages.first.checked_add(pages.count).is_none_or(|end| end > all) {
        return Err(RegionError::Misuse(format!(
            "region '{}' has {all} pages; the range ends beyond them",
            files.name()
        )));
    }
    let path = files.table();
    let table = Table::new(&Files::open(&path)?, all);
    let table = table.map_err(RegionError::io(format!("cannot map {}", path.display())))?;
    let mut states: Vec<_> =
        (pages.first..pages.end()).map(|page| table.get(page).into()).collect();
    if spec.began_local && table.is_new() {
        // Nobody watches the region yet, so only its file tells which pages there are.
        let (path, run) = (files.region(), pages.first..pages.end());
        let present = present(&Files::open(&path)?)
            .map_err(RegionError::io(format!("cannot read {}", path.display())))?;
        for found in present {
            for page in found.start.max(run.start)..found.end.min(run.end) {
                states[(page - run.start) as usize] = PageState::Dirty;
            }
        }
    }
    Ok(states)
}

/// Returns the places of the extents that have one.
pub(super) fn extents(files: &Files) -> Result<Vec<Extent>, RegionError> {
    let spec = files.read()?;
    let path = files.extent_map();
    let extent_map = ExtentMap::new(
        &path,
        &Files::open(&path)?,
        (spec.size.pages() * PAGE_SIZE as u64).div_ceil(EXTENT_SIZE),
    );
    let extent_map =
        extent_map.map_err(RegionError::io(format!("cannot map {}", path.display())))?;
    let of = |(extent, (lease, slot)): (ExtentIndex, (_, u32))| {
        let lease = spec.leases.iter().find(|target| target.lease == lease)?.clone();
        // The keys of encrypted pages are not for display.
        let lease = LeaseTarget { encryption: None, claim: None, ..lease };
        let [from, at] = [extent.0, u64::from(slot)].map(|extents| Bytes(extents * EXTENT_SIZE));
        Some(Extent { from, lease, at })
    };
    Ok(extent_map.all().filter_map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_are_alike_are_one_run() {
        use PageState::{Dirty, Remote, Zero};
        let runs = Pages::runs(7, [Zero, Zero, Remote, Dirty, Dirty]);
        let run = |first, count, state| Pages { first, count, state };
        assert_eq!(runs, [run(7, 2, Zero), run(9, 1, Remote), run(10, 2, Dirty)]);
        assert!(Pages::runs(0, []).is_empty());
    }
}
