//! A simulated network of hosts, with faults that a test triggers.
//!
//! The hosts' stores and volumes are separate from their controllers, as on real machines: a crash
//! takes the controller and its pending actions, and leaves the rest. After each step the
//! simulation checks the crate's invariants.

mod moves;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_control::{
    Action, BorrowedLease, Config, Controller, Event, LentLease, LiveVolume, LoanState, Memory,
    Offer, RegionRequest, Restored, Role, Shareable, Step, VolumeState, What,
};
use aquifer_page::{Bytes, Group, HostName, LeaseId, VolumeId};

use moves::RegionMove;

/// The load of a host.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    /// M_u in percent of M_t.
    pub used: u64,
    /// The fill of borrowed volumes and lent leases, in percent.
    pub filled: u64,
    pub pressure: bool,
}

pub struct Host {
    pub name: HostName,
    pub controller: Controller,
    starts: u128,
    pub store: BTreeMap<LeaseId, LentLease>,
    pub volumes: BTreeMap<VolumeId, LiveVolume>,
    jobs: Vec<Action>,
    /// Moves that a crashed agent began. The volume's process continues them, but does not report
    /// their end.
    moving: Vec<(VolumeId, LeaseId)>,
    /// The leases of regions that may come.
    expected: BTreeMap<VolumeId, BTreeSet<LeaseId>>,
    /// The volumes of regions of which the controller does not know yet whether they come.
    awaited: BTreeSet<VolumeId>,
    /// The regions that this host has moved away, and where to.
    handed_over: BTreeMap<VolumeId, usize>,
    pub roles: Vec<Role>,
}

/// An event on its way to a host.
#[derive(Clone)]
struct Packet {
    to: usize,
    event: Event,
}

pub struct Network {
    pub config: Config,
    /// M_t of every host.
    pub total: Bytes,
    pub hosts: Vec<Host>,
    wire: Vec<Packet>,
    pub now: Duration,
    expired: BTreeSet<LeaseId>,
    pub decisions: Vec<String>,
    /// The number of regions that have asked for memory.
    regions: u128,
    moves: Vec<RegionMove>,
}

impl Network {
    pub fn new(hosts: usize, total: Bytes, config: Config) -> Self {
        config.validate().expect("the test's configuration makes sense");
        let host = |index: usize| {
            let name: HostName =
                format!("{}", char::from(b'a' + index as u8)).parse().expect("a letter is a name");
            Host {
                controller: Controller::new(name.clone(), config.clone(), seed(index, 0)),
                name,
                starts: 0,
                store: BTreeMap::new(),
                volumes: BTreeMap::new(),
                jobs: Vec::new(),
                moving: Vec::new(),
                expected: BTreeMap::new(),
                awaited: BTreeSet::new(),
                handed_over: BTreeMap::new(),
                roles: vec![Role::Neutral],
            }
        };
        Self {
            hosts: (0..hosts).map(host).collect(),
            config: config.clone(),
            total,
            wire: Vec::new(),
            now: Duration::from_secs(1),
            expired: BTreeSet::new(),
            decisions: Vec::new(),
            regions: 0,
            moves: Vec::new(),
        }
    }

    fn index(&self, name: &HostName) -> usize {
        self.hosts.iter().position(|host| host.name == *name).expect("a host of this network")
    }

    pub fn step(&mut self, index: usize, event: Event) {
        let host = &mut self.hosts[index];
        let (for_swap, for_regions) =
            (host.controller.spare(), host.controller.spare_for_regions());
        let Step { actions, decisions } = host.controller.step(self.now, event);
        for decision in decisions {
            if let What::Expires { lease, .. } = decision.what {
                self.expired.insert(lease);
            }
            self.decisions.push(format!("{} {}", host.name, decision));
        }
        for action in &actions {
            let Action::OpenLease(lease) = action else { continue };
            let spare = if lease.owner.is_swap() { for_swap } else { for_regions };
            assert!(lease.bytes <= spare, "{} grants more than it can spare", host.name);
        }
        let from = host.name.clone();
        for action in actions {
            match action {
                Action::Send { to, message } => {
                    let event = Event::Received { from: from.clone(), message };
                    self.wire.push(Packet { to: self.index(&to), event });
                }
                // The node writes down one lease at a time. The controller repeats the order.
                Action::RecordLease(lent) if self.hosts[index].writes_down(lent.lease) => {}
                job => self.hosts[index].jobs.push(job),
            }
        }
        self.note_role(index);
        self.check();
    }

    fn note_role(&mut self, index: usize) {
        let host = &mut self.hosts[index];
        let role = host.controller.role();
        let before = *host.roles.last().expect("there is a first role");
        if role != before {
            assert!(
                role == Role::Neutral || before == Role::Neutral,
                "{}: {before} -> {role}",
                host.name
            );
            host.roles.push(role);
        }
    }

    /// Checks that the lender of every unexpired lease in use has it. Also checks that no request
    /// has two leases, and that no host both borrows for swap and lends to swap.
    fn check(&self) {
        for host in &self.hosts {
            let (mut borrows, mut lends) = (host.controller.volumes(), host.controller.lent());
            borrows.retain(|volume| volume.owner.is_swap());
            lends.retain(|lent| lent.lease.owner.is_swap());
            assert!(
                borrows.is_empty() || lends.is_empty(),
                "{} borrows {borrows:?}, lends {lends:?}",
                host.name
            );
            for lease in
                host.leases_in_use().into_iter().filter(|l| !self.expired.contains(&l.lease))
            {
                let lender = &self.hosts[self.index(&lease.lender)];
                assert!(
                    lender.store.contains_key(&lease.lease),
                    "{} uses a freed lease {lease:?}",
                    host.name
                );
            }
            for live in host.volumes.values() {
                assert!(
                    self.may_use(self.index(&host.name), live),
                    "{} may not use {live:?}",
                    host.name
                );
            }
            let requests: BTreeSet<_> =
                host.store.values().map(|l| (&l.borrower, l.request)).collect();
            assert_eq!(
                requests.len(),
                host.store.len(),
                "{} gave two leases for one request",
                host.name
            );
        }
    }

    pub fn tick(&mut self, index: usize, load: Load, heard_of: u8) {
        let heard = |other: &usize| *other != index && heard_of & (1 << other) != 0;
        let others = (0..self.hosts.len()).filter(heard).map(|other| &self.hosts[other]);
        let offer = |host: &Host| Offer {
            host: host.name.clone(),
            spare: host.controller.spare(),
            for_regions: host.controller.spare_for_regions(),
            for_copies: host.controller.spare_for_copies(),
            zone: None,
        };
        let lenders = others.map(offer).collect();
        let swap = self.hosts[index].volumes.values().filter(|volume| volume.owner.is_swap());
        let capacity: Bytes = swap.map(|volume| volume.bytes).sum();
        let memory = Memory {
            total: self.total,
            used: Bytes(self.total.0 * load.used / 100),
            swap_used: Bytes(capacity.0 * load.filled / 100),
            pressure: load.pressure,
        };
        self.follow_regions(index);
        self.reconcile(index);
        let host = &self.hosts[index];
        let stored =
            host.store.values().map(|l| (l.lease, Bytes(l.bytes.0 * load.filled / 100))).collect();
        self.step(index, Event::Tick { memory, stored, lenders });
        self.check_promises(index);
    }

    /// Reports each region that is gone, and each lease that its volume no longer uses, as the
    /// agent does after it looks at its volumes.
    fn reconcile(&mut self, index: usize) {
        let host = &self.hosts[index];
        let regions = host.controller.volumes().into_iter().filter(|volume| {
            !volume.owner.is_swap()
                && volume.state == VolumeState::Active
                && !host.evacuates(volume.volume)
                && !host.volumes.contains_key(&volume.volume)
                && !host.handed_over.contains_key(&volume.volume)
        });
        for region in regions.collect::<Vec<_>>() {
            self.step(index, Event::Deactivated { volume: region.volume });
        }
        let host = &self.hosts[index];
        let gone = host.controller.borrowed().into_iter().filter(|held| {
            let volume = host.volumes.get(&held.volume);
            let stands = |lease: &BorrowedLease| lease.lease == held.lease.lease;
            volume.is_some_and(|volume| !volume.leases.iter().any(stands))
                && !host.evacuates(held.volume)
        });
        let gone: Vec<_> = gone.map(|held| held.lease.lease).collect();
        for lease in gone {
            self.step(index, Event::Evacuated { lease, unused: Vec::new() });
        }
    }

    /// Lets a region ask for memory; `again` repeats the last request.
    pub fn borrow_for_region(&mut self, index: usize, extents: u64, again: bool) {
        self.regions += u128::from(!again || self.regions == 0);
        let request = RegionRequest {
            region: format!("r{}", self.regions).parse().expect("a name"),
            // Controllers choose their ids from small numbers.
            volume: VolumeId(u128::MAX - self.regions),
            bytes: Bytes::mib(64 * extents),
            least: Bytes::mib(64 * if again { 1 } else { extents }),
            group: Group::default(),
        };
        self.step(index, Event::BorrowFor(request));
    }

    /// Removes all regions of a host. Its agent finds that at its next tick.
    pub fn remove_regions(&mut self, index: usize) {
        self.hosts[index].volumes.retain(|_, volume| volume.owner.is_swap());
    }

    /// Ends a move that a crash has orphaned.
    pub fn finish_move(&mut self, index: usize, at: usize) {
        let host = &mut self.hosts[index];
        if host.moving.is_empty() {
            return;
        }
        let (volume, lease) = host.moving.remove(at % host.moving.len());
        if let Some(volume) = host.volumes.get_mut(&volume) {
            volume.leases.retain(|held| held.lease != lease);
        }
    }

    /// Checks the promises right after a reading. If all leases were full, the host would still be
    /// at or below T_upper, unless its own use is above it.
    fn check_promises(&self, index: usize) {
        let controller = &self.hosts[index].controller;
        if controller.spare() == Bytes::ZERO {
            return;
        }
        let lent = controller.lent();
        let promised = lent.iter().filter(|loan| loan.state != LoanState::Freeing);
        let promised: Bytes =
            promised.map(|loan| loan.lease.bytes.saturating_sub(loan.stored)).sum();
        let full = controller.memory().used + promised + controller.spare();
        assert!(full <= controller.memory().upper(&self.config), "{full} promised");
    }

    pub fn advance(&mut self, time: Duration) {
        self.now += time;
    }

    /// Delivers the message at `at`, and sends its acknowledgement.
    pub fn deliver(&mut self, at: usize) {
        if self.wire.is_empty() {
            return;
        }
        let Packet { to, event } = self.wire.remove(at % self.wire.len());
        if let Event::Received { from, message } = &event {
            let back =
                Event::Delivered { to: self.hosts[to].name.clone(), message: message.clone() };
            self.wire.push(Packet { to: self.index(from), event: back });
        }
        self.step(to, event);
    }

    pub fn lose(&mut self, at: usize) {
        if !self.wire.is_empty() {
            self.wire.remove(at % self.wire.len());
        }
    }

    pub fn double(&mut self, at: usize) {
        if !self.wire.is_empty() {
            self.wire.push(self.wire[at % self.wire.len()].clone());
        }
    }

    /// Ends one of the host's actions, with success or failure.
    pub fn finish_job(&mut self, index: usize, at: usize, well: bool) {
        let host = &mut self.hosts[index];
        if host.jobs.is_empty() {
            return;
        }
        let job = host.jobs.remove(at % host.jobs.len());
        let event = self.carry_out(index, job, well);
        self.step(index, event);
    }

    fn carry_out(&mut self, index: usize, job: Action, well: bool) -> Event {
        let why = "the test wants it".to_owned();
        let host = &mut self.hosts[index];
        match job {
            Action::Send { .. } => unreachable!("messages are no jobs"),
            Action::Activate(volume) if well => {
                let id = volume.volume;
                host.volumes.insert(id, volume);
                Event::Activated { volume: id }
            }
            Action::Activate(volume) => Event::ActivationFailed { volume: volume.volume, why },
            Action::Deactivate { volume } if well => {
                host.volumes.remove(&volume);
                Event::Deactivated { volume }
            }
            Action::Deactivate { volume } => Event::DeactivationFailed { volume, why },
            Action::Extend(LiveVolume { volume, leases, .. }) => {
                let known = host.volumes.get_mut(&volume).filter(|_| well);
                let (added, unused) =
                    if known.is_some() { (leases, vec![]) } else { (vec![], leases) };
                known.into_iter().for_each(|known| known.leases.extend(added.iter().cloned()));
                let unused = unused.into_iter().map(|lease| lease.lease).collect();
                Event::Extended { volume, unused }
            }
            Action::Copy { volume, of, onto } => {
                let lease = onto.lease;
                let known = host.volumes.get_mut(&volume).filter(|_| well);
                let failed = known.is_none().then_some(why);
                known.into_iter().for_each(|known| known.copies.push((of, onto.clone())));
                Event::Copied { lease, failed }
            }
            Action::Evacuate { volume, lease, onto, .. } => {
                let under_way = host.moving.contains(&(volume, lease));
                let Some(volume) = host.volumes.get_mut(&volume) else {
                    // Its region was removed meanwhile.
                    let unused = onto.into_iter().map(|lease| lease.lease).collect();
                    return Event::EvacuationFailed { lease, unused, why };
                };
                if under_way {
                    volume.leases.extend(onto);
                    Event::EvacuationFailed { lease, unused: Vec::new(), why }
                } else if well {
                    volume.leases.retain(|held| held.lease != lease);
                    volume.copies.retain(|(of, held)| *of != lease && held.lease != lease);
                    volume.leases.extend(onto);
                    Event::Evacuated { lease, unused: Vec::new() }
                } else {
                    let unused = onto.into_iter().map(|lease| lease.lease).collect();
                    Event::EvacuationFailed { lease, unused, why }
                }
            }
            Action::OpenLease(lease) if well => {
                let id = lease.lease;
                host.store.insert(id, lease);
                Event::LeaseOpened { lease: id, uris: vec!["nbd://somewhere".to_owned()] }
            }
            Action::OpenLease(lease) => Event::LeaseFailed { lease: lease.lease, why },
            Action::RecordLease(lent) if well => {
                // A removed lease has no record any more.
                if host.store.contains_key(&lent.lease) {
                    host.store.insert(lent.lease, lent.clone());
                }
                Event::LeaseRecorded(lent)
            }
            Action::RecordLease(lent) => Event::RecordFailed { lease: lent.lease, why },
            Action::FreeLease { lease } => {
                host.store.remove(&lease);
                Event::LeaseFreed { lease }
            }
        }
    }

    /// Kills the agent and restarts it. The agent's pending actions happened or not, but it has
    /// lost their results.
    pub fn crash(&mut self, index: usize, jobs_happened: bool) {
        for job in std::mem::take(&mut self.hosts[index].jobs) {
            if let (Action::Evacuate { volume, lease, onto, .. }, true) = (&job, jobs_happened) {
                let host = &mut self.hosts[index];
                let Some(live) = host.volumes.get_mut(volume) else { continue };
                live.leases.extend(onto.iter().cloned());
                if !host.moving.contains(&(*volume, *lease)) {
                    host.moving.push((*volume, *lease));
                }
            } else if jobs_happened {
                self.carry_out(index, job, true);
            }
        }
        let host = &mut self.hosts[index];
        host.starts += 1;
        let uris = vec!["nbd://elsewhere".to_owned()];
        let found = Restored {
            lent: host.store.values().map(|lease| (lease.clone(), uris.clone())).collect(),
            volumes: host.volumes.values().cloned().collect(),
            expected: host.expected.clone(),
        };
        let seed = seed(index, host.starts);
        host.controller =
            Controller::restore(host.name.clone(), self.config.clone(), seed, self.now, found);
        self.note_role(index);
        self.check();
    }

    /// Reports the connected borrowers to the lender.
    pub fn see_borrowers(&mut self, index: usize) {
        let in_use: BTreeSet<_> =
            self.hosts.iter().flat_map(Host::leases_in_use).map(|l| l.lease).collect();
        let seen: Vec<_> =
            self.hosts[index].store.keys().filter(|l| in_use.contains(l)).copied().collect();
        seen.into_iter().for_each(|lease| self.step(index, Event::BorrowerSeen { lease }));
    }

    /// Delivers all messages and completes all actions, until nothing is left to do without time
    /// passing.
    pub fn settle(&mut self) {
        loop {
            while !self.wire.is_empty() {
                self.deliver(0);
            }
            let Some(busy) =
                (0..self.hosts.len()).find(|&index| !self.hosts[index].jobs.is_empty())
            else {
                return;
            };
            self.finish_job(busy, 0, true);
        }
    }

    /// Runs one second of a healthy network.
    pub fn healthy_second(&mut self, loads: &[Load]) {
        self.advance(Duration::from_secs(1));
        for index in 0..self.hosts.len() {
            self.finish_move(index, 0);
            self.renew(index);
        }
        for (index, load) in loads.iter().enumerate() {
            self.see_borrowers(index);
            self.tick(index, *load, u8::MAX);
            self.settle();
        }
    }

    /// Returns whether no host borrows or lends, and no state of it is left.
    pub fn at_rest(&self) -> bool {
        self.hosts.iter().all(|host| {
            host.controller.role() == Role::Neutral
                && host.controller.pending_releases() == 0
                && host.store.is_empty()
                && host.volumes.is_empty()
                && host.jobs.is_empty()
        })
    }

    pub fn any_expired(&self) -> bool {
        !self.expired.is_empty()
    }

    pub fn unexpired_leases_in_use(&self) -> bool {
        let in_use = self.hosts.iter().flat_map(Host::leases_in_use);
        in_use.into_iter().any(|lease| !self.expired.contains(&lease.lease))
    }
}

impl Host {
    /// Returns whether the host is about to write down which hosts may use a lease.
    fn writes_down(&self, lease: LeaseId) -> bool {
        let of_it = |job: &Action| matches!(job, Action::RecordLease(lent) if lent.lease == lease);
        self.jobs.iter().any(of_it)
    }

    /// Returns whether the host changes the leases of a volume.
    fn evacuates(&self, volume: VolumeId) -> bool {
        let evacuated = self.jobs.iter().filter_map(|job| match job {
            Action::Extend(live) => Some(live.volume),
            Action::Evacuate { volume, .. } | Action::Copy { volume, .. } => Some(*volume),
            _ => None,
        });
        evacuated.into_iter().any(|evacuated| evacuated == volume)
    }

    /// Returns the leases of the volumes, and of those in the making.
    fn leases_in_use(&self) -> Vec<BorrowedLease> {
        let live = self.volumes.values().flat_map(|volume| &volume.leases);
        let coming = self.jobs.iter().flat_map(|job| match job {
            Action::Activate(volume) | Action::Extend(volume) => &volume.leases[..],
            Action::Evacuate { onto, .. } => &onto[..],
            _ => &[],
        });
        live.chain(coming).cloned().collect()
    }
}

fn seed(index: usize, starts: u128) -> u128 {
    ((index as u128) << 96) | (starts << 64)
}

pub fn config(grace: u64) -> Config {
    Config {
        request: Bytes::mib(512),
        max_borrowed: Bytes::gib(1),
        resend: Duration::from_secs(1),
        give_up: Duration::from_secs(4),
        grace: Duration::from_secs(grace),
        cooldown: Duration::from_secs(5),
        shareable: Shareable::Dynamic,
        ..Config::default()
    }
}
