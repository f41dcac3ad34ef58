use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::tls::Identity;
use aquifer_page::{Bytes, VolumeId};

use crate::ledger::Ledger;

/// What a volume is made with.
#[derive(Clone, Debug)]
pub struct VolumeConfig {
    /// Its id.
    pub id: VolumeId,
    /// Its size, which may be more or less than that of its leases.
    pub capacity: Bytes,
    /// How many threads will use it at a time. Each is known by a number below this and has connections of its own.
    pub workers: usize,
    /// How long I/O waits for a lender that cannot be reached before it fails.
    pub patience: Duration,
    /// This host's certificate; needed for leases that are `secure`.
    pub tls: Option<Identity>,
    /// A directory on a disk for the spill file, which takes extents when no lender has room.
    pub spill: Option<PathBuf>,
    /// Who is told where extents are, so that the next process can [restore](crate::Volume::restore) the volume.
    pub ledger: Option<Arc<dyn Ledger>>,
}

impl VolumeConfig {
    /// How long I/O waits for an unreachable lender unless configured otherwise: long enough for its agent to be
    /// restarted, below the ten seconds after which people take a machine for dead.
    pub const DEFAULT_PATIENCE: Duration = Duration::from_secs(8);
}
