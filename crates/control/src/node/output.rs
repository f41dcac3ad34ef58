//! The node's output: actions, questions to peers and volumes, answers, and entries for the log.

use std::collections::BTreeSet;

use aquifer_page::{Bytes, HostName, LeaseId, RegionName, VolumeId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Notice, Threshold, Ticket};
use crate::{Action, LentLease, LiveVolume, Message, Role, Subject};

/// What the agent must do.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Begin an action. The agent reports its end as [`Input::Said`](super::Input::Said) or
    /// [`Input::Done`](super::Input::Done).
    Begin(Work, Action),
    /// Ask all peers for offers. The agent answers with [`Input::Offers`](super::Input::Offers).
    AskOffers,
    /// Tell lenders that this host still needs their leases. The agent reports each answer as
    /// [`Input::Renewed`](super::Input::Renewed).
    Renew {
        /// The lenders; `None` for all.
        only: Option<BTreeSet<HostName>>,
    },
    /// Look at all volumes. The agent answers with [`Input::Volumes`](super::Input::Volumes).
    LookAtVolumes,
    /// Look at all VMs. The agent answers with [`Input::Vms`](super::Input::Vms).
    LookAtVms,
    /// Move a VM to the host that has most room and takes it. The agent reports the end as
    /// [`Input::MoveEnded`](super::Input::MoveEnded).
    MoveVm {
        /// The VM.
        vm: RegionName,
        /// A host that must not be the destination: the last move failed there.
        avoid: Option<HostName>,
        /// Up to where the destination may use its memory then.
        below: Threshold,
    },
    /// Set the size of a region's local cache. The agent reports the end as
    /// [`Input::CacheSet`](super::Input::CacheSet).
    SetCache {
        /// The region.
        region: RegionName,
        /// The size.
        cache: Bytes,
    },
    /// Cancel the move in progress, unless the VM is handed over already.
    CancelMove,
    /// Let a managed cgroup swap if, and only if, this host has a volume to swap to.
    SetSwapGate,
    /// Answer a request.
    Answer(Ticket, Answer),
    /// Log a decision and keep it for the status.
    Decision {
        /// This host's role after the decision.
        role: Role,
        /// The decision, as a sentence about this host.
        what: String,
        /// The hosts, leases, volumes, VMs and regions that it concerns.
        about: Vec<Subject>,
    },
    /// Keep the change of the role for the status.
    RoleChanged {
        /// The role before.
        from: Role,
        /// The role after.
        to: Role,
    },
    /// Log an event outside the decisions, and keep it for the status.
    Notice(Notice),
    /// Log a warning.
    Warning(String),
}

/// The subject of an action. Two actions on one subject never run at the same time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// A volume that starts, grows or ends.
    Volume(VolumeId),
    /// A lease that opens, ends, or is vacated.
    Lease(LeaseId),
    /// A lease that begins to hold second copies.
    Copy(LeaseId),
    /// A message in flight: a second copy would only queue behind it.
    Message(HostName, Message),
}

impl Work {
    /// Returns the subject of an action.
    pub(super) fn of(action: &Action) -> Self {
        match action {
            Action::Send { to, message } => Self::Message(to.clone(), message.clone()),
            Action::Activate(LiveVolume { volume, .. })
            | Action::Extend(LiveVolume { volume, .. })
            | Action::Deactivate { volume } => Self::Volume(*volume),
            Action::Copy { onto, .. } => Self::Copy(onto.lease),
            Action::Evacuate { lease, .. }
            | Action::OpenLease(LentLease { lease, .. })
            | Action::RecordLease(LentLease { lease, .. })
            | Action::FreeLease { lease } => Self::Lease(*lease),
        }
    }
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To a peer's message: taken in. For `mem_len_fin`, why the last attempt to leave the lease
    /// failed, if one did.
    Heard(Option<String>),
    /// To a message: its sender is no peer.
    NoPeer,
    /// To a renewal: the leases that this host does not have.
    Renewed(Vec<LeaseId>),
    /// To a borrowing: the kernel swaps to this volume.
    Borrowed(VolumeId),
    /// To a region's request: these leases are for it. The agent hands them over, and then reports
    /// the end of [`Action::Activate`].
    Provided(LiveVolume),
    /// To a borrowing: no lender has memory for these bytes. [`nobody_lends`](super::nobody_lends)
    /// explains it.
    NobodyLends(Bytes),
    /// To a return: these volumes are gone.
    Returned(Vec<VolumeId>),
    /// To an order to replace keys: the leases with these keys.
    Rotates(Vec<LeaseId>),
    /// To a permit: the other host may use the lease.
    Permitted,
    /// To a claim: the memory is promised.
    Claimed,
    /// To the order to leave the cluster: this host shares no memory, and will not.
    Left,
    /// To the order to leave the cluster: not yet. What prevents it may end by itself within
    /// moments.
    Tied(Problem),
    /// To an order: it failed.
    Failed(Problem),
}

/// The body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// The failure and its cause.
    pub error: String,
    /// A way out, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
}
