use std::collections::BTreeMap;

use aquifer_page::{Bytes, Group, HostName, LeaseId, VolumeId};
use serde::{Deserialize, Serialize};

use crate::{Decision, Memory, Message, Offer, RequestId};

/// Why memory is borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The host was overloaded; goes back by Algorithm 3.
    Overload,
    /// The operator asked for it; stays until the operator returns it.
    ByHand,
}

/// A lease as its borrower knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BorrowedLease {
    /// Its id.
    pub lease: LeaseId,
    /// Who gave it.
    pub lender: HostName,
    /// Its capacity.
    pub bytes: Bytes,
    /// By what its pages are reached, one URI a protocol, as the lender wrote them.
    pub uris: Vec<String>,
}

/// A lease as its lender knows it. To be kept beside the lease's pages, so that both survive the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LentLease {
    /// Its id.
    pub lease: LeaseId,
    /// Who holds it.
    pub borrower: HostName,
    /// The tenant that it is accounted to.
    pub group: Group,
    /// Its capacity.
    pub bytes: Bytes,
    /// The request that it answers.
    pub request: RequestId,
}

/// A volume that outlived the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveVolume {
    /// Its id.
    pub volume: VolumeId,
    /// Its capacity, which stays even when leases leave it for spill.
    pub bytes: Bytes,
    /// The tenant in whose name it was borrowed.
    pub group: Group,
    /// Why it was made.
    pub cause: Cause,
    /// The leases it lies over. None are left when all was spilled.
    pub leases: Vec<BorrowedLease>,
}

/// What happened. Events may come in any order and more than once.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A monitoring period is over (Algorithm 1 line 1). Timers run on these too, so they also set the resolution of the
    /// times in [`Config`](crate::Config).
    Tick {
        /// The reading.
        memory: Memory,
        /// What is stored in each lease that this host gave.
        stored: BTreeMap<LeaseId, Bytes>,
        /// The peers that answered, with what they can spare.
        lenders: Vec<Offer>,
    },
    /// A peer's message, its sender proven by its certificate.
    Received {
        /// The sender.
        from: HostName,
        /// The message.
        message: Message,
    },
    /// The peer's agent has handled a message of ours. For `mem_bor_fin` this settles it. The peer's agent should say so
    /// only after it has carried out the actions of its own step; if it says so before, a crash in between costs only time.
    Delivered {
        /// The peer.
        to: HostName,
        /// What it has handled.
        message: Message,
    },
    /// [`Action::Activate`] is done: the volume swaps.
    Activated {
        /// The volume.
        volume: VolumeId,
    },
    /// [`Action::Activate`] failed. Nothing of the volume may be left: its leases are given up now.
    ActivationFailed {
        /// The volume.
        volume: VolumeId,
        /// For the operator.
        why: String,
    },
    /// The volume is gone, by [`Action::Deactivate`] or otherwise. Nothing may use its leases any more.
    Deactivated {
        /// The volume.
        volume: VolumeId,
    },
    /// [`Action::Deactivate`] failed and the volume serves on.
    DeactivationFailed {
        /// The volume.
        volume: VolumeId,
        /// For the operator.
        why: String,
    },
    /// [`Action::Evacuate`] is done: nothing uses the lease any more.
    Evacuated {
        /// The lease that is empty now.
        lease: LeaseId,
        /// Those of `onto` that could not be added to the volume.
        unused: Vec<LeaseId>,
    },
    /// [`Action::Evacuate`] failed: the lease is still in use. It is tried again when the lender asks again.
    EvacuationFailed {
        /// The lease.
        lease: LeaseId,
        /// Those of `onto` that could not be added to the volume.
        unused: Vec<LeaseId>,
        /// For the operator.
        why: String,
    },
    /// [`Action::OpenLease`] is done: pages can be stored.
    LeaseOpened {
        /// The lease.
        lease: LeaseId,
        /// By what its pages are reached, one URI a protocol; they go to the borrower as they are.
        uris: Vec<String>,
    },
    /// [`Action::OpenLease`] failed and left nothing behind.
    LeaseFailed {
        /// The lease.
        lease: LeaseId,
        /// For the operator.
        why: String,
    },
    /// [`Action::FreeLease`] is done: the memory is back.
    LeaseFreed {
        /// The lease.
        lease: LeaseId,
    },
    /// The borrower is connected to the lease. To be reported at least every quarter of the grace.
    BorrowerSeen {
        /// The lease.
        lease: LeaseId,
    },
    /// The operator wants to borrow.
    Borrow {
        /// How much; rounded up to whole extents.
        bytes: Bytes,
        /// In whose name.
        group: Group,
    },
    /// The operator wants all that was lent back, and lends nothing meanwhile; or lends again.
    Drain {
        /// Whether to drain.
        on: bool,
    },
    /// This host is to take back what it lent to `host`, and to leave what it borrowed of it: the two no longer know
    /// each other. May be repeated; a move that failed is then tried again.
    Part {
        /// The other host.
        host: HostName,
    },
    /// The peer's agent has refused a message of ours, and will refuse it again.
    Refused {
        /// The peer.
        by: HostName,
        /// What it has refused.
        message: Message,
        /// In its own words.
        why: String,
    },
    /// The operator gives back one volume, or all.
    Return {
        /// Which; none for all.
        volume: Option<VolumeId>,
    },
}

/// What the agent is to do. The actions of a step are begun in their order; their results come back as events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message; [`Event::Delivered`] when the peer has it. No retries needed: what matters is sent again.
    Send {
        /// To whom.
        to: HostName,
        /// What.
        message: Message,
    },
    /// Borrower: make a volume over these leases and swap to it. Answered by `Activated` or `ActivationFailed`.
    Activate(LiveVolume),
    /// Borrower: swap off and remove the volume. Answered by `Deactivated` or `DeactivationFailed`.
    Deactivate {
        /// The volume.
        volume: VolumeId,
    },
    /// Borrower: add the leases `onto` to the volume, then move all that is in `lease` to wherever the volume has room, else
    /// to spill, while I/O goes on. Answered by `Evacuated` or `EvacuationFailed`.
    Evacuate {
        /// The volume.
        volume: VolumeId,
        /// The lease that leaves it.
        lease: LeaseId,
        /// Leases borrowed to replace it; may be none.
        onto: Vec<BorrowedLease>,
    },
    /// Lender: set up the lease. Answered by `LeaseOpened` or `LeaseFailed`; the `mem_bor_ack` goes out only then.
    OpenLease(LentLease),
    /// Lender: drop the lease with its pages. Answered by `LeaseFreed`; repeated until then.
    FreeLease {
        /// The lease.
        lease: LeaseId,
    },
}

/// What came of one event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// To be carried out, in order.
    pub actions: Vec<Action>,
    /// Why, for the log and the status.
    pub decisions: Vec<Decision>,
}
