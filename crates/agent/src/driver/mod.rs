//! The driver: the loop around the node of the `control` crate, which decides.
//!
//! One task owns the node and waits for nothing but the next input. Slow work (a message, a
//! swapoff, a move) runs beside it and returns as an input.
//!
//! - `command`: requests to the agent. `reply`: the channels for their answers. `claim`: requests
//!   for memory of VMs and regions. `moving`: drains, and moves of VMs.
//! - `readings`: what the driver reads for the node in each period.
//! - `perform`: the execution of the node's outputs. `regions`: memory for regions.
//! - `journal`: the latest decisions. `report`: the answers to `status`, `drain` and
//!   other hosts.

mod claim;
mod command;
mod journal;
mod key_ages;
mod moving;
mod perform;
mod readings;
mod regions;
mod reply;
mod report;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use aquifer_api::message::Renew;
use aquifer_control::node::{Input, KeySettings, Node, Settings};
use aquifer_control::{self as control, Controller, Message, Restored, Shareable};
use aquifer_page::{Bytes, HostName, LeaseId};
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;

pub use command::{Command, Handle, Heard, Stays};
pub use journal::Journal;

use crate::borrower::Borrower;
use crate::cluster::{Gossip, Renewing};
use crate::config::Config;
use crate::events::Events;
use crate::lender::Lender;
use crate::lender::limits::Waits;
use crate::monitor::Source;
use crate::monitor::gate::SwapGate;
use crate::monitor::pacer::Pacer;
use crate::monitor::pressure::Pressure;
use crate::own::OwnReader;
use crate::peers::{Peers, Spare};
use crate::vms::Vms;
use key_ages::KeyAges;
use reply::{Replies, Reply};

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
    /// This host's part in the gossip of its cluster, if it belongs to one.
    pub(crate) gossip: Option<Gossip>,
    /// This host's certificate.
    pub(crate) renewing: Renewing,
    /// Events outside the controller's decisions.
    pub events: Events,
    /// The latest decisions.
    pub journal: Journal,
    /// The memory that this host promises to its own VMs, regions and groups.
    pub(crate) own: OwnReader,
    /// The VMs that move.
    pub vms: Vms,
}

/// The task that owns the node.
#[derive(Debug)]
pub struct Driver {
    parts: Parts,
    node: Node,
    started: Instant,
    replies: Replies,
    /// For work beside the driver, which sends its end here.
    ends: mpsc::UnboundedSender<Input>,
    ended: mpsc::UnboundedReceiver<Input>,
    /// End of the latest VM for which there is an event.
    vms_seen: SystemTime,
    pacer: Pacer,
    waits: Waits,
    key_ages: KeyAges,
}

impl Driver {
    /// Takes over the leases and volumes of the previous agent.
    pub fn new(parts: Parts) -> Self {
        let (ends, ended) = mpsc::unbounded_channel();
        let Config { pages, lend, .. } = &parts.config;
        let pacer = Pacer::new(pages.ip(), lend.network_share);
        let key_ages = KeyAges::of(&parts.config.state);
        Self {
            pacer,
            waits: Waits::default(),
            node: node(&parts, key_ages.read()),
            key_ages,
            parts,
            started: Instant::now(),
            replies: Replies::default(),
            ends,
            ended,
            vms_seen: SystemTime::now(),
        }
    }

    /// Runs until the other end closes `commands`.
    pub async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        self.set_gate();
        self.resume_drain();
        let mut period = tokio::time::interval(self.parts.config.memory.period);
        period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = period.tick() => self.tick(),
                () = fired(self.parts.pressure.as_ref()) => self.tick(),
                Some(input) = self.ended.recv() => self.input(input),
                command = commands.recv() => match command {
                    Some(command) => self.obey(command),
                    None => return,
                },
            }
        }
    }

    /// Lets the common rate of borrowers follow the load, and tells which of them limits hold back.
    fn pace_lending(&mut self) {
        let Some(gate) = self.parts.lender.gate() else { return };
        let (role, journal) = (self.node.controller().role(), &self.parts.journal);
        if let Some(what) = self.pacer.tick(&gate) {
            journal.decided(role, what, []);
        }
        for (what, about) in self.waits.begun(&gate, self.started.elapsed()) {
            journal.decided(role, what, about);
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn tick(&mut self) {
        match self.read() {
            Ok(readings) => {
                self.parts.own.refresh();
                self.input(Input::Period(readings));
                self.pace_lending();
                self.key_ages.keep(&self.node.key_ages(), self.node.ordered_keys());
                let (holds, knows) = (|id| self.node.holds(id), |id| self.node.knows(id));
                self.parts.borrower.keep_regions(holds, knows);
                if let Some(gossip) = &self.parts.gossip {
                    let controller = self.node.controller();
                    gossip.tell(controller.spare().max(controller.spare_for_regions()));
                }
            }
            Err(error) => tracing::error!("cannot read the memory figures: {error}"),
        }
    }

    /// Looks for regions that have just gone, or moved to another host.
    fn follow_regions(&mut self) {
        let borrower = &self.parts.borrower;
        let (moved, gone) = (borrower.moved(), borrower.gone());
        match self.read() {
            Ok(mut readings) => {
                readings.found.get_or_insert_default().moved.extend(moved);
                readings.found.get_or_insert_default().gone.extend(gone);
                self.input(Input::Period(readings));
            }
            Err(error) => tracing::error!("cannot read the memory figures: {error}"),
        }
    }

    /// Passes one input to the node, and performs its outputs.
    fn input(&mut self, input: Input) {
        for output in self.node.handle(self.now(), input) {
            self.perform(output);
        }
    }

    /// Frees the leases of a borrower that was revoked, as if it gave them back.
    fn release_leases_of(&mut self, borrower: &HostName) {
        let lent = self.node.controller().lent().into_iter().map(|lent| lent.lease);
        for lent in lent.filter(|lent| lent.borrower == *borrower).collect::<Vec<_>>() {
            let (reply, _) = oneshot::channel();
            let ticket = self.replies.keep(Reply::Heard(borrower.clone(), reply));
            let (lease, generation) = (lent.lease, lent.generation);
            let message = Message::MemBorFin { lease, generation };
            self.input(Input::Heard { from: borrower.clone(), message, ticket });
        }
    }

    fn obey(&mut self, command: Command) {
        // The requester may be gone; the failed send does not matter then.
        match command {
            Command::Hear { from, message, reply } => {
                let ticket = self.replies.keep(Reply::Heard(from.clone(), reply));
                self.input(Input::Heard { from, message, ticket });
            }
            Command::Peers(peers) => self.input(Input::Peers(peers)),
            Command::HostAnew(host) => self.input(Input::HostAnew(host)),
            Command::HostRevoked(host) => self.release_leases_of(&host),
            Command::HostDown { host, address } => self.input(Input::HostDown { host, address }),
            Command::Renew { from, renew, reply } => {
                let ticket = self.replies.keep(Reply::Renewed(reply));
                let Renew { leases, moved, io_timeout_ms } = renew;
                let generations = moved.into_iter().map(|it| (it.lease, it.generation)).collect();
                self.input(Input::Renewal { from, leases, generations, io_timeout_ms, ticket });
            }
            Command::Permit { from, permit, reply } => self.permit(from, permit, reply),
            Command::Expect { memory, reply } => self.expect(*memory, reply),
            Command::Miss { volume } => {
                self.parts.borrower.miss_region(volume);
                self.input(Input::Miss { volume });
            }
            Command::Offer { from, below, reply } => {
                let controller = self.node.controller();
                let room = match self.parts.config.vms.accept {
                    true => self.node.room_for_vms(below),
                    false => Bytes::ZERO,
                };
                let spare = Spare {
                    swap: controller.spare(),
                    regions: controller.spare_for_regions(),
                    copies: controller.spare_for_copies(),
                    vms: room,
                };
                let _ = reply.send(self.parts.peers.offer(&from, &spare));
            }
            Command::Drain { order, vms, reply } => {
                if let Some(order) = order {
                    self.drain(order.on, vms);
                }
                self.draining(vms, reply);
            }
            Command::Access { from, lease, reply } => {
                let _ = reply.send(self.parts.lender.access(lease, &from));
            }
            Command::Status { reply } => self.report(reply),
            Command::Summary { reply } => self.summarize(reply),
            Command::Borrow { order, reply } => {
                let ticket = self.replies.keep(Reply::Borrowed(reply));
                let (bytes, priority) = (order.bytes, order.priority);
                self.input(Input::Borrow { bytes, priority, ticket });
            }
            Command::BorrowFor { order, reply } => self.borrow_for(order, reply),
            Command::Settle { order, reply } => drop(reply.send(self.settle(order))),
            Command::Return { order, reply } => {
                let ticket = self.replies.keep(Reply::Returned(reply));
                self.input(Input::Return { volume: order.volume, ticket });
            }
            Command::RotateKeys { order, reply } => {
                let ticket = self.replies.keep(Reply::Rotates(reply));
                self.input(Input::RotateKeys { lease: order.lease, ticket });
                self.key_ages.keep(&self.node.key_ages(), self.node.ordered_keys());
            }
            Command::Claim { order, reply } => self.claim(order, reply),
            Command::TakeVm { from, claim, below, reply } => {
                self.take_vm(from, claim, below, reply);
            }
            Command::LostVm { from, vm, why } => self.input(Input::LostVm { from, vm, why }),
            Command::AdmitsVms { reply } => drop(reply.send(self.node.admits_vms())),
            Command::Room { reply } => drop(reply.send(self.room())),
            Command::Reclaim { bytes } => self.input(Input::Reclaim(bytes)),
            Command::Leave { reply } => {
                self.follow_regions();
                let ticket = self.replies.keep(Reply::Left(reply));
                self.input(Input::Leave { ticket });
            }
        }
    }
}

/// Creates this host's node from the leases and volumes of the previous agent.
fn node(parts: &Parts, keys: KeySettings) -> Node {
    let Config { host, memory, lend, borrow, vms, .. } = &parts.config;
    let config = control::Config {
        upper: memory.upper,
        lower: memory.lower,
        shareable: lend
            .reserved
            .map_or(Shareable::Dynamic, |reserved| Shareable::Preconfigured { reserved }),
        lends: lend.enabled,
        borrows: borrow.enabled,
        request: borrow.request,
        max_borrowed: borrow.max,
        protection: borrow.protections(),
        group: borrow.group.clone(),
        grace: lend.grace,
        ..control::Config::with_period(memory.period)
    };
    let (lent, borrower) = (parts.lender.restored(), &parts.borrower);
    let (volumes, expected) = (borrower.restored(), borrower.expected());
    let found = Restored { lent, volumes, expected };
    // A controller's ids start at a random number; a random lease id provides one.
    let seed = LeaseId::random().0;
    let controller = Controller::restore(host.clone(), config, seed, Duration::ZERO, found);
    let settings = Settings {
        period: memory.period,
        source: parts.source.name(),
        peers: parts.peers.known(),
        move_after: vms.move_after,
        keys: KeySettings { lifetime: borrow.key_lifetime, ..keys },
    };
    Node::new(controller, settings)
}

async fn fired(pressure: Option<&Pressure>) {
    match pressure {
        Some(pressure) => pressure.fired().await,
        None => std::future::pending().await,
    }
}
