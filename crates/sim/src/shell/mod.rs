//! The shell around each node: what the agent's driver does, against simulated machines.
//!
//! - `perform`: the node's outputs. `period`: readings. `orders`: operators.
//! - `calls`: packets between agents. `offers`: samples of likely lenders, and gossip.
//! - `search`, `moving`, `arriving`: moves of VMs at their source and at their destination.
//! - `regions`: VMs with borrowed memory.
//! - `jobs`: work that takes time. `outages`: crashes, restarts and cuts.

mod arriving;
mod calls;
mod jobs;
mod moving;
mod offers;
mod orders;
mod outages;
mod perform;
mod period;
mod regions;
mod search;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_control::Message;
use aquifer_control::node::{Node, Ticket};
use aquifer_page::{RegionName, VolumeId};

use arriving::Asked;

use crate::event::{CallId, HostNumber};

pub(crate) use jobs::Job;
pub(crate) use offers::{Board, Offered};
use offers::{Sampling, Slot};
use search::Search;

/// A running agent. All of it is lost in a crash.
#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) node: Node,
    /// The time of its start, from which its clock runs.
    born: Duration,
    /// Calls without an answer.
    calls: BTreeMap<CallId, Call>,
    /// Requests of other agents without an answer: the caller and its call.
    tickets: BTreeMap<Ticket, (HostNumber, CallId)>,
    last_ticket: u64,
    sampling: Option<Sampling>,
    /// The search for a host for a VM.
    search: Option<Search>,
    /// Questions whether this host takes a VM that its node has not answered.
    arrivals: BTreeMap<Ticket, Asked>,
    /// Requests for the memory of VMs that start.
    starting: BTreeMap<Ticket, RegionName>,
    /// The earliest time of the next such request.
    starts_at: Duration,
    known: Known,
}

/// The volumes that an agent knows.
#[derive(Debug, Default)]
struct Known {
    /// Those for swap that it has found or made.
    swap: BTreeSet<VolumeId>,
    /// Those of regions that it has found or made, or that have come.
    regions: BTreeSet<VolumeId>,
    /// Those of regions that may come.
    expected: BTreeSet<VolumeId>,
}

/// A call without an answer.
#[derive(Debug)]
struct Call {
    to: HostNumber,
    kind: CallKind,
}

#[derive(Debug)]
enum CallKind {
    Say(Message),
    Renew,
    Offer(Slot),
    Permit,
    Arrive,
}

impl Agent {
    fn new(node: Node, born: Duration, known: Known) -> Self {
        Self {
            node,
            born,
            calls: BTreeMap::new(),
            tickets: BTreeMap::new(),
            last_ticket: 0,
            sampling: None,
            search: None,
            arrivals: BTreeMap::new(),
            starting: BTreeMap::new(),
            starts_at: Duration::ZERO,
            known,
        }
    }

    fn ticket(&mut self) -> Ticket {
        self.last_ticket += 1;
        Ticket(self.last_ticket)
    }
}
