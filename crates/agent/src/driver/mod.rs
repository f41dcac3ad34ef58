//! Ties the controller to the world: feeds it readings, messages and outcomes, and carries out what it decides.
//!
//! One task owns the controller and never waits for anything but the next thing to happen. What takes time (a message, a
//! swapoff, a move) runs beside it and comes back as an event.

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

/// Peers are asked what they could lend once M_u is above this share of T_upper x M_t: the answers are there when they are
/// needed, and an idle host asks nobody anything.
const ASK_EARLY: f64 = 0.9;

/// Between two looks for volumes that have died.
const CLEARING: Duration = Duration::from_secs(1);

/// What the driver works with.
#[derive(Debug)]
pub struct Parts {
    /// The configuration.
    pub config: Config,
    /// What memory is watched.
    pub source: Source,
    /// The early signal, where there is one.
    pub pressure: Option<Pressure>,
    /// Whether the managed cgroup may swap, where that is ours to say.
    pub gate: Option<SwapGate>,
    /// The leases that this host has granted.
    pub lender: Arc<Lender>,
    /// The volumes that it has borrowed.
    pub borrower: Arc<Borrower>,
    /// The other hosts.
    pub peers: Peers,
    /// What happens that nobody decides.
    pub events: Events,
}

/// The task itself.
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
    /// What is being carried out: the controller may ask for it again meanwhile.
    busy: HashSet<Busy>,
    /// Senders of `mem_bor_fin` that wait for the memory to be free.
    fins: HashMap<LeaseId, Vec<oneshot::Sender<Heard>>>,
    orders: Orders,
    /// When each lease's borrower last gave a sign.
    signs: BTreeMap<LeaseId, Instant>,
    /// How long I/O of each borrower waits for this host, as it last said.
    patience_ms: BTreeMap<HostName, u64>,
    /// Nothing is lent, and what was lent is asked back.
    draining: bool,
    /// That nothing is lent any more has been told.
    drained: bool,
    /// Why borrowers could not leave leases of this host yet, as they last said.
    told: BTreeMap<LeaseId, String>,
    /// Why this host could not leave leases of others yet.
    failures: BTreeMap<LeaseId, String>,
    /// Leases of others that their lenders do not have any more.
    lost: BTreeSet<LeaseId>,
    /// When former peers were last parted with.
    parted: Option<Instant>,
    renewed: Option<Instant>,
    /// When lenders that volumes miss were last asked for their leases.
    asked_missed: Instant,
    watch: Watch,
    looked: Instant,
    looking: bool,
    oom_kills: Option<u64>,
    /// When the last VM ended of which an event tells.
    vms_seen: SystemTime,
    /// When volumes that have died were last looked for.
    cleared: Instant,
    /// Peers have been asked what they could lend and the period's step waits for their answers.
    asking: bool,
    /// What is to be taken in as soon as it is known who could lend.
    waiting: Vec<Waiting>,
}

/// Something that the controller can only act on well when it knows who could lend.
#[derive(Debug)]
enum Waiting {
    /// A lender wants its memory back.
    Hear(HostName, Message, oneshot::Sender<Heard>),
    /// The operator borrows.
    Borrow(Bytes),
}

impl Driver {
    /// Takes up the leases and volumes that outlived the agent before this one.
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
            fins: HashMap::new(),
            orders: Orders::default(),
            signs: BTreeMap::new(),
            patience_ms: BTreeMap::new(),
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

    /// Runs until `commands` is closed.
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

    /// One monitoring period (Algorithm 1, line 1).
    fn tick(&mut self) {
        let reading = match self.parts.source.read() {
            Ok(reading) => reading,
            Err(error) => return tracing::error!("cannot read how much memory is used: {error}"),
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

    /// Asks all peers what they could lend; the period's step is taken when they have answered.
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

    /// Gives volumes back whose processes have died: the kernel would go on swapping to what nobody serves.
    fn clear_away_the_dead(&mut self) {
        if self.cleared.elapsed() < CLEARING {
            return;
        }
        self.cleared = Instant::now();
        self.note_left();
        for volume in self.parts.borrower.dead() {
            if !self.busy.contains(&Busy::Volume(volume)) {
                self.note_decision(format!("clears away volume {volume}: its process has died"));
                self.step(Event::Return { volume: Some(volume) });
            }
        }
    }

    fn obey(&mut self, command: Command) {
        // Whoever asked may have gone meanwhile; the answer is then nobody's.
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

    /// Takes a peer's message in. A `mem_bor_fin` is answered only when the memory is free, so that the borrower's word
    /// "it is given back" is true on both sides.
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
                let waiting = self.fins.entry(lease).or_default();
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
