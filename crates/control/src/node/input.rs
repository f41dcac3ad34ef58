//! The node's input: readings, messages, orders, and the ends of what it ordered.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use aquifer_page::{Bytes, HostName, LeaseId, RegionName, VolumeId};

use super::{MoveEnd, Threshold, VmReading, Work};
use crate::ledger::{Claim, OwnMemory};
use crate::{Event, LiveVolume, Memory, Message, Offer, RegionRequest};

/// The number of a request that waits for an [`Answer`](super::Answer). The agent chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// The input of [`Node::handle`](super::Node::handle). Inputs may come in any order, late, and more
/// than once.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// A monitoring period is over (Algorithm 1 line 1), or the kernel gave its early signal.
    Period(Readings),
    /// The answer to [`Output::AskOffers`](super::Output::AskOffers).
    Offers {
        /// The peers that answered, each with the bytes that it can spare.
        lenders: Vec<Offer>,
        /// The bytes stored in each lease that this host gave.
        stored: BTreeMap<LeaseId, Bytes>,
    },
    /// The hosts that the configuration or the cluster names.
    Peers(BTreeSet<HostName>),
    /// A host of the cluster stopped, or answers no host.
    HostDown {
        /// The host.
        host: HostName,
        /// The address of its agent.
        address: SocketAddr,
    },
    /// A host of the cluster is up, and its agent may have started again.
    HostAnew(HostName),
    /// A peer's message; the peer's certificate proves the sender.
    Heard {
        /// The sender.
        from: HostName,
        /// The message.
        message: Message,
        /// For the answer.
        ticket: Ticket,
    },
    /// A borrower's word that it still needs its leases.
    Renewal {
        /// The borrower, as its certificate names it.
        from: HostName,
        /// The leases.
        leases: Vec<LeaseId>,
        /// The generations of those that have moved with their regions.
        generations: BTreeMap<LeaseId, u32>,
        /// How long the borrower's I/O waits for this host, in ms.
        io_timeout_ms: Option<u64>,
        /// For the answer.
        ticket: Ticket,
    },
    /// A host is about to move a region to another host, which needs the region's lease.
    Permit {
        /// The host that holds the lease, as its certificate names it.
        from: HostName,
        /// The lease.
        lease: LeaseId,
        /// The generation that it holds.
        generation: u32,
        /// The other host.
        to: HostName,
        /// For the answer.
        ticket: Ticket,
    },
    /// A region with these leases may come to this host.
    Expect {
        /// The region's volume.
        volume: VolumeId,
        /// Its leases.
        leases: BTreeSet<LeaseId>,
    },
    /// A region that was expected does not come.
    Miss {
        /// The region's volume.
        volume: VolumeId,
    },
    /// A lender's answer to [`Output::Renew`](super::Output::Renew).
    Renewed {
        /// The lender.
        lender: HostName,
        /// The renewed leases that it does not have.
        lost: Vec<LeaseId>,
    },
    /// The answer to [`Output::LookAtVolumes`](super::Output::LookAtVolumes).
    Volumes(Vec<VolumeReading>),
    /// The end of [`Action::Send`](crate::Action::Send).
    Said {
        /// The receiver.
        to: HostName,
        /// The message.
        message: Message,
        /// What became of it.
        end: Said,
    },
    /// The end of any other action.
    Done {
        /// The subject of the action.
        work: Work,
        /// The event for the controller; `None` if the controller must order the action again.
        event: Option<Event>,
    },
    /// The operator borrows.
    Borrow {
        /// The bytes to borrow, rounded up to whole extents.
        bytes: Bytes,
        /// The swap priority; `None` for the configured one.
        priority: Option<u16>,
        /// For the answer.
        ticket: Ticket,
    },
    /// A new region needs memory of other hosts.
    BorrowFor {
        /// The region and its needs.
        request: RegionRequest,
        /// For the answer.
        ticket: Ticket,
    },
    /// The operator returns one volume for swap, or all.
    Return {
        /// The volume; `None` for all.
        volume: Option<VolumeId>,
        /// For the answer.
        ticket: Ticket,
    },
    /// The operator wants the key of a lease replaced, or those of all.
    RotateKeys {
        /// The lease; `None` for all.
        lease: Option<LeaseId>,
        /// For the answer.
        ticket: Ticket,
    },
    /// The operator recalls all leases and stops lending, or allows lending again.
    Drain {
        /// Whether to drain.
        on: bool,
        /// The bytes stored in all leases.
        stored: Bytes,
        /// Whether the VMs of this host move away, too. They stay when the agent only stops.
        vms: bool,
    },
    /// The answer to [`Output::LookAtVms`](super::Output::LookAtVms): the VMs of this host.
    Vms(Vec<VmReading>),
    /// The end of [`Output::MoveVm`](super::Output::MoveVm).
    MoveEnded {
        /// The VM.
        vm: RegionName,
        /// What became of it.
        end: MoveEnd,
    },
    /// A command is about to give memory of this host to a VM or a region.
    Claim {
        /// The memory. With no bytes, the command has failed, and claims nothing any more.
        claim: Claim,
        /// Whether it gets the memory in any case.
        overcommit: bool,
        /// For the answer.
        ticket: Ticket,
    },
    /// A peer is about to move a VM here.
    TakeVm {
        /// The peer.
        from: HostName,
        /// The cache of the VM; no bytes if the ledger does not count it.
        claim: Claim,
        /// Up to where this host may use its memory then; `None` if an operator chose this host.
        below: Option<Threshold>,
        /// For the answer.
        ticket: Ticket,
    },
    /// A VM that this host would have taken does not come.
    LostVm {
        /// The peer that offered it.
        from: HostName,
        /// The VM.
        vm: RegionName,
        /// The reason.
        why: String,
    },
    /// The end of [`Output::SetCache`](super::Output::SetCache).
    CacheSet {
        /// The region.
        region: RegionName,
        /// Why the cache is not within its new size, if it is not.
        failed: Option<String>,
    },
    /// VMs of this host need this much of what it has lent.
    Reclaim(Bytes),
    /// The operator makes this host leave its cluster for good.
    Leave {
        /// For the answer.
        ticket: Ticket,
    },
}

/// The readings of one period.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Readings {
    /// The memory figures.
    pub memory: Memory,
    /// The memory that this host promises to its own VMs, regions and groups.
    pub own: OwnMemory,
    /// The bytes stored in each lease that this host gave.
    pub stored: BTreeMap<LeaseId, Bytes>,
    /// The leases with a connection of their borrower; `None` unless [`Wanted::connected`].
    pub connected: Option<Vec<LeaseId>>,
    /// Programs that the kernel has killed for lack of memory; `None` if it does not count them.
    pub oom_kills: Option<u64>,
    /// The VMs that ended since the last reading, each with the cause.
    pub ended_vms: Vec<(String, String)>,
    /// The result of the search in [`Wanted::vacated`].
    pub found: Option<Found>,
    /// The leases whose pages this host encrypts under keys of their own.
    pub own_keys: BTreeSet<LeaseId>,
}

/// The readings that the next period needs besides the cheap ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Whether it needs [`Readings::connected`].
    pub connected: bool,
    /// The leases that their volumes may have left; `None` if no search is due.
    pub vacated: Option<Vec<(VolumeId, LeaseId)>>,
}

/// The result of a search for volumes that ended or moved without an order of this agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Of the leases in [`Wanted::vacated`], those that their volumes do not use.
    pub vacated: Vec<LeaseId>,
    /// The volumes for swap without a process or a connection.
    pub dead: Vec<VolumeId>,
    /// The volumes of regions that are gone.
    pub gone: Vec<VolumeId>,
    /// The volumes of regions that are on other hosts now.
    pub moved: Vec<(VolumeId, HostName)>,
    /// Regions that have come to this host.
    pub arrived: Vec<LiveVolume>,
    /// The volumes of regions that were expected and do not come.
    pub missed: Vec<VolumeId>,
}

/// One look at a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeReading {
    /// The volume.
    pub volume: VolumeId,
    /// The bytes in the local spill file.
    pub spilled: Bytes,
    /// The last error of a page's I/O.
    pub last_error: Option<String>,
    /// Whether its leases can have second copies. The kernel's own initiator writes to one lender.
    pub takes_copies: bool,
    /// The leases under the volume.
    pub leases: Vec<LeaseReading>,
}

/// One lease under a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseReading {
    /// The lease.
    pub lease: LeaseId,
    /// Its lender.
    pub lender: HostName,
    /// The bytes of the volume's extents in the lease.
    pub placed: Bytes,
    /// Whether the volume reaches its pages.
    pub health: Health,
    /// The second copies of its pages, if it has some.
    pub copy: Option<CopyReading>,
}

/// The second copies of a lease's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyReading {
    /// The lease that holds them.
    pub lease: LeaseId,
    /// Whether the lease's own lender answers with its pages.
    pub first_answers: bool,
    /// Whether the lender of the copies answers with them.
    pub answers: bool,
    /// The pages of which there is no copy here, in bytes.
    pub lacks: Bytes,
    /// The pages of which only the copies are left, in bytes.
    pub first_lacks: Bytes,
}

/// Whether a volume reaches its pages in a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// It does.
    Ok,
    /// The lender does not answer.
    Unreachable,
    /// The lender has lost the pages.
    Lost,
}

/// What became of a message to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// The peer has taken it in. For `mem_len_fin`, it may say why it could not leave the lease.
    Taken(Option<String>),
    /// The peer refuses it, for this reason.
    Refused(String),
    /// The peer may not have received it.
    Lost,
}

/// The result of the latest calls to a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contact {
    /// Whether the peer answers, but refuses the requests of this host.
    pub refused: bool,
    /// The reason why the peer does not answer, or refuses.
    pub error: Option<String>,
    /// The bytes that the peer could spare by its last offer.
    pub spare: Option<Bytes>,
}
