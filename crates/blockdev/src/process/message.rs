//! The requests and responses on a volume process's control socket.

use aquifer_page::{Bytes, LeaseId};
use aquifer_volume::{LeaseTarget, VolumeStatus};
use serde::{Deserialize, Serialize};

use super::VolumeRecord;
use crate::safety::SafetyReport;
use crate::swap;

/// Line by which the starter confirms on the process's standard input that it knows of the volume.
/// If the pipe ends without it, no program knows of the volume, and the process detaches it.
pub(super) const KEEP: &str = "keep\n";

/// A request to a volume process: one JSON object on a line, one request per connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// Asks for the status. The reply is [`Response::Status`].
    Status,
    /// Adds a lease to the volume. The reply is [`Response::Done`].
    AddLease {
        /// The lease to add.
        lease: Box<LeaseTarget>,
    },
    /// Begins a second copy of the pages of the lease `of`. A copy that the volume has is not begun
    /// again. The reply is [`Response::Done`].
    AddCopy {
        /// The lease of which it is a copy.
        of: LeaseId,
        /// The lease that holds the copy.
        lease: Box<LeaseTarget>,
    },
    /// Moves all extents off a lease and releases it, or ends the second copy on it. The replies
    /// are [`Response::Evacuating`] during the move, then [`Response::Done`].
    ///
    /// Any client may repeat it at any time. While the lease moves, the repeated request follows
    /// that move. A lease that the volume does not have counts as moved.
    Evacuate {
        /// The lease to release.
        lease: LeaseId,
        /// Whether extents may go to the spill file if no other lease has room.
        #[serde(default = "yes")]
        spills: bool,
    },
    /// Turns swap off, detaches the device and ends the process. The replies are
    /// [`Response::SwapOff`] during swapoff, then [`Response::Done`].
    Detach,
}

/// A response of a volume process: JSON objects, one per line. The first one that is not progress
/// is the last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub enum Response {
    /// The status of the volume.
    Status(Box<VolumeProcessStatus>),
    /// The request is done.
    Done,
    /// Progress of swapoff.
    SwapOff(swap::Progress),
    /// Progress of an evacuation.
    Evacuating(aquifer_volume::Progress),
    /// The request failed; the process still serves the volume.
    Failed {
        /// The failed step, the reason and the remedy.
        error: String,
    },
}

/// The status of a volume and its process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VolumeProcessStatus {
    /// The record of the process.
    pub record: VolumeRecord,
    /// Bytes swapped out to the device.
    pub swap_used: Bytes,
    /// The status of the volume and its leases.
    pub volume: VolumeStatus,
    /// The safety rules and whether they hold.
    pub safety: SafetyReport,
}

/// Clients of earlier versions let extents go to the spill file.
fn yes() -> bool {
    true
}
