//! `aquifer volume list`.

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_blockdev::nvme::Root;
use aquifer_blockdev::nvme::initiator::Record;
use aquifer_page::{Bytes, VolumeId};
use aquifer_volume::{LeaseStatus, SpillStatus};
use clap::Args;
use serde::Serialize;

use super::attach::direct_failure;
use crate::commands::Common;
use crate::commands::region::copied;
use crate::failure::Result;
use crate::manual::Manual;
use crate::output;
use crate::table::table;
use crate::volumes::{Found, Owner, Volumes};

/// List this host's volumes, their lenders and copies
///
/// Asks the process of each volume, also of those that an agent or 'aquifer run' made. A page is
/// safe from the death of a lender if that lender's second copy is complete.
#[derive(Debug, Args)]
pub struct List {}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer volume list", "Show each volume with its lenders and second copies"),
        (
            "aquifer volume list --json | jq '.[].leases[].copy.lacks'",
            "Print how much of each second copy is missing",
        ),
    ],
    see_also: &["aquifer-volume-attach(1)", "aquifer-volume-detach(1)", "aquifer-status(1)"],
    ..Manual::NONE
};

/// A volume in the list.
#[derive(Debug, Serialize)]
struct Listed {
    volume: VolumeId,
    device: Option<PathBuf>,
    /// The driver of the device.
    backend: String,
    /// The command that made it; `None` for the agent.
    owner: Option<Owner>,
    capacity: Bytes,
    swap_used: Bytes,
    /// The lenders' leases; none if no process answers.
    leases: Vec<LeaseStatus>,
    spill: Option<SpillStatus>,
    /// Its last error, or why its process does not answer.
    last_error: Option<String>,
    /// The state of the connection of a --direct device.
    #[serde(skip_serializing_if = "Option::is_none")]
    connection: Option<String>,
}

impl Listed {
    fn served(volumes: &Volumes, found: Found) -> Self {
        let Found { record, owner } = found;
        let mut listed = Self {
            volume: record.spec.volume,
            device: Some(record.device),
            backend: record.backend.to_string(),
            owner,
            capacity: record.spec.capacity,
            swap_used: Bytes::ZERO,
            leases: Vec::new(),
            spill: None,
            last_error: None,
            connection: None,
        };
        match volumes.status(listed.volume) {
            Ok(status) => {
                listed.swap_used = status.swap_used;
                (listed.leases, listed.spill) = (status.volume.leases, status.volume.spill);
                listed.last_error = status.volume.last_error;
            }
            Err(error) => listed.last_error = Some(error.to_string()),
        }
        listed
    }

    fn direct(record: Record) -> Self {
        let state = record.state(&Root::default()).unwrap_or_else(|error| error.why);
        Self {
            volume: record.id,
            backend: record.uri.transport.initiator_module().to_owned(),
            owner: Owner::of(&record.note),
            capacity: record.capacity,
            swap_used: Bytes::ZERO,
            leases: Vec::new(),
            spill: None,
            last_error: None,
            connection: Some(format!("{}: {state}", record.uri)),
            device: record.device,
        }
    }

    fn row(&self) -> [String; 5] {
        let device = self.device.as_ref().map(|path| path.display().to_string());
        let by = match self.owner {
            Some(Owner::Attach) => "volume attach".to_owned(),
            Some(Owner::Run(pid)) => format!("run (process {pid})"),
            None => "the agent".to_owned(),
        };
        let spilled = self.spill.map_or(Bytes::ZERO, |spill| spill.bytes());
        let spilled = (spilled > Bytes::ZERO).then(|| format!("{spilled} in the local spill file"));
        let error = self.last_error.as_ref().map(|error| format!("last error: {error}"));
        let on: Vec<_> = self
            .leases
            .iter()
            .map(lease)
            .chain(self.connection.clone())
            .chain(spilled)
            .chain(error)
            .collect();
        [
            self.volume.to_string(),
            device.unwrap_or_else(|| "-".to_owned()),
            by,
            format!("{} of {}", self.swap_used, self.capacity),
            on.join("\n"),
        ]
    }
}

/// Describes a lease and its second copy.
fn lease(lease: &LeaseStatus) -> String {
    let LeaseStatus { lender, address, state, copy, .. } = lease;
    let state = match copy {
        Some(copy) if !copy.answer.0 => "does not answer".to_owned(),
        _ => state.to_string(),
    };
    let copy = copy.as_ref().map_or_else(String::new, |copy| format!("; copy at {}", copied(copy)));
    format!("{lender} at {address}: {state}{copy}")
}

fn text(all: &[Listed]) -> String {
    if all.is_empty() {
        return "no volumes: 'aquifer volume attach' attaches one".to_owned();
    }
    table(["VOLUME", "DEVICE", "MADE BY", "SWAPPED OUT", "ON"], all.iter().map(Listed::row))
}

impl List {
    /// Lists the volumes of this host.
    ///
    /// # Errors
    /// If the records of volumes cannot be read.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let volumes = Volumes::under(&common.run_dir)?;
        let direct = Record::all(&common.run_dir)
            .map_err(|error| direct_failure("listing attached devices", error))?;
        let served = volumes.all()?.into_iter().map(|found| Listed::served(&volumes, found));
        let all: Vec<_> = served.chain(direct.into_iter().map(Listed::direct)).collect();
        output::answer(common.json, &all, |all| text(all))?;
        Ok(ExitCode::SUCCESS)
    }
}
