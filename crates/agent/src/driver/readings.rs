//! What the driver reads for the node in each period.

use std::io;
use std::time::{Duration, SystemTime};

use aquifer_api::status::{DiskCopy, Held, LeaseHealth, Region, SecondCopy, Volume};
use aquifer_control::Memory;
use aquifer_control::node::{CopyReading, Found, Health, LeaseReading, Readings, VolumeReading};
use aquifer_page::Bytes;

use super::Driver;
use crate::monitor::pressure::Pressure;

impl Driver {
    /// Takes the readings of one period.
    pub(super) fn read(&mut self) -> io::Result<Readings> {
        let memory = self.memory()?;
        let wanted = self.node.wanted(self.now());
        let (lender, borrower) = (&self.parts.lender, &self.parts.borrower);
        if borrower.lacks_disk_copies() {
            let borrower = borrower.clone();
            tokio::task::spawn_blocking(move || borrower.keep_disk_copies());
        }
        let found = wanted.vacated.map(|mut vacated| {
            vacated.retain(|(volume, lease)| borrower.has_left(*volume, *lease));
            let vacated = vacated.into_iter().map(|(_, lease)| lease).collect();
            let (arrived, missed) = borrower.arrived();
            let (dead, gone, moved) = (borrower.dead(), borrower.gone(), borrower.moved());
            Found { vacated, dead, gone, moved, arrived, missed }
        });
        Ok(Readings {
            memory,
            own: self.parts.own.latest(),
            stored: lender.stored_by_lease(),
            connected: wanted.connected.then(|| lender.in_use()),
            oom_kills: self.parts.source.oom_kills(),
            found,
            own_keys: borrower.own_keys(),
            ended_vms: self.ended_vms(),
        })
    }

    fn memory(&mut self) -> io::Result<Memory> {
        let reading = self.parts.source.read()?;
        let held = match self.parts.source.contains_self() {
            true => Bytes::ZERO,
            false => self.parts.lender.stored(),
        };
        Ok(Memory {
            total: reading.total,
            used: reading.used.saturating_add(held),
            swap_used: reading.swap_used.min(self.parts.borrower.swap_used()),
            pressure: self.parts.pressure.as_mut().is_some_and(Pressure::is_high),
        })
    }

    /// Returns the VMs of this host that have ended since the last call, each with the cause.
    fn ended_vms(&mut self) -> Vec<(String, String)> {
        let ended = aquifer_vm::process::ended(&self.parts.config.state, self.vms_seen);
        let ended = ended.unwrap_or_else(|error| {
            tracing::debug!("cannot list the VMs that ended: {error}");
            Vec::new()
        });
        for vm in &ended {
            let at = SystemTime::UNIX_EPOCH + Duration::from_millis(vm.at_ms);
            self.vms_seen = self.vms_seen.max(at);
        }
        ended.into_iter().map(|vm| (vm.name.to_string(), vm.cause.to_string())).collect()
    }
}

/// Converts a volume's status to the node's type.
pub(super) fn volume(volume: Volume, takes_copies: bool) -> VolumeReading {
    VolumeReading {
        volume: volume.volume,
        spilled: volume.spilled,
        last_error: volume.last_error,
        takes_copies,
        leases: volume.leases.into_iter().map(lease).collect(),
    }
}

/// Converts a region's status to the node's type.
pub(super) fn region(region: Region) -> VolumeReading {
    VolumeReading {
        volume: region.volume,
        spilled: region.spilled,
        last_error: region.last_error,
        takes_copies: true,
        leases: region.leases.into_iter().map(lease).collect(),
    }
}

fn lease(held: Held) -> LeaseReading {
    LeaseReading {
        lease: held.lease,
        lender: held.lender,
        placed: held.placed,
        health: match held.health {
            LeaseHealth::Unreachable => Health::Unreachable,
            LeaseHealth::Lost => Health::Lost,
            LeaseHealth::Ok | LeaseHealth::Full | LeaseHealth::Moving => Health::Ok,
        },
        copy: held.copy.map(second).or(held.disk.map(on_disk)),
    }
}

fn second(copy: SecondCopy) -> CopyReading {
    CopyReading {
        lease: copy.lease,
        first_answers: copy.first_answers,
        answers: copy.answers,
        lacks: copy.lacks,
        first_lacks: copy.first_lacks,
    }
}

/// Converts the copy on this host's disk, which answers while the engine does.
fn on_disk(copy: DiskCopy) -> CopyReading {
    CopyReading {
        lease: copy.lease,
        first_answers: copy.lender_answers,
        answers: true,
        lacks: copy.lacks,
        first_lacks: copy.lender_lacks,
    }
}
