//! Requests to an engine and its answers, over its control socket: one JSON object a line, one
//! request a connection.

use std::path::PathBuf;
use std::time::Duration;

use aquifer_page::{Bytes, LeaseId};
use aquifer_region_client::Run;
use aquifer_volume::{LeaseTarget, Progress, VolumeStatus};
use serde::{Deserialize, Serialize};

use super::RegionSpec;
use crate::counters::{Counts, Times};
use crate::engine::{Merged, Proposal, Usage};

/// A request to an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub(super) enum Request {
    Status,
    /// Change the limit of the cache. `auto` says whether the host's agent chooses it from now on.
    /// `None` is for the agent, which may change only a limit that it chose.
    ResizeCache {
        cache: Bytes,
        auto: Option<bool>,
    },
    /// Read the shared limits again, and use at most this much of them.
    Quota {
        most: Bytes,
    },
    /// Write all dirty pages to the lenders.
    Persist,
    /// Make pages read as zeroes.
    Drop {
        pages: Run,
    },
    /// Share pages with others of the group, if they are equal to the proposals.
    Share {
        proposals: Vec<Proposal>,
    },
    /// Unshare all pages.
    Unshare,
    /// Add a lease. A lease that the region has is not added again.
    AddLease {
        lease: Box<LeaseTarget>,
        /// The directory of the host's certificate, for a region that has none yet.
        identity: Option<PathBuf>,
    },
    /// Begin a second copy of the lease `of`. A copy that the region has is not begun again.
    /// Engines of earlier versions do not know `lags`: their copy does not lag behind.
    AddCopy {
        of: LeaseId,
        lease: Box<LeaseTarget>,
        #[serde(default)]
        lags: bool,
    },
    /// Keep second copies of all pages that leave, in files in this directory. A region that keeps
    /// some keeps those.
    KeepDiskCopies {
        directory: PathBuf,
    },
    /// Move all extents off a lease and release it, or end the second copy on it. The answers are
    /// `Evacuating` during the move, then `Done`.
    ///
    /// Any client may repeat it at any time. While the lease moves, the repeated request follows
    /// that move. A lease that the region does not have counts as moved.
    Evacuate {
        lease: LeaseId,
        /// The directory for a spill file, if pages may go to one for lack of other room. A region
        /// that has a spill file keeps that.
        #[serde(default)]
        spill: Option<PathBuf>,
    },
    /// Discard all pages, and end.
    Remove,
    /// Hand the region over. Frames follow on this connection, and the hand-over ends with it.
    Send,
    /// Take in a region that is handed over. Frames follow on this connection.
    Receive,
    /// Make the region this host's.
    Own,
}

/// An engine's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub(super) enum Response {
    Status(Box<RegionStatus>),
    Done,
    Merged(Merged),
    /// Progress of an evacuation; another answer follows.
    Evacuating(Progress),
    InUse {
        programs: String,
    },
    Failed {
        error: String,
    },
}

/// The status of a region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RegionStatus {
    /// The region's specification, with its present cache limit.
    pub spec: RegionSpec,
    /// The id of the engine's process.
    pub pid: u32,
    /// The names of the programs that map the region.
    pub programs: Vec<String>,
    /// The ids of their processes.
    #[serde(default)]
    pub processes: Vec<u32>,
    /// The parts of the region by their place.
    pub usage: Usage,
    /// The number of faults that wait for an unreachable lender, or for room that needs one.
    pub waiting: u64,
    /// The counts since the engine started.
    pub counts: Counts,
    /// The share of faults that found their page here, among faults on pages written earlier. The
    /// engine does not see touches of mapped pages, so programs find a far larger share here.
    pub hit_rate: f64,
    /// The times of fetches since the engine started.
    #[serde(flatten)]
    pub fetches: FetchTimes,
    /// The time since the engine started, in milliseconds.
    pub uptime_ms: u64,
    /// The status of the region's volume.
    pub volume: VolumeStatus,
}

/// How long fetches took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FetchTimes {
    /// The latency of remote faults.
    pub latency: Latency,
    /// The same times as a histogram, without empty ends.
    pub histogram: Vec<Bucket>,
    /// The latency of fetches over an emulated link.
    pub link: Option<Latency>,
}

/// The latency of remote faults, from the engine's notice until the page was mapped, or of a link.
/// In microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// The number of faults or fetches.
    pub faults: u64,
    /// The median.
    pub p50_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// The 99.9th percentile.
    pub p999_us: f64,
}

impl From<&Times> for Latency {
    fn from(times: &Times) -> Self {
        let at = |share| times.at(share).as_nanos() as f64 / 1000.0;
        Self { faults: times.count(), p50_us: at(0.5), p99_us: at(0.99), p999_us: at(0.999) }
    }
}

/// The number of remote faults with a time above the previous bucket's bound, up to this bucket's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Bucket {
    /// The upper bound of the bucket in microseconds, a power of two.
    pub up_to_us: f64,
    /// The number of faults.
    pub faults: u64,
}

impl Bucket {
    /// Returns all buckets from the first to the last with a fault.
    pub(super) fn of(times: &Times) -> Vec<Self> {
        let buckets = (0..27).map(|power| {
            let up_to = Duration::from_micros(1 << power);
            let longer_than = if power == 0 { Duration::ZERO } else { up_to / 2 };
            Self { up_to_us: f64::from(1_u32 << power), faults: times.between(longer_than, up_to) }
        });
        let mut buckets: Vec<_> = buckets.skip_while(|bucket| bucket.faults == 0).collect();
        while buckets.last().is_some_and(|bucket| bucket.faults == 0) {
            buckets.pop();
        }
        buckets
    }
}
