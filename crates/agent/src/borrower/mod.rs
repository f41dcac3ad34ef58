//! The borrowing half: volumes and regions over leases of other hosts.
//!
//! A pooled volume spans any number of leases and has a process of its own. A direct volume uses
//! one lease through the kernel's own initiator. A region's engine has its volume.
//!
//! - `copies`: begins second copies, for swap and for regions.
//! - `reach`: chooses how to reach a lease, from the lender's offer and the configuration.
//! - `direct`: volumes without a process.
//! - `regions`: regions with borrowed leases. `for_regions`: the orders about them. `hand_over`:
//!   leases on their way to a new region. `arrivals`: regions that other hosts may move here.

mod arrivals;
mod copies;
mod direct;
mod for_regions;
mod hand_over;
mod reach;
mod regions;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use aquifer_api::status::LeaseHealth;
use aquifer_api::{Problem, order, status};
use aquifer_blockdev::process::message::VolumeProcessStatus;
use aquifer_blockdev::process::{VolumeRecord, VolumeSpec, client};
use aquifer_blockdev::swap;
use aquifer_control::{BorrowedLease, Cause, LiveVolume, Owner};
use aquifer_page::{Bytes, EXTENT_SIZE, Group, HostName, LeaseId, VolumeId, lock};
use aquifer_region::process::remove_old_spill_files;
use aquifer_volume::{EncryptionMode, LeaseState, LeaseStatus, LeaseTarget};
use serde::{Deserialize, Serialize};

use self::direct::DirectVolumes;
use self::reach::{Reach, Way};
use self::regions::{Regions, RunningEngines};
pub(crate) use self::regions::{generation, is_borrowed};
use crate::config::{Attach, Config};
use crate::peers::Peers;

/// How long the maker of a region may take until the region exists with its leases.
const HAND_OVER: Duration = Duration::from_secs(60);

/// The memory that this host has borrowed. Calls block for as long as a swapoff or a move takes.
#[derive(Debug)]
pub struct Borrower {
    config: Config,
    exe: PathBuf,
    reach: Reach,
    /// The pooled volumes.
    volumes: Mutex<BTreeMap<VolumeId, VolumeRecord>>,
    direct: DirectVolumes,
    regions: Regions,
}

/// The agent's data in a volume's record, for the next agent.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    group: Group,
    cause: Cause,
}

/// A lease that a volume leaves.
#[derive(Clone, Copy, Debug)]
pub struct Leaving {
    /// The lease.
    pub lease: LeaseId,
    /// Whether pages of a region may go to its spill file.
    pub spills: bool,
    /// Whether the volume leaves it so that its pages get another key. It stays if the leases for
    /// its pages cannot be used.
    pub rotates: bool,
}

impl Borrower {
    /// Finds the volumes of the previous agent, and cleans up after dead ones.
    ///
    /// # Errors
    /// If the state directory or a volume's record cannot be read, or an unfinished direct volume
    /// cannot be detached.
    pub fn open(config: &Config, exe: PathBuf, peers: Peers) -> Result<Self, String> {
        let mut volumes = BTreeMap::new();
        let state = &config.state;
        for volume in client::list(state).map_err(|error| error.to_string())? {
            if client::is_alive(state, volume) {
                let record = client::record(state, volume).map_err(|error| error.to_string())?;
                // A volume attached by hand is not the agent's.
                if live(&record).is_some() {
                    volumes.insert(volume, record);
                }
                continue;
            }
            tracing::warn!(%volume, "the volume's process has died: removing its device and files");
            if let Err(error) = client::clean_up(state, volume) {
                tracing::error!("{error}");
            }
        }
        if let Err(error) = remove_old_spill_files(&config.borrow.spill) {
            let directory = config.borrow.spill.display();
            tracing::warn!("cannot remove old spill files in {directory}: {error}");
        }
        let borrower = Self {
            config: config.clone(),
            reach: Reach::new(config, peers),
            direct: DirectVolumes::open(state, exe.clone())?,
            regions: Regions::open(
                state.join("regions"),
                config.tls.clone(),
                Box::new(RunningEngines),
            )
            .map_err(|error| error.to_string())?,
            exe,
            volumes: Mutex::new(volumes),
        };
        borrower.reach.forget_all_but(&borrower.all_leases());
        Ok(borrower)
    }

    /// Returns the leases of all volumes and regions, and of those that may come.
    fn all_leases(&self) -> BTreeSet<LeaseId> {
        let held = self.leases_by_lender().into_values().flatten();
        held.chain(self.expected().into_values().flatten()).collect()
    }

    fn volumes(&self) -> MutexGuard<'_, BTreeMap<VolumeId, VolumeRecord>> {
        lock(&self.volumes)
    }

    /// Returns all volumes, with those of regions; at the start these are the previous agent's.
    pub fn restored(&self) -> Vec<LiveVolume> {
        let mut all: Vec<_> = self.volumes().values().filter_map(live).collect();
        for direct in self.direct.live() {
            // A volume in both lists was becoming pooled: it uses the leases of both.
            match all.iter_mut().find(|pooled| pooled.volume == direct.volume) {
                Some(pooled) => pooled.leases.extend(direct.leases),
                None => all.push(direct),
            }
        }
        all.extend(self.regions.live());
        all
    }

    /// Creates a volume and swaps to it, at `priority` or else at the configured one. For a region,
    /// waits until it has the leases.
    ///
    /// # Errors
    /// Says why the volume cannot be created; no part of the volume remains then.
    pub fn activate(&self, volume: &LiveVolume, priority: Option<u16>) -> Result<(), String> {
        let done = match volume.owner {
            Owner::Swap => self.activate_swap(volume, priority),
            Owner::Region(_) if self.regions.is_awaited(volume.volume) => {
                self.regions.wait_for(volume, HAND_OVER)
            }
            Owner::Region(ref region) => self.supply(volume, region),
        };
        if done.is_err() {
            self.reach.forget(volume.leases.iter().map(|lease| lease.lease));
        }
        done
    }

    fn activate_swap(&self, volume: &LiveVolume, priority: Option<u16>) -> Result<(), String> {
        if self.config.borrow.attach == Attach::Direct
            && let [lease] = &*volume.leases
            && let Way::Direct(uri) = self.reach.way(lease, Attach::Direct)?
        {
            let host = self.reach.host(lease)?;
            let mut config = self.config.borrow.clone();
            config.priority = priority.and_then(|it| it.try_into().ok()).unwrap_or(config.priority);
            return self.direct.attach(volume, lease, uri, host, &config);
        }
        let leases: Result<_, _> =
            volume.leases.iter().map(|lease| self.reach.target(lease)).collect();
        leases.and_then(|leases| self.serve(volume, leases, priority))
    }

    /// Starts the process of a pooled volume, with swap at `priority` or else at the configured
    /// one.
    fn serve(
        &self,
        volume: &LiveVolume,
        leases: Vec<LeaseTarget>,
        priority: Option<u16>,
    ) -> Result<(), String> {
        let (state, borrow) = (&self.config.state, &self.config.borrow);
        let note = Note { group: volume.group.clone(), cause: volume.cause };
        let spec = VolumeSpec {
            volume: volume.volume,
            capacity: volume.bytes,
            leases,
            backend: borrow.backend,
            workers: VolumeSpec::DEFAULT_WORKERS,
            swap: true,
            priority: priority.or_else(|| u16::try_from(borrow.priority).ok()),
            io_timeout: borrow.io_timeout,
            identity: Some(self.config.tls.clone()),
            spill: Some(borrow.spill.clone()),
            state: state.clone(),
            note: serde_json::to_value(note).map_err(|error| error.to_string())?,
        };
        fs::create_dir_all(&borrow.spill).map_err(|error| {
            format!("cannot create the spill directory {}: {error}", borrow.spill.display())
        })?;
        let record = client::spawn(&self.exe, &spec).map_err(|error| error.to_string())?;
        let (pid, device, backend) = (record.pid, device(&record), record.backend);
        tracing::info!(volume = %volume.volume, pid, device, %backend, "swaps to borrowed memory");
        self.volumes().insert(volume.volume, record);
        Ok(())
    }

    /// Swaps off and removes a volume; a missing volume is no error.
    ///
    /// # Errors
    /// Says why the volume is still on.
    pub fn deactivate(&self, volume: VolumeId) -> Result<(), String> {
        self.direct.detach(volume)?;
        let state = &self.config.state;
        let done = if client::is_alive(state, volume) {
            client::detach(state, volume, |_| ())
        } else if client::list(state).is_ok_and(|volumes| volumes.contains(&volume)) {
            client::clean_up(state, volume)
        } else {
            Ok(())
        };
        done.map_err(|error| error.to_string())?;
        if let Some(record) = self.volumes().remove(&volume) {
            self.reach.forget(record.leases().map(|target| target.lease));
        }
        Ok(())
    }

    /// Adds the leases `onto` to the volume, then moves all pages out of `lease` while I/O
    /// continues, or ends the second copy on it. With `spills`, pages go to the spill file if no
    /// other lease has room. A direct volume first becomes a pooled one. Returns the leases that
    /// could not be added, and the result of the move.
    pub fn evacuate(
        &self,
        volume: VolumeId,
        Leaving { lease, spills, rotates }: Leaving,
        onto: &[BorrowedLease],
    ) -> (Vec<LeaseId>, Result<(), String>) {
        if self.regions.has(volume) {
            return self.evacuate_region(volume, (lease, spills), onto);
        }
        let state = &self.config.state;
        let direct = self.direct.live().into_iter().find(|live| live.volume == volume);
        let (unused, ready) = match &direct {
            Some(direct) if !client::is_alive(state, volume) => self.become_pooled(direct, onto),
            _ => (self.add(volume, onto), Ok(())),
        };
        if rotates && !unused.is_empty() {
            self.reach.forget(unused.iter().copied());
            return (unused, Err("the lease for its pages cannot be used".to_owned()));
        }
        let moved = ready.and_then(|()| match direct {
            Some(_) => self.direct.detach(volume),
            None => {
                let moved = client::evacuate(state, volume, (lease, spills), |_| ());
                moved.map_err(|error| error.to_string())
            }
        });
        self.refresh(volume);
        // The previous agent may have begun this move, and the volume's process has finished it.
        let moved = if direct.is_none() && self.stands_on(volume, lease) == Some(false) {
            Ok(())
        } else {
            moved
        };
        self.reach.forget(unused.iter().copied().chain(moved.is_ok().then_some(lease)));
        (unused, moved)
    }

    /// Reads the record of a pooled volume again, which lists its leases.
    fn refresh(&self, volume: VolumeId) {
        if let Ok(record) = client::record(&self.config.state, volume) {
            self.volumes().insert(volume, record);
        }
    }

    /// Tells whether a pooled volume uses this lease; `None` if there is no such volume.
    fn stands_on(&self, volume: VolumeId, lease: LeaseId) -> Option<bool> {
        let volumes = self.volumes();
        let record = volumes.get(&volume)?;
        Some(record.leases().any(|target| target.lease == lease))
    }

    /// Tells whether a volume has left this lease without an order of this agent: the previous
    /// agent ordered it, and the volume's process finished later.
    pub fn has_left(&self, volume: VolumeId, lease: LeaseId) -> bool {
        if self.regions.has(volume) {
            return self.regions.has_left(volume, lease) == Some(true);
        }
        if self.direct.live().iter().any(|direct| direct.volume == volume) {
            return false;
        }
        if client::is_alive(&self.config.state, volume) {
            self.refresh(volume);
        }
        self.stands_on(volume, lease) == Some(false)
    }

    /// Adds leases to a pooled volume; returns those that could not be added.
    fn add(&self, volume: VolumeId, leases: &[BorrowedLease]) -> Vec<LeaseId> {
        let state = &self.config.state;
        let add =
            |target| client::add_lease(state, volume, target).map_err(|error| error.to_string());
        let added = |lease: &&BorrowedLease| match self.reach.target(lease).and_then(add) {
            Ok(()) => true,
            Err(error) => {
                cannot_be_used(lease.lease, &error);
                false
            }
        };
        leases.iter().filter(|lease| !added(lease)).map(|lease| lease.lease).collect()
    }

    /// Starts a pooled volume with the id of a direct one, so that swapoff can move the direct
    /// one's pages there. Returns the leases that could not be added, and whether the volume is
    /// ready.
    fn become_pooled(
        &self,
        direct: &LiveVolume,
        onto: &[BorrowedLease],
    ) -> (Vec<LeaseId>, Result<(), String>) {
        let (mut targets, mut unused) = (Vec::new(), Vec::new());
        for lease in onto {
            match self.reach.target(lease) {
                Ok(target) => targets.push(target),
                Err(error) => {
                    cannot_be_used(lease.lease, &error);
                    unused.push(lease.lease);
                }
            }
        }
        let ready = self.serve(direct, targets, self.direct.priority(direct.volume));
        if ready.is_err() {
            unused = onto.iter().map(|lease| lease.lease).collect();
        }
        let ready =
            ready.map_err(|error| format!("cannot start a volume to move the pages to: {error}"));
        (unused, ready)
    }

    /// Returns the pooled volumes without a process and the direct volumes without a connection.
    pub fn dead(&self) -> Vec<VolumeId> {
        let dead = |volume: &VolumeId| !client::is_alive(&self.config.state, *volume);
        let pooled: Vec<_> = self.volumes().keys().copied().filter(dead).collect();
        pooled.into_iter().chain(self.direct.dead()).collect()
    }

    /// Tells whether any volume is there to swap to.
    pub fn is_active(&self) -> bool {
        !self.devices().is_empty()
    }

    /// Returns the device of each volume; a volume that becomes pooled has two.
    fn devices(&self) -> Vec<(VolumeId, PathBuf)> {
        let pooled = self.volumes();
        let pooled = pooled.iter().map(|(id, record)| (*id, record.device.clone()));
        pooled.chain(self.direct.devices()).collect()
    }

    /// Returns the amount swapped out to all volumes.
    pub fn swap_used(&self) -> Bytes {
        let devices = self.devices();
        if devices.is_empty() {
            return Bytes::ZERO;
        }
        let ours = |path: &Path| devices.iter().any(|(_, device)| device == path);
        let swaps = swap::swaps().unwrap_or_default();
        swaps.iter().filter(|swap| ours(&swap.path)).map(|swap| swap.used).sum()
    }

    /// Returns how much must come back into memory if the volumes `leaving` go: the data swapped to
    /// them, less the free space of the others.
    ///
    /// # Errors
    /// If `/proc/swaps` cannot be read.
    pub fn comes_back(&self, leaving: &BTreeSet<VolumeId>) -> Result<Bytes, String> {
        let swaps = swap::swaps().map_err(|error| format!("cannot read /proc/swaps: {error}"))?;
        let (mut held, mut room) = (Bytes::ZERO, Bytes::ZERO);
        for (id, device) in self.devices() {
            match swaps.iter().find(|swap| swap.path == device) {
                Some(swap) if leaving.contains(&id) => held = held.saturating_add(swap.used),
                Some(swap) => room = room.saturating_add(swap.size.saturating_sub(swap.used)),
                None => {}
            }
        }
        Ok(held.saturating_sub(room))
    }

    /// Returns the leases of all volumes and regions, by lender.
    pub fn leases_by_lender(&self) -> BTreeMap<HostName, Vec<LeaseId>> {
        let mut lenders = self.regions.leases_by_lender();
        for target in self.volumes().values().flat_map(VolumeRecord::leases) {
            lenders.entry(target.lender.clone()).or_default().push(target.lease);
        }
        for lease in self.direct.live().into_iter().flat_map(|volume| volume.leases) {
            lenders.entry(lease.lender).or_default().push(lease.lease);
        }
        lenders
    }

    /// Returns the leases whose pages this host encrypts under keys of their own.
    pub fn own_keys(&self) -> BTreeSet<LeaseId> {
        let volumes = self.volumes();
        let of_volumes = volumes.values().flat_map(|record| &record.spec.leases);
        let own = of_volumes.filter(|target| has_own_key(target)).map(|target| target.lease);
        own.chain(self.regions.own_keys()).collect()
    }

    /// Describes a volume as the answer to an order.
    ///
    /// # Errors
    /// If the volume is gone.
    pub fn borrowed(&self, volume: VolumeId) -> Result<order::Borrowed, Problem> {
        let gone =
            || Problem { error: format!("volume {volume} was removed meanwhile"), help: None };
        let live =
            self.restored().into_iter().find(|live| live.volume == volume).ok_or_else(gone)?;
        let (_, device) =
            self.devices().into_iter().find(|(id, _)| *id == volume).ok_or_else(gone)?;
        Ok(order::Borrowed {
            volume,
            device: device.display().to_string(),
            state: self.config.state.clone(),
            leases: live.leases.iter().map(|lease| lease.lease).collect(),
            bytes: live.bytes,
        })
    }

    /// Asks every volume for its status.
    pub fn status(&self) -> Vec<status::Volume> {
        let records: Vec<_> = self.volumes().values().cloned().collect();
        let pooled = records.into_iter().map(|record| self.volume_status(&record));
        pooled.chain(self.direct.status()).collect()
    }

    /// Asks the engine of each region with borrowed leases for their state.
    pub fn regions(&self) -> Vec<status::Region> {
        self.regions.status()
    }

    fn volume_status(&self, record: &VolumeRecord) -> status::Volume {
        let mut shown = status::Volume {
            volume: record.spec.volume,
            pid: Some(record.pid),
            device: device(record),
            backend: record.backend.to_string(),
            capacity: record.spec.capacity,
            swap_used: Bytes::ZERO,
            spilled: Bytes::ZERO,
            leases: Vec::new(),
            last_error: None,
        };
        match client::status(&self.config.state, record.spec.volume) {
            Ok(status) => tell(&mut shown, status),
            Err(error) => shown.last_error = Some(error.to_string()),
        }
        shown
    }
}

/// Returns whether no other lease has the key of this one.
fn has_own_key(target: &LeaseTarget) -> bool {
    target.encryption.as_ref().is_some_and(|it| it.mode == EncryptionMode::Random)
}

fn cannot_be_used(replacement: LeaseId, error: &str) {
    tracing::warn!(lease = %replacement, "cannot use the replacement lease: {error}");
}

fn device(record: &VolumeRecord) -> String {
    record.device.display().to_string()
}

fn tell(
    shown: &mut status::Volume,
    VolumeProcessStatus { swap_used, volume, .. }: VolumeProcessStatus,
) {
    shown.swap_used = swap_used;
    shown.spilled = volume.spill.map_or(Bytes::ZERO, |spill| spill.bytes());
    shown.last_error = volume.last_error;
    shown.leases = volume.leases.into_iter().map(held).collect();
}

fn extents(count: u64) -> Bytes {
    Bytes(count * EXTENT_SIZE)
}

fn held(lease: LeaseStatus) -> status::Held {
    status::Held {
        lease: lease.lease,
        lender: lease.lender,
        capacity: extents(lease.extents),
        placed: extents(lease.used_extents),
        state: lease.state.to_string(),
        health: health(&lease.state),
        copy: lease.copy.map(|copy| status::SecondCopy {
            lease: copy.lease,
            lender: copy.lender,
            first_answers: copy.answer.0,
            answers: copy.answer.1,
            lacks: copy.lacks,
            first_lacks: copy.first_lacks,
            in_ring: copy.ring.map(|ring| ring.used),
        }),
        disk: lease.disk.map(|copy| status::DiskCopy {
            lease: copy.lease,
            lender_answers: copy.lender_answers,
            held: copy.held,
            in_ring: copy.in_ring,
            lacks: copy.lacks,
            lender_lacks: copy.lender_lacks,
            paused: copy.paused,
        }),
        key_age_s: None,
    }
}

fn health(state: &LeaseState) -> LeaseHealth {
    match state {
        LeaseState::Ok => LeaseHealth::Ok,
        LeaseState::Full => LeaseHealth::Full,
        LeaseState::Unreachable { .. } => LeaseHealth::Unreachable,
        LeaseState::Lost => LeaseHealth::Lost,
        LeaseState::Evacuating { .. } => LeaseHealth::Moving,
    }
}

/// Converts a record to the controller's form; `None` if no agent created the volume.
fn live(record: &VolumeRecord) -> Option<LiveVolume> {
    let Note { group, cause } = serde_json::from_value(record.spec.note.clone()).ok()?;
    let lease = |target: &LeaseTarget| BorrowedLease {
        lease: target.lease,
        lender: target.lender.clone(),
        bytes: target.capacity,
        uris: vec![target.uri()],
        generation: 0,
    };
    Some(LiveVolume {
        volume: record.spec.volume,
        bytes: record.spec.capacity,
        owner: Owner::Swap,
        group,
        cause,
        leases: record.spec.leases.iter().map(lease).collect(),
        copies: record.copies.iter().flatten().map(|copy| (copy.of, lease(&copy.lease))).collect(),
    })
}
