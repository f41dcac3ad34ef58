//! The errors of a volume.

use std::io;
use std::path::PathBuf;

use aquifer_page::{Bytes, LeaseId, VolumeId};
use aquifer_transport::initiator::InitiatorError;

use crate::holder::HolderError;

/// The reason why an operation on a volume failed.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// A lender, or the spill file, failed. Data that the operation did not concern stays intact.
    #[error("volume {volume}, page {page}: {place}: {source}")]
    Holder {
        /// The volume.
        volume: VolumeId,
        /// The first page of the volume that the operation concerned.
        page: u64,
        /// The lender and the lease, or the spill file.
        place: String,
        /// The error of the lender or the file.
        source: HolderError,
    },
    /// No lease has a free extent, and there is no spill file, or it is full too.
    #[error(
        "volume {0}: no lease has room for another extent, and no spill file takes it: borrow more \
         memory"
    )]
    NoRoom(VolumeId),
    /// The range is not inside the volume.
    #[error("volume {volume}: {length} bytes at {offset} are outside its {capacity}")]
    OutOfRange {
        /// The volume.
        volume: VolumeId,
        /// The offset of the first byte.
        offset: u64,
        /// The length in bytes.
        length: u64,
        /// The volume's size.
        capacity: Bytes,
    },
    /// The lease is not part of the volume.
    #[error("volume {0} has no lease {1}")]
    UnknownLease(VolumeId, LeaseId),
    /// The lease is part of the volume already, or on its way out of it.
    #[error("volume {0} has lease {1} already")]
    LeaseInUse(VolumeId, LeaseId),
    /// The lease is being evacuated already.
    #[error("volume {0} is already evacuating lease {1}")]
    Evacuating(VolumeId, LeaseId),
    /// The evacuation of a lease has ended, but extents are still there.
    #[error(
        "volume {volume}: {lease} still holds {extents} extents after the evacuation, \
         so the volume keeps the lease: evacuate it again"
    )]
    StillUsed {
        /// The volume.
        volume: VolumeId,
        /// The lender and the lease.
        lease: String,
        /// The number of extents that it still holds.
        extents: u64,
    },
    /// No extent may move at present.
    #[error(
        "volume {0}: no extent can move while the volume is handed over to another host; \
         repeat the request afterwards"
    )]
    Held(VolumeId),
    /// The lease cannot be used.
    #[error("cannot use lease {lease} of {lender}: {why}")]
    Unusable {
        /// The lease.
        lease: LeaseId,
        /// The lease's lender.
        lender: String,
        /// The reason.
        why: String,
    },
    /// The lender cannot be reached, or refused the handshake.
    #[error("cannot use lease {lease} of {lender}: {source}")]
    Connect {
        /// The lease.
        lease: LeaseId,
        /// The lease's lender.
        lender: String,
        /// The error of the connection.
        source: Box<InitiatorError>,
    },
    /// A secret could not be read.
    #[error(
        "cannot use lease {lease} of {lender}: the secret in {path}: {why}",
        path = path.display()
    )]
    Secret {
        /// The lease.
        lease: LeaseId,
        /// The lease's lender.
        lender: String,
        /// The file of the secret.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// A second copy cannot end, as the first one is not whole.
    #[error(
        "lease {copy} is the only copy of pages of lease {of}, whose lender lacks them or does not \
         answer: bring that lender back, or move the pages of lease {of} elsewhere first"
    )]
    OnlyCopy {
        /// The lease of the second copy.
        copy: LeaseId,
        /// The lease of the first one.
        of: LeaseId,
    },
    /// There was no memory for the tags by which the volume verifies a lease's pages.
    #[error("cannot keep tags for the pages of lease {lease}: {source}")]
    Tags {
        /// The lease.
        lease: LeaseId,
        /// The system's error.
        source: io::Error,
    },
    /// A copy of pages on the disk could not be begun.
    #[error("cannot keep copies of pages on the disk at {path}: {source}", path = path.display())]
    DiskCopy {
        /// The file, or how the names of the files begin.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The spill file could not be made.
    #[error("cannot make a spill file at {path}: {source}", path = path.display())]
    Spill {
        /// The spill file, or the directory of one without a name.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl VolumeError {
    /// Returns whether a lender no longer has the data that was stored there.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Holder { source: HolderError::Lost(_), .. })
    }

    /// Returns whether a lender could not be reached before the timeout.
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Holder { source: HolderError::Unreachable { .. }, .. })
    }
}

impl From<VolumeError> for io::Error {
    /// Converts the error for block devices. A full lender or volume becomes `StorageFull`, an
    /// unreachable lender `TimedOut`, a bad range `InvalidInput`, and the rest `Other`.
    fn from(error: VolumeError) -> Self {
        let kind = match &error {
            VolumeError::NoRoom(_) | VolumeError::Holder { source: HolderError::Full(_), .. } => {
                io::ErrorKind::StorageFull
            }
            VolumeError::Holder { source: HolderError::Unreachable { .. }, .. } => {
                io::ErrorKind::TimedOut
            }
            VolumeError::OutOfRange { .. } => io::ErrorKind::InvalidInput,
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
