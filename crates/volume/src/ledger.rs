//! The ledger: the places of extents and the tags of pages, kept beyond this process.

use std::fmt::Debug;
use std::io;

use aquifer_page::{ExtentIndex, LeaseId};

use crate::tags::TagMemory;

/// A record of the places of a volume's extents, and of the tags of the pages that its leases hold.
///
/// The volume calls the ledger before it uses a new place, and before it gives up the old one. A
/// move copies an extent first, calls the ledger, and then discards the old slot. So the record is
/// true at any moment. The ledger MUST NOT fail, and is on the page path whenever an extent gets a
/// place.
pub trait Ledger: Debug + Send + Sync {
    /// Records that the extent is in this slot of the lease from now on. `None` means no place, or
    /// a spill file that ends with the process.
    fn note(&self, extent: ExtentIndex, place: Option<(LeaseId, u32)>);

    /// Returns the memory for the tags of a lease of so many pages: that of the earlier process, or
    /// else, if the lease may be new, memory of zeroes. All of it is allocated.
    ///
    /// # Errors
    /// There is no memory, or no room in the file system, or the tags of the earlier process are
    /// gone.
    fn tags(&self, lease: LeaseId, pages: u64, may_be_new: bool) -> io::Result<TagMemory>;

    /// Forgets the tags of a lease that the volume does not have.
    fn forget_tags(&self, lease: LeaseId);
}
