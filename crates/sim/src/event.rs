//! The events of the simulation, and the packets between agents.

use aquifer_control::Message;
use aquifer_control::node::Threshold;
use aquifer_page::{Bytes, LeaseId, RegionName, VolumeId};

use crate::machine::Leases;
use crate::shell::Offered;

/// The number of a host in [`Scenario::hosts`](crate::Scenario::hosts).
pub(crate) type HostNumber = usize;

/// The number of a call of one agent to another, unique in a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CallId(pub(crate) u64);

/// The number of a piece of work, unique in a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct JobId(pub(crate) u64);

/// The number of a move of a VM, unique in a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct MoveId(pub(crate) u64);

/// Something that happens at its time.
#[derive(Debug)]
pub(crate) enum Event {
    /// A monitoring period of this host is over.
    Period(HostNumber),
    /// A packet arrives.
    Arrival(Box<Packet>),
    /// The timeout of a call is over.
    CallOver(HostNumber, CallId),
    /// The next step of a job is due.
    JobStep(HostNumber, JobId),
    /// The source of a move takes its next step.
    MoveStep(HostNumber, MoveId),
    /// The destination of a move looks at it.
    Await(HostNumber, MoveId),
    /// The operator begins to drain a host of its VMs, or ends that.
    Drain(HostNumber, bool),
    /// An agent crashes.
    Crash(HostNumber),
    /// A crashed agent starts again.
    Restart(HostNumber),
    /// The network cuts a host off.
    Cut(HostNumber),
    /// The network reaches a host again.
    Heal(HostNumber),
    /// The order with this number in [`Scenario::orders`](crate::Scenario::orders) is due.
    Order(usize),
}

/// A packet between two agents.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(crate) from: HostNumber,
    pub(crate) to: HostNumber,
    pub(crate) call: CallId,
    pub(crate) content: Content,
}

/// The content of a packet.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// A call.
    Ask(Ask),
    /// The answer to a call.
    Reply(Reply),
}

/// A call of one agent to another.
#[derive(Clone, Debug)]
pub(crate) enum Ask {
    Say(Message),
    /// The leases, each with its generation.
    Renew(Vec<(LeaseId, u32)>),
    Offer,
    Room(Threshold),
    Permit {
        lease: LeaseId,
        generation: u32,
        to: HostNumber,
    },
    Arrive(Arrive),
}

/// A question whether a host takes a VM.
#[derive(Clone, Debug)]
pub(crate) struct Arrive {
    pub(crate) id: MoveId,
    pub(crate) vm: RegionName,
    pub(crate) size: Bytes,
    pub(crate) cache: Bytes,
    pub(crate) below: Threshold,
    pub(crate) memory: Option<(VolumeId, Leases)>,
}

/// The answer to a call.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Taken(Option<String>),
    NoPeer,
    Renewed(Vec<LeaseId>),
    Offer(Offered),
    /// The order is done.
    Done,
    /// The order failed, for this reason.
    Refused(String),
}
