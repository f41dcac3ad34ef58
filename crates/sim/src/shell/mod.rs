//! The shell around each node: what the agent's driver does, against simulated machines.
//!
//! - `perform`: the node's outputs. `period`: readings. `orders`: operators.
//! - `calls`: packets between agents. `offers`: samples of likely lenders, and gossip.
//! - `jobs`: work that takes time. `outages`: crashes, restarts and cuts.

mod calls;
mod jobs;
mod offers;
mod orders;
mod outages;
mod perform;
mod period;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_control::Message;
use aquifer_control::node::{Node, Ticket};
use aquifer_page::VolumeId;

use crate::event::{CallId, HostNumber};

pub(crate) use jobs::Job;
pub(crate) use offers::Board;
use offers::Sampling;

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
    /// The volumes that it has found or made.
    records: BTreeSet<VolumeId>,
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
    Offer,
}

impl Agent {
    fn new(node: Node, born: Duration, records: BTreeSet<VolumeId>) -> Self {
        Self {
            node,
            born,
            calls: BTreeMap::new(),
            tickets: BTreeMap::new(),
            last_ticket: 0,
            sampling: None,
            records,
        }
    }

    fn ticket(&mut self) -> Ticket {
        self.last_ticket += 1;
        Ticket(self.last_ticket)
    }
}
