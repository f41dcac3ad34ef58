//! The volumes of this host, and the start of one over a lender's export.

use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_blockdev::BackendKind;
use aquifer_blockdev::process::client::{self, Started};
use aquifer_blockdev::process::message::VolumeProcessStatus;
use aquifer_blockdev::process::{ProcessError, VolumeRecord, VolumeSpec};
use aquifer_page::VolumeId;
use aquifer_volume::{LeaseTarget, SecondCopy};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, OrFail, Result, is_denied};
use crate::lenders::Lenders;
use crate::progress::Progress;

/// The swap priority of attached volumes: above disks, which the kernel gives negative priorities.
pub const PRIORITY: u16 = 100;

/// The owner of a volume, as its note says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Owner {
    /// An operator, by `aquifer volume attach`.
    Attach,
    /// `aquifer run`, by its process id.
    Run(u32),
}

impl Owner {
    /// Returns the owner from a volume's note; `None` for the agent's volumes.
    pub fn of(note: &serde_json::Value) -> Option<Self> {
        Self::deserialize(note).ok()
    }
}

/// How many copies a volume without an agent has of its pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Protection {
    /// One copy: a page is lost with its lender
    #[default]
    None,
    /// Two copies, at two lenders
    Mirror,
}

/// The properties of a volume's device.
#[derive(Debug, Clone, Copy)]
pub struct Wish {
    /// The backend that makes it a block device.
    pub backend: BackendKind,
    /// Its swap priority; `None` if it is not swap.
    pub swap: Option<u16>,
    /// How long I/O waits for the lender.
    pub io_timeout: Duration,
}

/// The volumes with their files under one state directory.
#[derive(Debug)]
pub struct Volumes {
    state: PathBuf,
}

/// A volume of this host.
#[derive(Debug)]
pub struct Found {
    /// Its record.
    pub record: VolumeRecord,
    /// Its owner; `None` for the agent.
    pub owner: Option<Owner>,
}

impl Volumes {
    /// Returns the volumes under `state`.
    ///
    /// # Errors
    /// If `state` is relative and there is no working directory.
    pub fn under(state: &Path) -> Result<Self> {
        let state =
            std::path::absolute(state).or_fail(|| format!("finding {}", state.display()))?;
        Ok(Self { state })
    }

    /// Makes a volume over lenders' exports, served by a process of its own.
    ///
    /// # Errors
    /// If another volume uses an export, or if the process cannot serve.
    pub fn attach(&self, lenders: &Lenders, wish: Wish, owner: Owner) -> Result<VolumeRecord> {
        self.start(lenders, wish, owner)?.keep().or_fail(|| attaching(lenders))
    }

    /// As [`attach`](Self::attach), but the volume goes away unless the caller keeps it.
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    pub fn start(&self, lenders: &Lenders, wish: Wish, owner: Owner) -> Result<Started> {
        let what = || attaching(lenders);
        if let Some(other) = self.all()?.into_iter().find(|found| is_over(&found.record, lenders)) {
            let (id, device) = (other.record.spec.volume, other.record.device);
            let why = format!(
                "volume {id} ({}) uses it already, and two would corrupt each other's pages",
                device.display()
            );
            return Err(Failure::new(what(), why)
                .help("use another export, or 'aquifer volume detach' first"));
        }
        let spec = VolumeSpec {
            volume: VolumeId::random(),
            capacity: lenders.capacity(),
            leases: lenders.leases.clone(),
            backend: wish.backend,
            swap: wish.swap.is_some(),
            priority: wish.swap,
            io_timeout: wish.io_timeout,
            workers: VolumeSpec::DEFAULT_WORKERS,
            identity: lenders.identity.clone(),
            spill: None,
            state: self.state.clone(),
            note: serde_json::to_value(owner).or_fail(what)?,
        };
        let exe = std::env::current_exe().or_fail(what)?;
        let _progress = Progress::spinner(what());
        let started = client::start(&exe, &spec).or_fail(what)?;
        // A failure drops the new volume.
        for SecondCopy { of, lease, .. } in &lenders.copies {
            client::add_copy(&self.state, spec.volume, *of, lease.clone()).or_fail(what)?;
        }
        Ok(started)
    }

    /// Detaches a volume: swapoff, device gone, process ended. Removes the remains of a dead one.
    ///
    /// # Errors
    /// If its swapped pages do not fit into RAM, or if the device is in use. The volume serves on
    /// then.
    pub fn detach(&self, volume: VolumeId) -> Result<()> {
        let what = || format!("detaching {volume}");
        if !client::is_alive(&self.state, volume) {
            return client::clean_up(&self.state, volume).or_fail(what);
        }
        let progress = Progress::bytes("swapping back", aquifer_page::Bytes::ZERO);
        client::detach(&self.state, volume, |now| {
            progress.set(now.total.saturating_sub(now.remaining), now.total)
        })
        .or_fail(what)
    }

    /// Asks a volume's process for its status.
    ///
    /// # Errors
    /// If no process serves the volume, or it does not answer.
    pub fn status(&self, volume: VolumeId) -> Result<VolumeProcessStatus, ProcessError> {
        client::status(&self.state, volume)
    }

    /// Returns all volumes, living or dead; skips records that cannot be parsed.
    ///
    /// # Errors
    /// If the directory of records cannot be read, or if this user may not read a record.
    pub fn all(&self) -> Result<Vec<Found>> {
        let ids = client::list(&self.state).or_fail(|| "listing volumes")?;
        let mut all = Vec::new();
        for id in ids {
            match client::record(&self.state, id) {
                Ok(record) => {
                    let owner = Owner::of(&record.spec.note);
                    all.push(Found { record, owner });
                }
                Err(error) if is_denied(&error) => {
                    return Err(error).or_fail(|| format!("querying volume {id}"));
                }
                Err(_) => {}
            }
        }
        Ok(all)
    }
}

fn attaching(lenders: &Lenders) -> String {
    let uris: Vec<_> = lenders.all().map(LeaseTarget::uri).collect();
    format!("attaching {}", uris.join(" and "))
}

fn is_over(record: &VolumeRecord, lenders: &Lenders) -> bool {
    record.leases().any(|lease| lenders.all().any(|wanted| lease.is_same_place(wanted)))
}
