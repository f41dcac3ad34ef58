//! Moves of VMs to other hosts: of all while an operator drains this host, of one if it stays
//! overloaded.
//!
//! The node decides which VM moves and when, and starts one move at a time. The agent finds the
//! host and performs the move; until the hand-over, a move that ends early leaves the VM here. What
//! must outlive the agent is in the VMs' records: which host owns a VM, and when it arrived. A new
//! agent looks at them first, so that it neither repeats nor forgets a move.
//!
//! - `vm`: a VM, and what keeps it here. `overload`: the choice of a VM under overload.
//! - `arrival`: VMs that come from other hosts.

mod arrival;
mod overload;
mod vm;

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_page::{Bytes, HostName, RegionName};

pub use arrival::Threshold;
pub use vm::{MoveEnd, MoveState, Obstacle, VmReading};

use super::{Node, Output};
use crate::Subject;

/// Time between two looks at the VMs while this host drains.
const LOOK: Duration = Duration::from_secs(1);

/// Time between two looks at the VMs while this host stays overloaded.
const LOOK_OVERLOADED: Duration = Duration::from_secs(5);

/// The waits after a VM's failed moves of a drain. Each failure doubles the wait.
const WAITS: Waits = Waits { first: Duration::from_secs(1), longest: Duration::from_secs(60) };

/// The same after failed moves because of overload: each attempt costs memory and bandwidth.
const WAITS_OVERLOADED: Waits =
    Waits { first: Duration::from_secs(60), longest: Duration::from_secs(600) };

/// What the node remembers of moves.
#[derive(Clone, Debug, Default)]
pub(super) struct Moves {
    /// How long overload lasts before a VM moves; `None` for never.
    after: Option<Duration>,
    /// Whether an operator drains this host of its VMs.
    vacates: bool,
    /// The begin of the present overload, or the end of the last move during it.
    pub(super) overloaded: Option<Duration>,
    /// The overload for which the log says why no VM moves.
    told_for: Option<Duration>,
    moving: Option<Moving>,
    /// The VMs whose latest move failed.
    failed: BTreeMap<RegionName, Failed>,
    /// Time of the last look at the VMs.
    looked: Option<Duration>,
    looking: bool,
}

/// A move in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Moving {
    vm: RegionName,
    /// Whether the drain of this host is the reason.
    drains: bool,
}

/// The failures of a VM's moves since the last that succeeded.
#[derive(Clone, Debug)]
struct Failed {
    count: u32,
    waits: Waits,
    /// Time of the last of them.
    at: Duration,
    why: String,
    /// The host to which the last move failed. The next move goes to another host.
    to: Option<HostName>,
    /// Whether no host took the VM.
    refused: bool,
}

/// The first and the longest wait between failed moves of a VM.
#[derive(Clone, Copy, Debug)]
struct Waits {
    first: Duration,
    longest: Duration,
}

impl Failed {
    fn wait(&self) -> Duration {
        let doublings = self.count.saturating_sub(1).min(16);
        self.waits.first.saturating_mul(1 << doublings).min(self.waits.longest)
    }
}

impl Moves {
    pub(super) fn new(after: Option<Duration>) -> Self {
        Self { after, ..Self::default() }
    }

    /// Returns whether a failed move of this VM is too recent for another one.
    fn backs_off(&self, vm: &RegionName, now: Duration) -> bool {
        let failed = self.failed.get(vm);
        failed.is_some_and(|failed| now.saturating_sub(failed.at) < failed.wait())
    }
}

/// Adds the VMs over which one was chosen to the reason.
fn with_others(why: String, others: &[String]) -> String {
    match others.is_empty() {
        true => format!("{why}; it is the only VM"),
        false => format!("{why}. The others: {}", others.join("; ")),
    }
}

impl Node {
    /// Returns whether an operator drains this host: it takes no VM, and its VMs move away.
    pub fn vacates(&self) -> bool {
        self.moves.vacates
    }

    /// Returns whether a VM is on its way to another host by a decision of this one.
    pub(super) fn is_moving(&self, vm: &RegionName) -> bool {
        self.moves.moving.as_ref().is_some_and(|moving| moving.vm == *vm)
    }

    /// Returns the VMs that move or could not move, by the latest decisions.
    pub fn move_states(&self) -> BTreeMap<RegionName, MoveState> {
        let failed = self.moves.failed.iter().map(|(vm, failed)| {
            let state = match failed.refused {
                true => MoveState::Refused(failed.why.clone()),
                false => MoveState::Failed(failed.why.clone()),
            };
            (vm.clone(), state)
        });
        let moving = self.moves.moving.iter().map(|moving| (moving.vm.clone(), MoveState::Moves));
        failed.chain(moving).collect()
    }

    /// Begins or ends the moves of all VMs to other hosts. The end cancels the move in progress,
    /// unless overload is its reason.
    pub(super) fn vacate(&mut self, on: bool) {
        if on || self.moves.vacates {
            // An order is a new chance for each VM, also one that comes again.
            self.moves.failed.clear();
        }
        if self.moves.vacates == on {
            return self.look_at_vms();
        }
        self.moves.vacates = on;
        let what = match on {
            true => "moves its VMs away and takes no others: the operator drains it",
            false => "keeps its VMs: the operator ends the drain",
        };
        self.log(what.to_owned(), Vec::new());
        if !on && self.moves.moving.as_ref().is_some_and(|moving| moving.drains) {
            self.outputs.push(Output::CancelMove);
        }
        self.look_at_vms();
    }

    /// Notes since when this host is overloaded, and looks at the VMs if one may have to move.
    pub(super) fn watch_vms(&mut self) {
        let overloaded = self.own.memory.overloaded(&self.controller.facts().config);
        self.moves.overloaded = self.moves.overloaded.or(Some(self.now)).filter(|_| overloaded);
        self.look_at_vms();
    }

    fn look_at_vms(&mut self) {
        let due = match (self.moves.vacates, self.lasting_overload()) {
            (true, _) => LOOK,
            (false, Some(_)) => LOOK_OVERLOADED,
            (false, None) => return,
        };
        let rests = self.moves.looked.is_some_and(|last| !self.passed(due, last));
        if self.moves.moving.is_none() && !self.moves.looking && !rests {
            (self.moves.looked, self.moves.looking) = (Some(self.now), true);
            self.outputs.push(Output::LookAtVms);
        }
    }

    /// Takes a look at the VMs, and begins a move if one is due.
    pub(super) fn seen_vms(&mut self, vms: &[VmReading]) {
        self.moves.looking = false;
        self.moves.failed.retain(|name, _| vms.iter().any(|vm| vm.vm == *name));
        if self.moves.moving.is_some() || self.belonging.has_left {
            return;
        }
        let chosen = match (self.moves.vacates, self.lasting_overload()) {
            (true, _) => self.next_to_vacate(vms),
            (false, Some(lasted)) => match self.relief(vms, lasted) {
                Ok(chosen) => Some(chosen),
                Err(why) => return self.tell_no_relief(why),
            },
            (false, None) => None,
        };
        if let Some((vm, why)) = chosen {
            self.begin_move(vm, &why);
        }
    }

    /// Logs once in each overload why no VM leaves.
    fn tell_no_relief(&mut self, why: String) {
        if self.moves.told_for != self.moves.overloaded {
            self.moves.told_for = self.moves.overloaded;
            self.log(why, Vec::new());
        }
    }

    /// Chooses the next VM of a drain: of those with the fewest failed moves, the one with the
    /// least to copy.
    fn next_to_vacate(&self, vms: &[VmReading]) -> Option<(RegionName, String)> {
        let failures = |vm: &VmReading| self.moves.failed.get(&vm.vm).map_or(0, |f| f.count);
        let ready = vms
            .iter()
            .filter(|vm| vm.obstacle.is_none() && !self.moves.backs_off(&vm.vm, self.now));
        let vm = ready.min_by_key(|vm| (failures(vm), vm.dirty, &vm.vm))?;
        let others = vms.iter().filter(|other| other.vm != vm.vm).map(|other| {
            let VmReading { vm, obstacle, dirty, .. } = other;
            match obstacle {
                Some(obstacle) => format!("{vm} stays: {obstacle}"),
                None => format!("{vm} has {dirty}, and failed {} times", failures(other)),
            }
        });
        let why = format!("this host is draining; {} of it is dirty", vm.dirty);
        Some((vm.vm.clone(), with_others(why, &others.collect::<Vec<_>>())))
    }

    fn begin_move(&mut self, vm: RegionName, why: &str) {
        let avoid = self.moves.failed.get(&vm).and_then(|failed| failed.to.clone());
        self.log(format!("moves VM {vm} to another host: {why}"), vec![Subject::Vm(vm.clone())]);
        self.moves.moving = Some(Moving { vm: vm.clone(), drains: self.moves.vacates });
        let below = if self.moves.vacates { Threshold::Upper } else { Threshold::Lower };
        self.outputs.push(Output::MoveVm { vm, avoid, below });
    }

    /// Notes the end of a move.
    pub(super) fn moved(&mut self, vm: &RegionName, end: MoveEnd) {
        if self.moves.moving.take_if(|moving| moving.vm == *vm).is_none() {
            return;
        }
        let mut about = vec![Subject::Vm(vm.clone())];
        about.extend(end.host().cloned().map(Subject::Host));
        let what = match end {
            MoveEnd::Moved { to, sent, why } => {
                self.moves.failed.remove(vm);
                // The next VM moves if the overload lasts as long again without this one.
                self.moves.overloaded = None;
                format!("moved VM {vm} to {to}; {sent} was sent; {why}")
            }
            MoveEnd::Cancelled => format!("cancelled the move of VM {vm}, which stays"),
            MoveEnd::Refused { why } => self.failed(vm, None, why, true),
            MoveEnd::Failed { to, why } => self.failed(vm, to, why, false),
        };
        self.log(what, about);
        self.moves.looked = None;
        self.look_at_vms();
    }

    /// Notes a failed move; returns the decision.
    fn failed(
        &mut self,
        vm: &RegionName,
        to: Option<HostName>,
        why: String,
        refused: bool,
    ) -> String {
        let count = self.moves.failed.get(vm).map_or(0, |failed| failed.count).saturating_add(1);
        let waits = if self.moves.vacates { WAITS } else { WAITS_OVERLOADED };
        let failed = Failed { count, waits, at: self.now, why, to, refused };
        let what = format!(
            "cannot move VM {vm}, tries again after {:?} at the earliest: {}",
            failed.wait(),
            failed.why
        );
        self.moves.failed.insert(vm.clone(), failed);
        what
    }

    /// Returns how long this host has been overloaded, if that is long enough for a move. A lender
    /// first gets its leases back. Until then the balancer and the borrower had the time to help.
    fn lasting_overload(&self) -> Option<Duration> {
        let lasted = self.now.saturating_sub(self.moves.overloaded?);
        (lasted >= self.moves.after? && self.controller.lent().is_empty()).then_some(lasted)
    }

    /// Returns the RAM that this host gets back when a VM moves away: that of its region.
    fn frees(&self, vm: &RegionName) -> Bytes {
        let regions = &self.controller.own().regions;
        let region = regions.iter().find(|region| region.name == *vm);
        region.map_or(Bytes::ZERO, |region| region.resident)
    }
}
