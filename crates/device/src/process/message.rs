//! What a volume process is asked and what it answers, over its control socket.

use aquifer_page::{Bytes, LeaseId};
use aquifer_pool::{LeaseTarget, VolumeStatus};
use serde::{Deserialize, Serialize};

use super::VolumeRecord;
use crate::safety::Report;
use crate::swap;

/// By this line on its standard input a volume process hears that its starter has heard that it serves. Where the pipe ends
/// without it, nobody knows of the volume, and the process takes it away.
pub(super) const KEEP: &str = "keep\n";

/// What a volume process is asked: one JSON object on a line, one request a connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// How is everything? Answered with [`Response::Status`].
    Status,
    /// Lay the volume over one more lease. Answered with [`Response::Done`].
    AddLease {
        /// The lease.
        lease: Box<LeaseTarget>,
    },
    /// Move everything off a lease and give it up. Answered with [`Response::Evacuating`] as it goes on and
    /// [`Response::Done`]. May be asked again, by the same client or another, at any time: while the lease moves, the answer
    /// follows that; a lease that the volume does not have counts as moved.
    Evacuate {
        /// The lease.
        lease: LeaseId,
    },
    /// Turn swap off, take the device away and end. Answered with [`Response::Done`].
    Detach,
}

/// What it answers: JSON objects, one a line; the first that is no progress is the last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub enum Response {
    /// How everything is.
    Status(Box<Status>),
    /// It is done.
    Done,
    /// How far turning swap off is.
    SwapOff(swap::Progress),
    /// How far an evacuation is.
    Evacuating(aquifer_pool::Progress),
    /// It could not be done; the volume is served as before.
    Failed {
        /// What failed, why, and what to do.
        error: String,
    },
}

/// Everything about a volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// What its process was told, and what came of it.
    pub record: VolumeRecord,
    /// What the swap on the device holds.
    pub swap_used: Bytes,
    /// The volume and its leases.
    pub volume: VolumeStatus,
    /// What protects the process.
    pub safety: Report,
}
