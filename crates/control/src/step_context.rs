//! The context of one step of the controller: facts, ids, and the output so far.

use std::time::Duration;

use aquifer_page::{HostName, LeaseId, VolumeId};

use crate::ledger::OwnMemory;
use crate::{Action, Config, Decision, Memory, Message, RequestId, Step, What};

/// The facts that every part of the controller may read.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) host: HostName,
    pub(crate) config: Config,
    pub(crate) memory: Memory,
    /// The memory that this host promises besides its leases.
    pub(crate) own: OwnMemory,
    /// Whether local caches of regions relieve this host of its overload at present.
    pub(crate) caches_relieve: bool,
    pub(crate) now: Duration,
}

/// A source of ids that are unique among hosts and restarts, because each run starts at a random
/// number.
#[derive(Clone, Debug)]
pub(crate) struct Ids(pub(crate) u128);

impl Ids {
    fn next(&mut self) -> u128 {
        self.0 = self.0.wrapping_add(1);
        self.0
    }

    pub(crate) fn request(&mut self) -> RequestId {
        RequestId(self.next())
    }

    pub(crate) fn lease(&mut self) -> LeaseId {
        LeaseId(self.next())
    }

    pub(crate) fn volume(&mut self) -> VolumeId {
        VolumeId(self.next())
    }
}

/// The context of one step: the facts, and the output so far.
#[derive(Debug)]
pub(crate) struct StepContext<'a> {
    pub(crate) facts: &'a Facts,
    pub(crate) ids: &'a mut Ids,
    pub(crate) step: Step,
}

impl StepContext<'_> {
    pub(crate) fn now(&self) -> Duration {
        self.facts.now
    }

    pub(crate) fn config(&self) -> &Config {
        &self.facts.config
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.facts.memory
    }

    /// Returns whether overload calls for a loan to swap to. Local caches give way first, as that
    /// stops no program.
    pub(crate) fn wants_to_swap(&self) -> bool {
        self.memory().overloaded(self.config()) && !self.facts.caches_relieve
    }

    /// Returns whether `wait` has passed since `then`.
    pub(crate) fn passed(&self, wait: Duration, then: Duration) -> bool {
        self.facts.now.saturating_sub(then) >= wait
    }

    pub(crate) fn act(&mut self, action: Action) {
        self.step.actions.push(action);
    }

    pub(crate) fn send(&mut self, to: &HostName, message: Message) {
        self.act(Action::Send { to: to.clone(), message });
    }

    pub(crate) fn decide(&mut self, what: What) {
        let Facts { config, memory, now, .. } = self.facts;
        let decision =
            Decision { at: *now, memory: *memory, upper: config.upper, lower: config.lower, what };
        self.step.decisions.push(decision);
    }
}
