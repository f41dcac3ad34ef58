//! The ledger: the places of extents, kept beyond this process.

use std::fmt::Debug;

use aquifer_page::{ExtentIndex, LeaseId};

/// A record of the places of a volume's extents.
///
/// The volume calls the ledger before it uses a new place, and before it gives up the old one. A
/// move copies an extent first, calls the ledger, and then discards the old slot. So the record is
/// true at any moment. The ledger MUST NOT fail, and is on the page path whenever an extent gets a
/// place.
pub trait Ledger: Debug + Send + Sync {
    /// Records that the extent is in this slot of the lease from now on. `None` means no place, or
    /// a spill file that ends with the process.
    fn note(&self, extent: ExtentIndex, place: Option<(LeaseId, u32)>);
}
