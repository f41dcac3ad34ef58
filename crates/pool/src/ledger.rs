//! Where extents are, told to who keeps it beyond this process.

use std::fmt::Debug;

use aquifer_page::LeaseId;

/// Keeps a note of where the extents of a volume are.
///
/// It is told before anything is stored at a place and before anything at the one before is given up, so what it has kept is true
/// at any moment. It MUST NOT fail, and is on the page path whenever an extent gets a place.
pub trait Ledger: Debug + Send + Sync {
    /// The extent is in this slot of the lease from now on, or nowhere.
    fn note(&self, extent: usize, place: Option<(LeaseId, u32)>);
}
