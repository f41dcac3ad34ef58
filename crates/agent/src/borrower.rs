//! The borrowing half: volumes over leases of others, each served by a process of its own.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use aquifer_api::{Problem, order, status};
use aquifer_control::{BorrowedLease, Cause, LiveVolume};
use aquifer_device::process::message::Status;
use aquifer_device::process::{VolumeRecord, VolumeSpec, client};
use aquifer_device::swap;
use aquifer_page::{Bytes, EXTENT_SIZE, Group, HostName, LeaseId, VolumeId};
use aquifer_pool::{LeaseState, LeaseStatus, LeaseTarget, Protocol};
use serde::{Deserialize, Serialize};

use crate::config::Config;

/// What this host has borrowed. Its calls take as long as swapping off or moving takes.
#[derive(Debug)]
pub struct Borrower {
    config: Config,
    exe: PathBuf,
    volumes: Mutex<BTreeMap<VolumeId, VolumeRecord>>,
}

/// What is kept with a volume for the agent after this one.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    group: Group,
    cause: Cause,
}

impl Borrower {
    /// Finds the volumes that an agent before this one left, and removes what is left of dead ones.
    ///
    /// # Errors
    /// If the state directory or a volume's record cannot be read.
    pub fn open(config: &Config, exe: PathBuf) -> Result<Self, String> {
        let mut volumes = BTreeMap::new();
        let state = &config.state;
        for volume in client::list(state).map_err(|error| error.to_string())? {
            if client::is_alive(state, volume) {
                let record = client::record(state, volume).map_err(|error| error.to_string())?;
                // One that was attached by hand is nobody's business here.
                if live(&record).is_some() {
                    volumes.insert(volume, record);
                }
                continue;
            }
            tracing::warn!(%volume, "the process of a volume had died: removing what is left of it");
            if let Err(error) = client::clean_up(state, volume) {
                tracing::error!("{error}");
            }
        }
        Ok(Self { config: config.clone(), exe, volumes: Mutex::new(volumes) })
    }

    fn volumes(&self) -> MutexGuard<'_, BTreeMap<VolumeId, VolumeRecord>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The volumes that an agent before this one left.
    pub fn restored(&self) -> Vec<LiveVolume> {
        self.volumes().values().filter_map(live).collect()
    }

    /// Makes a volume and swaps to it.
    ///
    /// # Errors
    /// Why it cannot be made; nothing is left of it then.
    pub fn activate(&self, volume: &LiveVolume) -> Result<(), String> {
        let (state, borrow) = (&self.config.state, &self.config.borrow);
        let note = Note { group: volume.group.clone(), cause: volume.cause };
        let spec = VolumeSpec {
            volume: volume.volume,
            capacity: volume.bytes,
            leases: volume.leases.iter().map(target).collect::<Result<_, _>>()?,
            backend: borrow.backend,
            workers: VolumeSpec::DEFAULT_WORKERS,
            swap: true,
            priority: u16::try_from(borrow.priority).ok(),
            patience: borrow.patience,
            identity: Some(self.config.tls.clone()),
            spill: Some(borrow.spill.clone()),
            state: state.clone(),
            note: serde_json::to_value(note).map_err(|error| error.to_string())?,
        };
        fs::create_dir_all(&borrow.spill).map_err(|error| {
            format!("cannot make the spill directory {}: {error}", borrow.spill.display())
        })?;
        let record = client::spawn(&self.exe, &spec).map_err(|error| error.to_string())?;
        let (pid, device, backend) = (record.pid, device(&record), record.backend);
        tracing::info!(volume = %volume.volume, pid, device, %backend, "swaps to borrowed memory");
        self.volumes().insert(volume.volume, record);
        Ok(())
    }

    /// Swaps off and removes a volume. One that is gone already is no error.
    ///
    /// # Errors
    /// Why it is still on.
    pub fn deactivate(&self, volume: VolumeId) -> Result<(), String> {
        let state = &self.config.state;
        let done = if client::is_alive(state, volume) {
            client::detach(state, volume, |_| ())
        } else if client::list(state).is_ok_and(|volumes| volumes.contains(&volume)) {
            client::clean_up(state, volume)
        } else {
            Ok(())
        };
        done.map_err(|error| error.to_string())?;
        self.volumes().remove(&volume);
        Ok(())
    }

    /// Adds the leases `onto` to the volume, then moves all that is in `lease` elsewhere while I/O goes on. Answers which
    /// leases could not be added, and what became of the move.
    pub fn evacuate(
        &self,
        volume: VolumeId,
        lease: LeaseId,
        onto: &[BorrowedLease],
    ) -> (Vec<LeaseId>, Result<(), String>) {
        let state = &self.config.state;
        let mut unused = Vec::new();
        for new in onto {
            let add = |target| client::add_lease(state, volume, target).map_err(|error| error.to_string());
            if let Err(error) = target(new).and_then(add) {
                tracing::warn!(lease = %new.lease, "a replacement cannot be used: {error}");
                unused.push(new.lease);
            }
        }
        let moved = client::evacuate(state, volume, lease, |_| ()).map_err(|error| error.to_string());
        if let Ok(record) = client::record(state, volume) {
            self.volumes().insert(volume, record);
        }
        (unused, moved)
    }

    /// The volumes whose processes have died.
    pub fn dead(&self) -> Vec<VolumeId> {
        let dead = |volume: &VolumeId| !client::is_alive(&self.config.state, *volume);
        self.volumes().keys().copied().filter(dead).collect()
    }

    /// Whether there is a volume to swap to.
    pub fn is_active(&self) -> bool {
        !self.volumes().is_empty()
    }

    /// What the swap on all volumes holds.
    pub fn swap_used(&self) -> Bytes {
        let volumes = self.volumes();
        if volumes.is_empty() {
            return Bytes::ZERO;
        }
        let ours = |path: &Path| volumes.values().any(|record| record.device == path);
        let swaps = swap::swaps().unwrap_or_default();
        swaps.iter().filter(|swap| ours(&swap.path)).map(|swap| swap.used).sum()
    }

    /// What would have to come back into memory if this volume went: what is swapped to it, less what the other volumes
    /// have room for.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn comes_back(&self, volume: VolumeId) -> Result<Bytes, String> {
        let swaps = swap::swaps().map_err(|error| format!("cannot read /proc/swaps: {error}"))?;
        let (mut held, mut room) = (Bytes::ZERO, Bytes::ZERO);
        for (id, record) in &*self.volumes() {
            match swaps.iter().find(|swap| swap.path == record.device) {
                Some(swap) if *id == volume => held = swap.used,
                Some(swap) => room = room.saturating_add(swap.size.saturating_sub(swap.used)),
                None => {}
            }
        }
        Ok(held.saturating_sub(room))
    }

    /// Whose leases the volumes stand on.
    pub fn leases_by_lender(&self) -> BTreeMap<HostName, Vec<LeaseId>> {
        let mut lenders: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for target in self.volumes().values().flat_map(|record| &record.spec.leases) {
            lenders.entry(target.lender.clone()).or_default().push(target.lease);
        }
        lenders
    }

    /// A volume as the answer to an order.
    ///
    /// # Errors
    /// It is gone.
    pub fn borrowed(&self, volume: VolumeId) -> Result<order::Borrowed, Problem> {
        let volumes = self.volumes();
        let gone = || Problem { error: format!("volume {volume} is gone again"), help: None };
        let record = volumes.get(&volume).ok_or_else(gone)?;
        Ok(order::Borrowed {
            volume,
            device: device(record),
            leases: record.spec.leases.iter().map(|target| target.lease).collect(),
            bytes: record.spec.capacity,
        })
    }

    /// Asks every volume how it is.
    pub fn status(&self) -> Vec<status::Volume> {
        let records: Vec<_> = self.volumes().values().cloned().collect();
        records.into_iter().map(|record| self.volume_status(&record)).collect()
    }

    fn volume_status(&self, record: &VolumeRecord) -> status::Volume {
        let mut shown = status::Volume {
            volume: record.spec.volume,
            pid: record.pid,
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

fn device(record: &VolumeRecord) -> String {
    record.device.display().to_string()
}

fn tell(shown: &mut status::Volume, Status { swap_used, volume, .. }: Status) {
    let extents = |count: u64| Bytes(count * EXTENT_SIZE);
    shown.swap_used = swap_used;
    shown.spilled = volume.spill.map_or(Bytes::ZERO, |spill| extents(spill.used_extents));
    shown.last_error = volume.last_error;
    let held = |lease: LeaseStatus| status::Held {
        lease: lease.lease,
        lender: lease.lender,
        capacity: extents(lease.extents),
        placed: extents(lease.used_extents),
        state: state(&lease.state),
    };
    shown.leases = volume.leases.into_iter().map(held).collect();
}

fn state(state: &LeaseState) -> String {
    match state {
        LeaseState::Ok => "ok".to_owned(),
        LeaseState::Full => "its lender is full".to_owned(),
        LeaseState::Unreachable { for_ms } => format!("unreachable for {:.1} s", *for_ms as f64 / 1000.0),
        LeaseState::Evacuating { moved, total } => format!("moving, {moved} of {total} extents done"),
    }
}

/// Where the pages of a lease are. The address is the lender's word; who answers there must prove to be the lender.
fn target(lease: &BorrowedLease) -> Result<LeaseTarget, String> {
    Ok(LeaseTarget {
        lease: lease.lease,
        lender: lease.lender.clone(),
        address: lease
            .address
            .parse()
            .map_err(|error| format!("{} gave a bad address: {error}", lease.lender))?,
        protocol: Protocol::Nbd { export: lease.lease.to_string(), secure: true },
        capacity: lease.bytes,
    })
}

/// A volume as the controller knows it; `None` for one that is not the agent's.
fn live(record: &VolumeRecord) -> Option<LiveVolume> {
    let Note { group, cause } = serde_json::from_value(record.spec.note.clone()).ok()?;
    let lease = |target: &LeaseTarget| BorrowedLease {
        lease: target.lease,
        lender: target.lender.clone(),
        bytes: target.capacity,
        address: target.address.to_string(),
    };
    Some(LiveVolume {
        volume: record.spec.volume,
        bytes: record.spec.capacity,
        group,
        cause,
        leases: record.spec.leases.iter().map(lease).collect(),
    })
}
