//! The driver: feeds the controller readings, messages and outcomes, and carries out its decisions.
//!
//! One task owns the controller and waits for nothing but the next event. Slow work (a message, a
//! swapoff, a move) runs beside it and returns as an event.

mod command;
mod drain;
mod look;
mod orders;
mod perform;
mod report;
mod watch;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use aquifer_api::status;
use aquifer_control::{Controller, Event, Memory, Message, Offer, Role};
use aquifer_page::{Bytes, HostName, LeaseId};
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;

pub use command::{Command, Handle, Heard};

use crate::borrower::Borrower;
use crate::config::Config;
use crate::events::Events;
use crate::lender::Lender;
use crate::monitor::Source;
use crate::monitor::gate::SwapGate;
use crate::monitor::pressure::Pressure;
use crate::peers::Peers;
use orders::Orders;
use perform::{Busy, Outcome};
use watch::Watch;

/// The driver asks peers for offers once M_u exceeds this share of T_upper x M_t. The answers are
/// then there when needed, and an idle host asks no peer.
const ASK_EARLY: f64 = 0.9;

/// Minimum time between two searches for dead volumes.
const CLEARING: Duration = Duration::from_secs(1);

/// The components that the driver works with.
#[derive(Debug)]
pub struct Parts {
    /// The configuration.
    pub config: Config,
    /// The memory that the agent watches.
    pub source: Source,
    /// The early signal from PSI, if configured and available.
    pub pressure: Option<Pressure>,
    /// The switch that lets the managed cgroup swap, if the agent controls it.
    pub gate: Option<SwapGate>,
    /// The leases that this host has granted.
    pub lender: Arc<Lender>,
    /// The volumes that this host has borrowed.
    pub borrower: Arc<Borrower>,
    /// The other hosts.
    pub peers: Peers,
    /// Events outside the controller's decisions.
    pub events: Events,
}

/// The task that owns the controller.
#[derive(Debug)]
pub struct Driver {
    parts: Parts,
    controller: Controller,
    started: Instant,
    memory: Memory,
    decisions: VecDeque<status::Decision>,
    role_changes: VecDeque<status::RoleChange>,
    outcomes: mpsc::UnboundedSender<Outcome>,
    finished: mpsc::UnboundedReceiver<Outcome>,
    /// Work in progress: the controller may order it again meanwhile.
    busy: HashSet<Busy>,
    /// Reply channels of `mem_bor_fin` messages that wait until the memory is free.
    pending_releases: HashMap<LeaseId, Vec<oneshot::Sender<Heard>>>,
    orders: Orders,
    /// Time of the last sign of life from each lease's borrower.
    signs: BTreeMap<LeaseId, Instant>,
    /// How long I/O of each borrower waits for this host, in ms, as the borrower last said.
    io_timeout_ms: BTreeMap<HostName, u64>,
    /// Whether the host lends nothing and recalls its leases.
    draining: bool,
    /// Whether the driver has noted the end of the drain.
    drained: bool,
    /// Why borrowers could not yet leave leases of this host, as they last said.
    told: BTreeMap<LeaseId, String>,
    /// Why this host could not yet leave leases of others.
    failures: BTreeMap<LeaseId, String>,
    /// Leases that this host holds and their lenders do not have.
    lost: BTreeSet<LeaseId>,
    /// Time of the last attempt to settle leases with former peers.
    parted: Option<Instant>,
    renewed: Option<Instant>,
    /// Time of the last renewal at lenders that volumes miss.
    asked_missed: Instant,
    watch: Watch,
    looked: Instant,
    looking: bool,
    oom_kills: Option<u64>,
    /// End of the latest VM for which there is an event.
    vms_seen: SystemTime,
    /// Time of the last search for dead volumes.
    cleared: Instant,
    /// Whether the period's step waits for peers' offers.
    asking: bool,
    /// Input that waits for peers' offers.
    waiting: Vec<Waiting>,
}

/// Input that the controller handles well only with peers' offers.
#[derive(Debug)]
enum Waiting {
    /// A lender recalls a lease.
    Hear(HostName, Message, oneshot::Sender<Heard>),
    /// The operator borrows.
    Borrow(Bytes),
}

impl Driver {
    /// Takes over the leases and volumes of the previous agent.
    pub fn new(parts: Parts) -> Self {
        let (outcomes, finished) = mpsc::unbounded_channel();
        let now = Instant::now();
        let controller = perform::controller(&parts);
        let draining = !parts.config.lend.enabled;
        Self {
            parts,
            controller,
            started: now,
            memory: Memory::default(),
            decisions: VecDeque::new(),
            role_changes: VecDeque::new(),
            outcomes,
            finished,
            busy: HashSet::new(),
            pending_releases: HashMap::new(),
            orders: Orders::default(),
            signs: BTreeMap::new(),
            io_timeout_ms: BTreeMap::new(),
            draining,
            drained: draining,
            told: BTreeMap::new(),
            failures: BTreeMap::new(),
            lost: BTreeSet::new(),
            parted: None,
            renewed: None,
            asked_missed: now,
            watch: Watch::default(),
            looked: now,
            looking: false,
            oom_kills: None,
            vms_seen: SystemTime::now(),
            cleared: now,
            asking: false,
            waiting: Vec::new(),
        }
    }

    /// Runs until the other end closes `commands`.
    pub async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        self.set_gate();
        let mut period = tokio::time::interval(self.parts.config.memory.period);
        period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = period.tick() => self.tick(),
                () = fired(self.parts.pressure.as_ref()) => self.tick(),
                Some(outcome) = self.finished.recv() => self.settle(outcome),
                command = commands.recv() => match command {
                    Some(command) => self.obey(command),
                    None => return,
                },
            }
        }
    }

    /// Runs one monitoring period (\[Ge23\], Algorithm 1, line 1).
    fn tick(&mut self) {
        let reading = match self.parts.source.read() {
            Ok(reading) => reading,
            Err(error) => return tracing::error!("cannot read the memory figures: {error}"),
        };
        let held = match self.parts.source.contains_self() {
            true => Bytes::ZERO,
            false => self.parts.lender.stored(),
        };
        self.memory = Memory {
            total: reading.total,
            used: reading.used.saturating_add(held),
            swap_used: reading.swap_used.min(self.parts.borrower.swap_used()),
            pressure: self.parts.pressure.as_mut().is_some_and(Pressure::is_high),
        };
        self.note_signs();
        self.renew();
        self.note_kills();
        self.note_ended_vms();
        self.look_at_volumes();
        self.part_with_former_peers();
        self.note_drained();
        self.clear_away_the_dead();
        match self.wants_offers() {
            true => self.ask_offers(),
            false => self.step_period(Vec::new()),
        }
    }

    fn wants_offers(&self) -> bool {
        let near = self.memory.total.scaled(self.parts.config.memory.upper * ASK_EARLY);
        let short = self.memory.used > near || self.memory.pressure;
        let may_borrow = self.parts.config.borrow.enabled && self.controller.role() != Role::Lender;
        (short && may_borrow)
            || self.controller.borrowed().iter().any(|lease| lease.leaving)
            || !self.waiting.is_empty()
    }

    /// Asks all peers for offers; the period's step follows their answers.
    fn ask_offers(&mut self) {
        if !std::mem::replace(&mut self.asking, true) {
            let (peers, outcomes) = (self.parts.peers.clone(), self.outcomes.clone());
            tokio::spawn(async move { outcomes.send(Outcome::Offers(peers.offers().await)) });
        }
    }

    fn step_period(&mut self, lenders: Vec<Offer>) {
        let stored = self.parts.lender.stored_by_lease();
        self.step(Event::Tick { memory: self.memory, stored, lenders });
        for waiting in std::mem::take(&mut self.waiting) {
            match waiting {
                Waiting::Hear(from, message, reply) => self.take_in(from, message, reply),
                Waiting::Borrow(bytes) => {
                    self.step(Event::Borrow {
                        bytes,
                        group: self.parts.config.borrow.group.clone(),
                    });
                }
            }
        }
    }

    /// Returns volumes without a process: otherwise the kernel keeps swapping to a device without a
    /// server.
    fn clear_away_the_dead(&mut self) {
        if self.cleared.elapsed() < CLEARING {
            return;
        }
        self.cleared = Instant::now();
        self.note_left();
        for volume in self.parts.borrower.dead() {
            if !self.busy.contains(&Busy::Volume(volume)) {
                self.note_decision(format!("removes volume {volume}: its process has died"));
                self.step(Event::Return { volume: Some(volume) });
            }
        }
    }

    fn obey(&mut self, command: Command) {
        // The requester may be gone; the failed send does not matter then.
        match command {
            Command::Hear { from, message, reply } => self.hear(from, message, reply),
            Command::Renew { from, renew, reply } => {
                let _ = reply.send(self.renewed(&from, renew));
            }
            Command::Offer { from, reply } => {
                let _ = reply.send(self.parts.peers.offer(&from, self.controller.spare()));
            }
            Command::Drain { order, reply } => {
                let _ = reply.send(match order {
                    Some(order) => self.order_drain(order),
                    None => self.draining(),
                });
            }
            Command::Access { from, lease, reply } => {
                let _ = reply.send(self.parts.lender.access(lease, &from));
            }
            Command::Status { reply } => self.report(reply),
            Command::Borrow { order, reply } => self.order_borrow(&order, reply),
            Command::Return { order, reply } => self.order_return(&order, reply),
        }
    }

    /// Takes in a peer's message. The answer to a `mem_bor_fin` waits until the memory is free, so
    /// that both hosts agree that the lease is returned.
    fn hear(&mut self, from: HostName, message: Message, reply: oneshot::Sender<Heard>) {
        if !self.may_say(&from, &message) {
            let _ = reply.send(self.parts.peers.admit(&from).map(|()| None));
            return;
        }
        match message {
            Message::MemLenFin { .. } => {
                self.waiting.push(Waiting::Hear(from, message, reply));
                self.ask_offers();
            }
            message => self.take_in(from, message, reply),
        }
    }

    fn take_in(&mut self, from: HostName, message: Message, reply: oneshot::Sender<Heard>) {
        let failure = match message {
            Message::MemLenFin { lease } => self.failures.get(&lease).cloned(),
            _ => None,
        };
        let fin = match message {
            Message::MemBorFin { lease } if self.parts.lender.is_of(lease, &from) => Some(lease),
            _ => None,
        };
        self.step(Event::Received { from, message });
        match fin {
            Some(lease) if self.busy.contains(&Busy::Lease(lease)) => {
                let waiting = self.pending_releases.entry(lease).or_default();
                waiting.retain(|reply| !reply.is_closed());
                waiting.push(reply);
            }
            _ => {
                let _ = reply.send(Ok(failure));
            }
        }
    }
}

async fn fired(pressure: Option<&Pressure>) {
    match pressure {
        Some(pressure) => pressure.fired().await,
        None => std::future::pending().await,
    }
}
