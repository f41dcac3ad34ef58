//! What an engine is asked and what it answers, over its control socket: one JSON object a line, one request a connection.

use std::time::Duration;

use aquifer_mapping::Run;
use aquifer_page::Bytes;
use aquifer_pool::VolumeStatus;
use serde::{Deserialize, Serialize};

use super::RegionSpec;
use crate::counters::{Counts, Times};
use crate::engine::{Merged, Proposal, Usage};

/// What an engine is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub(super) enum Request {
    Status,
    ResizeCache {
        cache: Bytes,
    },
    /// Look at the limits that caches share, and have no more than this of them.
    Quota {
        most: Bytes,
    },
    /// Have lenders have all that is here.
    Persist,
    /// Make pages read as zeroes.
    Drop {
        pages: Run,
    },
    /// Have pages be shared with others of the group, where they are equal to what is proposed.
    Share {
        proposals: Vec<Proposal>,
    },
    /// Have nothing be shared any more.
    Unshare,
    /// Discard all, and end.
    Remove,
    /// Hand the region over: frames follow on this connection, which is the handing over for as long as it is there.
    Send,
    /// Take in a region that is being handed over: frames follow.
    Receive,
    /// It is this host's from now on.
    Own,
}

/// What it answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub(super) enum Response {
    Status(Box<Status>),
    Done,
    Merged(Merged),
    InUse { programs: String },
    Failed { error: String },
}

/// Everything about a region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// What it was made with, its cache as it is now.
    pub spec: RegionSpec,
    /// The engine's process.
    pub pid: u32,
    /// The programs that have it mapped.
    pub programs: Vec<String>,
    /// The same by their processes.
    #[serde(default)]
    pub processes: Vec<u32>,
    /// What is where.
    pub usage: Usage,
    /// Faults that wait for a lender that cannot be reached, or for room with one.
    pub waiting: u64,
    /// Since the engine started.
    pub counts: Counts,
    /// Of the faults on pages that had been written to, the share that found their page here. (Touches of pages that a program has mapped are
    /// no faults, and seen by nobody: programs find far more here.)
    pub hit_rate: f64,
    /// Of remote faults, since the engine started.
    pub latency: Latency,
    /// The same as a histogram, without empty ends.
    pub histogram: Vec<Bucket>,
    /// Of what came over an emulated link at a time.
    pub link: Option<Latency>,
    /// Milliseconds for which it has been running.
    pub uptime_ms: u64,
    /// Where its pages are.
    pub volume: VolumeStatus,
}

/// How long remote faults took, in microseconds, from when the engine knew of them until the page was there; or a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// How many there were.
    pub faults: u64,
    /// The median.
    pub p50_us: f64,
    /// Of a hundred, the slowest but one.
    pub p99_us: f64,
    /// Of a thousand, the slowest but one.
    pub p999_us: f64,
}

impl From<&Times> for Latency {
    fn from(times: &Times) -> Self {
        let at = |share| times.at(share).as_nanos() as f64 / 1000.0;
        Self { faults: times.count(), p50_us: at(0.5), p99_us: at(0.99), p999_us: at(0.999) }
    }
}

/// How many remote faults took longer than those of the bucket before, and up to so long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Bucket {
    /// The longest of them, in microseconds: a power of two.
    pub up_to_us: f64,
    /// How many.
    pub faults: u64,
}

impl Bucket {
    /// All buckets from the first to the last that has any.
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
