//! All decisions of one host about lent and borrowed memory, with the controller inside.
//!
//! [`Node::handle`] takes one [`Input`] with its time, and returns what the agent must do, in
//! order. The agent is a shell: it reads, sends, carries out [`Output`]s, and reports their ends.
//!
//! - `input`, `output`, `notice`: what goes in and out.
//! - `period`: the work of a monitoring period besides Algorithm 1.
//! - `offers`: when to ask peers for offers, and input that waits for them.
//! - `hear`: peers' messages. `settle`: the ends of actions and of this host's own messages.
//! - `orders`: orders to borrow and to return. `fit`: the check before a volume leaves.
//! - `regions`: memory for regions. `claim`: the check before a VM, a region or an export gets
//!   memory.
//! - `transfer`: leases that move with their regions.
//! - `drain`, `leave`: the orders to drain and to leave the cluster. `part`: the settling of leases
//!   with former peers.
//! - `moves`: VMs that move to other hosts, or come from them.
//! - `caches`: local caches of regions that give RAM up under overload, and grow back. `thin`: what
//!   their regions need at lenders. `spilled`: the way back for pages on this host's disk.
//! - `copies`: second copies of leases, and what to do when a lender is gone.
//! - `keys`: ages of keys, and leases that others replace for the sake of new keys.
//! - `watch`: changes of borrowed memory, from one look at the volumes to the next.

mod caches;
mod claim;
mod copies;
mod drain;
mod fit;
mod hear;
mod input;
mod keys;
mod leave;
mod moves;
mod notice;
mod offers;
mod orders;
mod output;
mod part;
mod period;
mod regions;
mod settle;
mod spilled;
mod thin;
mod transfer;
mod watch;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use aquifer_page::{Bytes, HostName, LeaseId, RegionName, VolumeId};

pub use drain::Left;
pub use input::{
    Contact, CopyReading, Found, Health, Input, LeaseReading, Readings, Said, Ticket,
    VolumeReading, Wanted,
};
pub use keys::KeySettings;
pub use moves::{MoveEnd, MoveState, Obstacle, Threshold, VmReading};
pub use notice::{EventKind, Notice};
pub use orders::nobody_lends;
pub use output::{Answer, Output, Problem, Work};

use crate::ledger::{Claims, Ledger, OwnMemory, Purpose};
use crate::{Action, Controller, Decision, Event, LoanState, Memory, Owner, Subject, What};
use caches::Caches;
use copies::Copies;
use keys::Keys;
use moves::Moves;
use offers::Offers;
use orders::Orders;
use transfer::Permits;
use watch::Watch;

/// What a node knows of its host besides the settings of its controller.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The monitoring period.
    pub period: Duration,
    /// The watched memory, for people: `host`, or the path of a cgroup.
    pub source: String,
    /// The hosts that the configuration or the cluster names.
    pub peers: BTreeSet<HostName>,
    /// How long overload lasts before a VM moves to another host; `None` for never.
    pub move_after: Option<Duration>,
    /// When to replace the keys of leases, and how old they are.
    pub keys: KeySettings,
}

/// All decisions of one host about lent and borrowed memory.
#[derive(Clone, Debug)]
pub struct Node {
    settings: Settings,
    controller: Controller,
    now: Duration,
    /// Work in progress: the controller may order it again meanwhile.
    work: HashSet<Work>,
    offers: Offers,
    orders: Orders,
    lending: Lending,
    borrowing: Borrowing,
    own: Own,
    moves: Moves,
    belonging: Belonging,
    outputs: Vec<Output>,
}

/// The memory of this host.
#[derive(Clone, Debug, Default)]
struct Own {
    /// The last reading. The controller gets it later if the period waits for offers.
    memory: Memory,
    /// Programs that the kernel has killed for lack of memory, at the last reading.
    oom_kills: Option<u64>,
    /// The last reading of VMs, regions and groups. The controller gets it with the claims.
    read: OwnMemory,
    claims: Claims,
    caches: Caches,
}

/// What the node remembers of its place in the cluster.
#[derive(Clone, Debug, Default)]
struct Belonging {
    /// Time of the last attempt to settle leases with former peers.
    parted: Option<Duration>,
    /// Whether this host has left the cluster: it neither lends nor borrows any more.
    has_left: bool,
}

/// What the node remembers of borrowers besides their leases.
#[derive(Clone, Debug, Default)]
struct Lending {
    /// Whether the host lends nothing and recalls its leases.
    draining: bool,
    /// Whether the node has noted the end of the drain.
    drained: bool,
    /// Time of the last sign of life from each lease's borrower.
    signs: BTreeMap<LeaseId, Duration>,
    /// Leases without a connection when this host last looked.
    missed: BTreeSet<LeaseId>,
    /// How long I/O of each borrower waits for this host, in ms, as the borrower last said.
    io_timeout_ms: BTreeMap<HostName, u64>,
    /// Why borrowers could not yet leave leases of this host, as they last said.
    told: BTreeMap<LeaseId, String>,
    /// Senders of `mem_bor_fin` that wait until the memory is free.
    fins: BTreeMap<LeaseId, Vec<Ticket>>,
    /// Hosts that wait until another may use their lease.
    permits: Permits,
}

/// What the node remembers of volumes and lenders besides the leases that it holds.
#[derive(Clone, Debug, Default)]
struct Borrowing {
    watch: Watch,
    copies: Copies,
    keys: Keys,
    /// Why this host could not yet leave leases of others.
    failures: BTreeMap<LeaseId, String>,
    /// Leases that this host holds and their lenders do not have.
    lost: BTreeSet<LeaseId>,
    /// Time of the last renewal at all lenders.
    renewed: Option<Duration>,
    /// Time of the last renewal at lenders that volumes miss.
    asked_missed: Duration,
    /// Time of the last look at the volumes.
    looked: Duration,
    looking: bool,
    /// Time of the last search for dead volumes.
    cleared: Duration,
}

impl Node {
    /// Returns a node around a controller at the start of the clock.
    pub fn new(controller: Controller, mut settings: Settings) -> Self {
        let draining = !controller.facts().config.lends;
        let moves = Moves::new(settings.move_after);
        let keys = Keys::new(std::mem::take(&mut settings.keys));
        Self {
            settings,
            controller,
            now: Duration::ZERO,
            work: HashSet::new(),
            offers: Offers::default(),
            orders: Orders::default(),
            lending: Lending { draining, drained: draining, ..Lending::default() },
            borrowing: Borrowing { keys, ..Borrowing::default() },
            own: Own::default(),
            moves,
            belonging: Belonging::default(),
            outputs: Vec::new(),
        }
    }

    /// Handles one input, and returns what the agent must do, in order. `now` is the time since the
    /// start of the agent, and does not go back.
    pub fn handle(&mut self, now: Duration, input: Input) -> Vec<Output> {
        self.now = self.now.max(now);
        match input {
            Input::Period(readings) => self.period(readings),
            Input::Offers { lenders, stored } => self.offered(lenders, stored),
            Input::Peers(peers) => self.settings.peers = peers,
            Input::HostDown { host, address } => self.host_down(&host, address),
            Input::HostAnew(host) => self.step(Event::Anew { host }),
            Input::Heard { from, message, ticket } => self.hear(from, message, ticket),
            Input::Renewal { from, leases, generations, io_timeout_ms, ticket } => {
                self.take_over(&from, &generations);
                let lost = self.renewal(&from, leases, io_timeout_ms);
                self.answer(ticket, Answer::Renewed(lost));
            }
            Input::Permit { from, lease, generation, to, ticket } => {
                self.permit(&from, (lease, generation), &to, ticket);
            }
            Input::Expect { volume, leases } => self.step(Event::Expected { volume, leases }),
            Input::Miss { volume } => self.step(Event::Missed { volume }),
            Input::Renewed { lender, lost } => self.note_lost(&lender, lost),
            Input::Volumes(volumes) => self.seen(&volumes),
            Input::Said { to, message, end } => self.said(to, message, end),
            Input::Done { work, event } => self.done(&work, event),
            Input::Borrow { bytes, priority, ticket } => self.borrow(bytes, priority, ticket),
            Input::BorrowFor { request, ticket } => self.borrow_for(request, ticket),
            Input::Return { volume, ticket } => self.give_back(volume, ticket),
            Input::RotateKeys { lease, ticket } => self.order_rotation(lease, ticket),
            Input::Drain { on, stored, vms } => self.drain(on, stored, vms),
            Input::Vms(vms) => self.seen_vms(&vms),
            Input::MoveEnded { vm, end } => self.moved(&vm, end),
            Input::Claim { claim, overcommit, ticket } => self.claim(claim, overcommit, ticket),
            Input::TakeVm { from, claim, below, ticket } => {
                self.take_vm(&from, claim, below, ticket);
            }
            Input::CacheSet { region, failed } => self.cache_set(&region, failed),
            Input::LostVm { from, vm, why } => self.lose_vm(&from, vm, &why),
            Input::Reclaim(bytes) => self.step(Event::Reclaim { bytes }),
            Input::Leave { ticket } => self.leave(ticket),
        }
        std::mem::take(&mut self.outputs)
    }

    /// Returns whether this host has promised memory for the cache of this region, which its
    /// readings may not show yet.
    pub fn has_promised(&self, region: &RegionName) -> bool {
        self.own.claims.has(Purpose::Cache, region)
    }

    /// Returns whether this host has left its cluster.
    pub fn has_left(&self) -> bool {
        self.belonging.has_left
    }

    /// Returns the controller, for the status.
    pub fn controller(&self) -> &Controller {
        &self.controller
    }

    /// Returns the account of this host's memory, from the last reading and the present leases.
    pub fn ledger(&self) -> Ledger {
        self.controller.ledger()
    }

    /// Returns the last reading.
    pub fn memory(&self) -> Memory {
        self.own.memory
    }

    /// Returns the leases that this host holds and their lenders do not have.
    pub fn lost(&self) -> &BTreeSet<LeaseId> {
        &self.borrowing.lost
    }

    /// Returns the ordered swap priority of this volume, if any.
    pub fn priority_of(&self, volume: VolumeId) -> Option<u16> {
        self.orders.priority_of(volume)
    }

    /// Passes one event to the controller, and passes on its decisions and actions.
    fn step(&mut self, event: Event) {
        let step = self.controller.step(self.now, event);
        step.decisions.iter().for_each(|decision| self.decided(decision));
        step.actions.into_iter().for_each(|action| self.begin(action));
        let confirmed = self.controller.pending_releases() == 0;
        self.outputs.extend(self.orders.conclude(confirmed, self.now));
    }

    fn decided(&mut self, decision: &Decision) {
        self.outputs.extend(self.orders.note(decision));
        self.note_lack(decision);
        self.note_loan(decision);
        if let What::RoleChanged { from, to } = decision.what {
            self.outputs.push(Output::RoleChanged { from, to });
        }
        let mut about = decision.what.subjects();
        match self.user_of(&about) {
            Some((_, Owner::Region(region))) if !has_region(&about) => {
                about.extend([Subject::Region(region.clone()), Subject::Vm(region)]);
            }
            Some((volume, Owner::Swap)) if !about.contains(&Subject::Volume(volume)) => {
                about.push(Subject::Volume(volume));
            }
            _ => {}
        }
        if decision.what.is_limited_by_ledger() {
            let vms = self.controller.own().vms.iter();
            about.extend(vms.map(|vm| Subject::Vm(vm.name.clone())));
        }
        self.log(decision.to_string(), about);
        if let What::Expires { borrower, .. } = &decision.what {
            self.note(EventKind::BorrowerLost, borrower, format!("this host {decision}"));
        }
    }

    /// Returns the volume, and its owner, whose lease is among the subjects.
    fn user_of(&self, about: &[Subject]) -> Option<(VolumeId, Owner)> {
        let lease = about.iter().find_map(|one| match one {
            Subject::Lease(lease) => Some(*lease),
            _ => None,
        })?;
        let borrowed = self.controller.borrowed();
        let volume = borrowed.iter().find(|held| held.lease.lease == lease)?.volume;
        let volumes = self.controller.volumes();
        let known = volumes.into_iter().find(|known| known.volume == volume)?;
        Some((volume, known.owner))
    }

    /// Begins an action, unless work on the same subject is in progress.
    fn begin(&mut self, action: Action) {
        let work = Work::of(&action);
        if self.work.insert(work.clone()) {
            let provided = regions::provided(&action);
            self.outputs.push(Output::Begin(work, action));
            provided.iter().for_each(|live| self.answer_with(live));
        }
    }

    fn log(&mut self, what: String, about: Vec<Subject>) {
        self.outputs.push(Output::Decision { role: self.controller.role(), what, about });
    }

    fn note(&mut self, kind: EventKind, who: impl ToString, what: impl Into<String>) {
        let (who, what) = (who.to_string(), what.into());
        self.outputs.push(Output::Notice(Notice { kind, who, what }));
    }

    fn answer(&mut self, ticket: Ticket, answer: Answer) {
        self.outputs.push(Output::Answer(ticket, answer));
    }

    /// Returns the leases of this host that `borrower` may hold.
    fn lent_to(&self, borrower: &HostName) -> BTreeSet<LeaseId> {
        let lent = self.controller.lent().into_iter();
        let held = lent
            .filter(|lent| lent.lease.borrower == *borrower && lent.state != LoanState::Opening);
        held.map(|lent| lent.lease.lease).collect()
    }

    /// Returns whether `wait` has passed since `then`.
    fn passed(&self, wait: Duration, then: Duration) -> bool {
        self.now.saturating_sub(then) >= wait
    }
}

fn has_region(about: &[Subject]) -> bool {
    about.iter().any(|one| matches!(one, Subject::Region(_)))
}

/// Returns the bytes stored in a lease.
fn stored_in(stored: &BTreeMap<LeaseId, Bytes>, lease: LeaseId) -> Bytes {
    stored.get(&lease).copied().unwrap_or_default()
}
