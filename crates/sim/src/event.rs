//! The events of the simulation, and the packets between agents.

use aquifer_control::Message;
use aquifer_page::{Bytes, LeaseId};

/// The number of a host in [`Scenario::hosts`](crate::Scenario::hosts).
pub(crate) type HostNumber = usize;

/// The number of a call of one agent to another, unique in a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CallId(pub(crate) u64);

/// The number of a piece of work, unique in a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct JobId(pub(crate) u64);

/// Something that happens at its time.
#[derive(Debug)]
pub(crate) enum Event {
    /// A monitoring period of this host is over.
    Period(HostNumber),
    /// A packet arrives.
    Arrival(Packet),
    /// The timeout of a call is over.
    CallOver(HostNumber, CallId),
    /// The next step of a job is due.
    JobStep(HostNumber, JobId),
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
    Renew(Vec<LeaseId>),
    Offer,
}

/// The answer to a call.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Taken(Option<String>),
    NoPeer,
    Renewed(Vec<LeaseId>),
    Offer(Bytes),
}
