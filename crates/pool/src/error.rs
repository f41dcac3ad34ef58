use std::io;
use std::path::PathBuf;

use aquifer_page::{Bytes, LeaseId, VolumeId};

use crate::holder::{HolderError, LinkError};

/// Why a volume could not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A lender, or the spill file, failed; what it held that was not asked for now is untouched.
    #[error("volume {volume}, page {page}: {place}: {source}")]
    Holder {
        /// The volume.
        volume: VolumeId,
        /// The first page of the volume that was concerned.
        page: u64,
        /// The lender and the lease, or the spill file.
        place: String,
        /// What went wrong there.
        source: HolderError,
    },
    /// No lease has an extent free, and there is no spill file, or it is full as well.
    #[error(
        "volume {0}: no lease has room for another extent, and no spill directory can take it: borrow more, or configure one"
    )]
    NoRoom(VolumeId),
    /// The range is not inside the volume.
    #[error("volume {volume}: {length} bytes at {offset} are outside of its {capacity}")]
    OutOfRange {
        /// The volume.
        volume: VolumeId,
        /// First byte.
        offset: u64,
        /// Bytes.
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
    /// The lease is moving out already.
    #[error("lease {1} is already being moved out of volume {0}")]
    Evacuating(VolumeId, LeaseId),
    /// All of a lease was to be moved out, and something is still there.
    #[error(
        "volume {volume}: {lease} still holds {extents} extents after all were moved, so it is kept: move it out again"
    )]
    StillUsed {
        /// The volume.
        volume: VolumeId,
        /// The lender and the lease.
        lease: String,
        /// What it still holds.
        extents: u64,
    },
    /// The lease cannot be used.
    #[error("cannot use lease {lease} of {lender}: {why}")]
    Unusable {
        /// The lease.
        lease: LeaseId,
        /// Whose it is.
        lender: String,
        /// What is wrong with it.
        why: String,
    },
    /// The lender did not let us in.
    #[error("cannot use lease {lease} of {lender}: {source}")]
    Connect {
        /// The lease.
        lease: LeaseId,
        /// Whose it is.
        lender: String,
        /// What went wrong.
        source: Box<LinkError>,
    },
    /// A secret could not be read.
    #[error("cannot use lease {lease} of {lender}: the secret in {path}: {why}", path = path.display())]
    Secret {
        /// The lease.
        lease: LeaseId,
        /// Whose it is.
        lender: String,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The spill file could not be made.
    #[error("cannot make a spill file in {path}: {source}", path = path.display())]
    Spill {
        /// The directory.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
}

impl PoolError {
    /// Whether a lender does not have what was stored there.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Holder { source: HolderError::Lost(_), .. })
    }

    /// Whether a lender could not be reached for as long as patience lasts.
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Holder { source: HolderError::Unreachable { .. }, .. })
    }
}

impl From<PoolError> for io::Error {
    /// For block devices: out of room is `ENOSPC`, all else an input/output error with its text.
    fn from(error: PoolError) -> Self {
        let kind = match &error {
            PoolError::NoRoom(_) | PoolError::Holder { source: HolderError::Full(_), .. } => {
                io::ErrorKind::StorageFull
            }
            PoolError::Holder { source: HolderError::Unreachable { .. }, .. } => {
                io::ErrorKind::TimedOut
            }
            PoolError::OutOfRange { .. } => io::ErrorKind::InvalidInput,
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
