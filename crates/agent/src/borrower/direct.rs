//! Volumes without a process: the kernel's own initiator attaches one lease directly.

use std::path::PathBuf;
use std::time::Duration;

use aquifer_api::status::{self, LeaseHealth};
use aquifer_blockdev::nvme::initiator::{self, HostIdentity, Options, Record, Wish};
use aquifer_blockdev::nvme::{Root, SubsystemUri};
use aquifer_blockdev::process::client;
use aquifer_blockdev::swap;
use aquifer_control::{BorrowedLease, Cause, LiveVolume, Owner};
use aquifer_page::{Bytes, Group, HostName, LeaseId, VolumeId};
use serde::{Deserialize, Serialize};

use super::reach::NvmeHost;
use crate::config::BorrowConfig;

/// The agent's direct volumes; the state directory holds their records.
#[derive(Debug)]
pub(super) struct DirectVolumes {
    root: Root,
    state: PathBuf,
    exe: PathBuf,
}

/// The agent's data in a volume's record, for the next agent.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    group: Group,
    cause: Cause,
    lease: LeaseId,
    lender: HostName,
}

/// A volume with a device in its record.
struct Volume {
    record: Record,
    note: Note,
    device: PathBuf,
}

impl DirectVolumes {
    /// Takes over the volumes of the previous agent, and detaches those that never got a device.
    pub(super) fn open(state: &std::path::Path, exe: PathBuf) -> Result<Self, String> {
        let volumes = Self { root: Root::default(), state: state.to_owned(), exe };
        for record in Record::all(state).map_err(|error| error.to_string())? {
            if record.device.is_none() && Note::deserialize(&record.note).is_ok() {
                volumes.detach(record.id)?;
            }
        }
        Ok(volumes)
    }

    fn all(&self) -> Vec<Volume> {
        let records = Record::all(&self.state).unwrap_or_else(|error| {
            tracing::error!("{error}");
            Vec::new()
        });
        let volume = |record: Record| {
            let (note, device) = (Note::deserialize(&record.note).ok()?, record.device.clone()?);
            Some(Volume { record, note, device })
        };
        records.into_iter().filter_map(volume).collect()
    }

    /// Attaches a lease and swaps to it.
    pub(super) fn attach(
        &self,
        volume: &LiveVolume,
        lease: &BorrowedLease,
        uri: SubsystemUri,
        host: NvmeHost,
        config: &BorrowConfig,
    ) -> Result<(), String> {
        let note = Note {
            group: volume.group.clone(),
            cause: volume.cause,
            lease: lease.lease,
            lender: lease.lender.clone(),
        };
        let host_identity =
            HostIdentity::find(&self.root, Some(host.name)).map_err(|error| error.to_string())?;
        let (secret, lender_secret) =
            host.access.secrets.map(|it| (it.borrower, it.lender)).unzip();
        let wish = Wish {
            id: volume.volume,
            uri,
            host: host_identity,
            options: Options {
                io_timeout: Some(whole_seconds(config.io_timeout)),
                secret,
                lender_secret,
                ..Options::default()
            },
            swap: true,
            priority: u16::try_from(config.priority).ok(),
            force: false,
            note: serde_json::to_value(note).map_err(|error| error.to_string())?,
        };
        let record =
            initiator::attach(&self.root, &self.state, &wish).map_err(|error| error.to_string())?;
        let device = record.device.unwrap_or_default();
        tracing::info!(
            volume = %record.id, device = %device.display(), uri = %record.uri,
            "swaps directly to borrowed memory"
        );
        Ok(())
    }

    /// Swaps off and detaches a volume; a missing volume is no error.
    pub(super) fn detach(&self, volume: VolumeId) -> Result<(), String> {
        let records = Record::all(&self.state).map_err(|error| error.to_string())?;
        if records.iter().all(|record| record.id != volume) {
            return Ok(());
        }
        let off = |device: &std::path::Path| client::swap_off(&self.exe, device, |_| ());
        initiator::detach(&self.root, &self.state, volume, false, off)
            .map_err(|error| error.to_string())
    }

    /// Returns the volumes in the controller's form.
    pub(super) fn live(&self) -> Vec<LiveVolume> {
        let live = |Volume { record, note, .. }: Volume| LiveVolume {
            volume: record.id,
            bytes: record.capacity,
            owner: Owner::Swap,
            group: note.group,
            cause: note.cause,
            leases: vec![BorrowedLease {
                lease: note.lease,
                lender: note.lender,
                bytes: record.capacity,
                uris: vec![record.uri.to_string()],
                generation: 0,
            }],
            copies: Vec::new(),
        };
        self.all().into_iter().map(live).collect()
    }

    /// Returns the device of each volume.
    pub(super) fn devices(&self) -> Vec<(VolumeId, PathBuf)> {
        self.all().into_iter().map(|volume| (volume.record.id, volume.device)).collect()
    }

    /// Returns the priority of the swap on a volume; `None` if the kernel does not swap to it.
    pub(super) fn priority(&self, volume: VolumeId) -> Option<u16> {
        let (_, device) = self.devices().into_iter().find(|(id, _)| *id == volume)?;
        let swap = swap::swaps().ok()?.into_iter().find(|swap| swap.path == device)?;
        swap.priority.try_into().ok()
    }

    /// Returns the volumes that have lost their connection for good, as another process removed it.
    pub(super) fn dead(&self) -> Vec<VolumeId> {
        let is_dead =
            |volume: &Volume| volume.record.state(&self.root).is_ok_and(|state| state == "gone");
        self.all().into_iter().filter(is_dead).map(|volume| volume.record.id).collect()
    }

    /// Returns the volumes for the status.
    pub(super) fn status(&self) -> Vec<status::Volume> {
        let swaps = swap::swaps().unwrap_or_default();
        let shown = |Volume { record, note, device }: Volume| {
            let swap = swaps.iter().find(|swap| swap.path == device);
            let (health, state) = match record.state(&self.root) {
                Ok(state) if state == "live" => (LeaseHealth::Ok, "ok".to_owned()),
                Ok(state) => (LeaseHealth::Unreachable, format!("unreachable ({state})")),
                Err(error) => (LeaseHealth::Unreachable, format!("unreachable ({error})")),
            };
            status::Volume {
                volume: record.id,
                pid: None,
                device: device.display().to_string(),
                backend: record.uri.transport.initiator_module().to_owned(),
                capacity: record.capacity,
                swap_used: swap.map_or(Bytes::ZERO, |swap| swap.used),
                spilled: Bytes::ZERO,
                leases: vec![status::Held {
                    lease: note.lease,
                    lender: note.lender,
                    capacity: record.capacity,
                    placed: record.capacity,
                    state,
                    health,
                    copy: None,
                    disk: None,
                    key_age_s: None,
                }],
                last_error: None,
            }
        };
        self.all().into_iter().map(shown).collect()
    }
}

/// Rounds a timeout up: the kernel takes whole seconds, at least one.
fn whole_seconds(io_timeout: Duration) -> Duration {
    Duration::from_secs(io_timeout.as_secs() + u64::from(io_timeout.subsec_nanos() > 0))
}
