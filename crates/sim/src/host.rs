//! One host: a machine, the agent on it, and what the simulation remembers of both.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use aquifer_control::Role;
use aquifer_page::{Bytes, HostName, LeaseId};

use crate::machine::Machine;
use crate::shell::Agent;

/// The number of events that a violation shows of a host.
const SHOWN: usize = 24;

/// The time in which [`Host::most_changes`] counts, and in which overload moves a VM at most once.
pub(crate) const OSCILLATION: Duration = Duration::from_secs(600);

/// One host.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) name: HostName,
    pub(crate) machine: Machine,
    /// The agent, unless it has crashed.
    pub(crate) agent: Option<Agent>,
    /// The number of agents that have started.
    pub(crate) starts: u32,
    /// Whether the network has cut this host off.
    pub(crate) is_cut: bool,
    /// The hosts that this host does not count as peers.
    pub(crate) parted: BTreeSet<usize>,
    pub(crate) role: Role,
    /// The store at the crash of the agent. Nothing may change it while the agent is down.
    pub(crate) store_at_crash: BTreeMap<LeaseId, Bytes>,
    pub(crate) role_changes: u64,
    /// The most role changes within [`OSCILLATION`].
    pub(crate) most_changes: usize,
    recent_changes: VecDeque<Duration>,
    latest: VecDeque<(Duration, String)>,
}

impl Host {
    pub(crate) fn new(name: HostName, machine: Machine) -> Self {
        Self {
            name,
            machine,
            agent: None,
            starts: 0,
            is_cut: false,
            parted: BTreeSet::new(),
            role: Role::Neutral,
            store_at_crash: BTreeMap::new(),
            role_changes: 0,
            most_changes: 0,
            recent_changes: VecDeque::new(),
            latest: VecDeque::new(),
        }
    }

    /// Remembers an event for a violation's text.
    pub(crate) fn note(&mut self, now: Duration, what: String) {
        if self.latest.len() == SHOWN {
            self.latest.pop_front();
        }
        self.latest.push_back((now, what));
    }

    pub(crate) fn latest(&self) -> Vec<(Duration, String)> {
        self.latest.iter().cloned().collect()
    }

    /// Takes a new role. Returns whether Fig. 3 has an edge from the last one.
    pub(crate) fn change_role(&mut self, now: Duration, role: Role) -> bool {
        if self.role == role {
            return true;
        }
        let is_edge = self.role == Role::Neutral || role == Role::Neutral;
        self.role = role;
        self.role_changes += 1;
        self.recent_changes.push_back(now);
        while self.recent_changes.front().is_some_and(|then| now - *then > OSCILLATION) {
            self.recent_changes.pop_front();
        }
        self.most_changes = self.most_changes.max(self.recent_changes.len());
        is_edge
    }
}
