//! The controller's input and output: events, actions, and the records that both carry.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_page::{Bytes, Group, HostName, LeaseId, RegionName, VolumeId};
use serde::{Deserialize, Serialize};

use crate::{Decision, Memory, Message, Offer, Owner, RequestId};

/// The reason for which memory is borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The host was overloaded. Algorithm 3 decides when it gives the memory back.
    Overload,
    /// The operator asked for memory, and keeps it until an order to return it.
    ByHand,
}

/// A lease as its borrower knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BorrowedLease {
    /// The lease's id.
    pub lease: LeaseId,
    /// The lender.
    pub lender: HostName,
    /// The lease's capacity.
    pub bytes: Bytes,
    /// The URIs that reach its pages, one for each protocol, as the lender wrote them.
    pub uris: Vec<String>,
    /// How often the lease has moved with its region to another host.
    #[serde(default)]
    pub generation: u32,
}

/// A lease as its lender knows it. The agent stores it beside the lease's pages, so that both
/// outlive the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LentLease {
    /// The lease's id.
    pub lease: LeaseId,
    /// The borrower.
    pub borrower: HostName,
    /// The owner of its pages.
    #[serde(default, rename = "region")]
    pub owner: Owner,
    /// The tenant that the lease is accounted to.
    pub group: Group,
    /// The lease's capacity.
    pub bytes: Bytes,
    /// The request that the lease answers.
    pub request: RequestId,
    /// How often the lease has moved with its region to another host. A host that held an earlier
    /// generation can neither give the lease back nor use its pages.
    #[serde(default)]
    pub generation: u32,
    /// The hosts to which the borrower may be moving the region. They may use the lease, too. The
    /// one that says that it holds the lease becomes the borrower.
    #[serde(default)]
    pub next: BTreeSet<HostName>,
    /// Whether it holds second copies that the lender takes back before anything else.
    #[serde(default)]
    pub goes_first: bool,
}

impl LentLease {
    /// Returns whether the lease makes its lender one by role: it is for swap. Second copies that
    /// go first do not keep a host from borrowing.
    pub fn makes_lender(&self) -> bool {
        self.owner.is_swap() && !self.goes_first
    }
}

/// A request for memory of a region: of a new one, or more for one that has leases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionRequest {
    /// The region.
    pub region: RegionName,
    /// The region's volume, unique among hosts. A copy of a request names the same volume.
    pub volume: VolumeId,
    /// The bytes, which the controller rounds up to whole extents.
    pub bytes: Bytes,
    /// The least that is of use. Less goes back to the lenders.
    pub least: Bytes,
    /// The tenant to account the leases to.
    pub group: Group,
}

/// A volume that outlived the agent: one for swap, or that of a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveVolume {
    /// The volume's id.
    pub volume: VolumeId,
    /// The volume's capacity, which does not change when spill replaces leases.
    pub bytes: Bytes,
    /// The owner of its pages.
    #[serde(default, rename = "region")]
    pub owner: Owner,
    /// The tenant for which this host borrowed the volume.
    pub group: Group,
    /// The reason for which this host borrowed the volume.
    pub cause: Cause,
    /// The leases under the volume; none if all extents are spilled.
    pub leases: Vec<BorrowedLease>,
    /// The leases that hold second copies, and the lease that each is a copy of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<(LeaseId, BorrowedLease)>,
}

/// The input of a step. Events may come in any order and more than once.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A monitoring period is over (Algorithm 1 line 1). Timers run on ticks too, so the period is
    /// the resolution of the times in [`Config`](crate::Config).
    Tick {
        /// The reading.
        memory: Memory,
        /// The bytes stored in each lease that this host gave.
        stored: BTreeMap<LeaseId, Bytes>,
        /// The peers that answered, each with the bytes that it can spare.
        lenders: Vec<Offer>,
    },
    /// A peer's message; the peer's certificate proves the sender.
    Received {
        /// The sender.
        from: HostName,
        /// The message.
        message: Message,
    },
    /// The peer's agent has handled a message of this host, which settles a `mem_bor_fin`. The
    /// peer's agent should acknowledge only after it has carried out the actions of its step. If
    /// the agent acknowledges earlier, a crash in between costs only time.
    Delivered {
        /// The peer.
        to: HostName,
        /// The message that it has handled.
        message: Message,
    },
    /// [`Action::Activate`] is done: the kernel swaps to the volume, or the region uses it.
    Activated {
        /// The volume.
        volume: VolumeId,
    },
    /// [`Action::Activate`] failed. Nothing of the volume may be left, because this host gives its
    /// leases back.
    ActivationFailed {
        /// The volume.
        volume: VolumeId,
        /// The error, for the operator.
        why: String,
    },
    /// The volume is gone, by [`Action::Deactivate`] or otherwise, as with its region. Nothing may
    /// use its leases any more.
    Deactivated {
        /// The volume.
        volume: VolumeId,
    },
    /// [`Action::Deactivate`] failed, and the volume stays in service.
    DeactivationFailed {
        /// The volume.
        volume: VolumeId,
        /// The error, for the operator.
        why: String,
    },
    /// A region does not need this lease any more: its pages go elsewhere, and the lease goes back.
    GiveBack {
        /// The lease.
        lease: LeaseId,
    },
    /// [`Action::Extend`] is done.
    Extended {
        /// The volume.
        volume: VolumeId,
        /// The leases that could not be added to it.
        unused: Vec<LeaseId>,
    },
    /// A lease needs a second copy of its pages.
    Protect {
        /// The lease.
        lease: LeaseId,
        /// The hosts that may fail together with its lender.
        near: BTreeSet<HostName>,
    },
    /// [`Action::Copy`] has ended.
    Copied {
        /// The lease for the copy.
        lease: LeaseId,
        /// Why it cannot hold one.
        failed: Option<String>,
    },
    /// The lender of a lease is gone, and a second copy has its pages: they go elsewhere.
    Abandon {
        /// The lease.
        lease: LeaseId,
    },
    /// A lease is left for others, so that its pages get another key. It stays if lenders do not
    /// have room for all of it.
    Replace {
        /// The lease.
        lease: LeaseId,
        /// The room that its volume got for its pages already.
        room: Bytes,
    },
    /// [`Action::Evacuate`] is done: nothing uses the lease any more.
    Evacuated {
        /// The empty lease.
        lease: LeaseId,
        /// The leases of `onto` that could not be added to the volume.
        unused: Vec<LeaseId>,
    },
    /// [`Action::Evacuate`] failed: the lease is still in use. The lender's next request starts
    /// another attempt.
    EvacuationFailed {
        /// The lease.
        lease: LeaseId,
        /// The leases of `onto` that could not be added to the volume.
        unused: Vec<LeaseId>,
        /// The error, for the operator.
        why: String,
    },
    /// [`Action::OpenLease`] is done: the lease can store pages.
    LeaseOpened {
        /// The lease.
        lease: LeaseId,
        /// The URIs that reach its pages, one for each protocol. The borrower gets them unchanged.
        uris: Vec<String>,
    },
    /// [`Action::OpenLease`] failed and left nothing behind.
    LeaseFailed {
        /// The lease.
        lease: LeaseId,
        /// The error, for the operator.
        why: String,
    },
    /// [`Action::FreeLease`] is done: the memory is free.
    LeaseFreed {
        /// The lease.
        lease: LeaseId,
    },
    /// A host is up, and its agent may have started again.
    Anew {
        /// The host.
        host: HostName,
    },
    /// The borrower is connected to the lease. The agent reports this at least every quarter of the
    /// grace.
    BorrowerSeen {
        /// The lease.
        lease: LeaseId,
    },
    /// A host is about to move a region to another host, which needs the region's lease.
    Permit {
        /// The host that holds the lease.
        from: HostName,
        /// The lease.
        lease: LeaseId,
        /// The generation that it holds.
        generation: u32,
        /// The other host.
        to: HostName,
    },
    /// A host says that it holds the lease: the region is there now.
    Taken {
        /// The host.
        by: HostName,
        /// The lease.
        lease: LeaseId,
        /// The generation that it holds.
        generation: u32,
    },
    /// [`Action::RecordLease`] is done.
    LeaseRecorded(LentLease),
    /// [`Action::RecordLease`] failed. The controller orders it again.
    RecordFailed {
        /// The lease.
        lease: LeaseId,
        /// The error, for the operator.
        why: String,
    },
    /// A region is now on another host, which holds the region's leases.
    Moved {
        /// The region's volume.
        volume: VolumeId,
        /// The other host.
        to: HostName,
    },
    /// A region with these leases may come to this host. Until it has come or will not, this host
    /// does not deny that it holds them.
    Expected {
        /// The region's volume.
        volume: VolumeId,
        /// Its leases.
        leases: BTreeSet<LeaseId>,
    },
    /// A region that was expected does not come.
    Missed {
        /// The region's volume.
        volume: VolumeId,
    },
    /// A region has come to this host with its leases.
    Arrived(LiveVolume),
    /// The operator wants to borrow.
    Borrow {
        /// The bytes to borrow, rounded up to whole extents.
        bytes: Bytes,
        /// The tenant to account the leases to.
        group: Group,
    },
    /// A region needs memory.
    BorrowFor(RegionRequest),
    /// The operator recalls all leases and stops lending, or allows lending again.
    Drain {
        /// Whether to drain.
        on: bool,
    },
    /// VMs of this host need `bytes` that it has lent. The event may be repeated: memory that is on
    /// its way back counts.
    Reclaim {
        /// The bytes.
        bytes: Bytes,
    },
    /// This host and `host` are no longer peers: this host recalls its leases from `host`, and
    /// vacates the leases that it holds from `host`. The event may be repeated, and then retries a
    /// failed move.
    Part {
        /// The other host.
        host: HostName,
    },
    /// The peer's agent has refused a message of this host, and will refuse it again.
    Refused {
        /// The peer.
        by: HostName,
        /// The message that it has refused.
        message: Message,
        /// The peer's explanation.
        why: String,
    },
    /// The operator gives back one volume for swap, or all.
    Return {
        /// The volume; `None` for all.
        volume: Option<VolumeId>,
    },
}

/// A command to the agent. The agent begins the actions of a step in order, and reports the results
/// as events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message. The agent reports [`Event::Delivered`] when the peer has it. The agent need
    /// not retry, because the controller sends again each message that matters.
    Send {
        /// The receiver.
        to: HostName,
        /// The message.
        message: Message,
    },
    /// Borrower: make a volume over these leases and swap to it, or let its region use it. The
    /// agent answers with `Activated` or `ActivationFailed`.
    Activate(LiveVolume),
    /// Borrower: swap off and remove the volume. The agent answers with `Deactivated` or
    /// `DeactivationFailed`.
    Deactivate {
        /// The volume.
        volume: VolumeId,
    },
    /// Borrower: add these leases to the volume of a region that has others. The agent answers with
    /// `Extended`.
    Extend(LiveVolume),
    /// Borrower: begin a second copy of the lease `of` on the lease `onto`. The agent answers with
    /// `Copied`.
    Copy {
        /// The volume of a region.
        volume: VolumeId,
        /// The lease to copy.
        of: LeaseId,
        /// The lease for the copy.
        onto: BorrowedLease,
    },
    /// Borrower: add the leases `onto` to the volume, then vacate `lease` while I/O goes on. The
    /// pages of `lease` move to free room in the volume. A second copy ends. The agent answers with
    /// `Evacuated` or `EvacuationFailed`.
    Evacuate {
        /// The volume.
        volume: VolumeId,
        /// The lease to vacate.
        lease: LeaseId,
        /// The leases borrowed to replace it; may be empty.
        onto: Vec<BorrowedLease>,
        /// Pages may go to the volume's spill file, if there is no other room.
        spills: bool,
    },
    /// Lender: set up the lease. The agent answers with `LeaseOpened` or `LeaseFailed`. The
    /// controller sends `mem_bor_ack` only after `LeaseOpened`.
    OpenLease(LentLease),
    /// Lender: write down which hosts may use the lease, so that the next agent knows. The agent
    /// answers with `LeaseRecorded` or `RecordFailed`.
    RecordLease(LentLease),
    /// Lender: drop the lease with its pages. The agent answers with `LeaseFreed`; the controller
    /// repeats the action until then.
    FreeLease {
        /// The lease.
        lease: LeaseId,
    },
}

/// The output of one event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// The actions, in the order in which to begin them.
    pub actions: Vec<Action>,
    /// The reasons, for the log and the status.
    pub decisions: Vec<Decision>,
}
