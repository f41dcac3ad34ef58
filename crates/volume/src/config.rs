//! The configuration of a volume.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use aquifer_page::{Bytes, VolumeId};
use aquifer_transport::tls::Identity;

use crate::ledger::Ledger;

/// The configuration of a new volume.
#[derive(Clone, Debug)]
pub struct VolumeConfig {
    /// The volume's id.
    pub id: VolumeId,
    /// The volume's size, which may be more or less than the capacity of its leases.
    pub capacity: Bytes,
    /// The number of threads that use the volume at a time. Each has a number below this, and
    /// connections of its own.
    pub workers: usize,
    /// The timeout of I/O for a lender that cannot be reached.
    pub io_timeout: Duration,
    /// This host's certificate, which `secure` leases need.
    pub tls: Option<Identity>,
    /// A directory on a disk for the spill file, which takes extents when no lender has room.
    pub spill: Option<PathBuf>,
    /// The ledger that records the places of extents, so that the next process can
    /// [restore](crate::Volume::restore) the volume.
    pub ledger: Option<Arc<dyn Ledger>>,
}

impl VolumeConfig {
    /// The default timeout of I/O for an unreachable lender. It leaves enough time for a restart of
    /// the lender's agent. It stays below the 10 s after which people take a machine for dead.
    pub const DEFAULT_IO_TIMEOUT: Duration = Duration::from_secs(8);
}
