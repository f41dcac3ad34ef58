//! `aquifer volume detach`.

use std::path::Path;
use std::process::ExitCode;

use aquifer_blockdev::nvme::Root;
use aquifer_blockdev::nvme::initiator::{self, Record};
use aquifer_blockdev::swap;
use aquifer_page::{Bytes, VolumeId};
use clap::Args;
use serde::Serialize;

use super::attach::direct_failure;
use crate::commands::Common;
use crate::failure::{Failure, Result};
use crate::manual::Manual;
use crate::output;
use crate::progress::Progress;
use crate::volumes::{Found, Owner, Volumes};

/// Detach a volume and give its memory back
///
/// Swaps its pages back into RAM, removes the device and ends its process. If the pages do not fit
/// into RAM or the device is in use, the command fails and the volume keeps serving. If the
/// volume's process was killed, the command removes what is left of it.
///
/// The same works for --direct devices.
#[derive(Debug, Args)]
pub struct Detach {
    /// Device, volume id, or URI of a --direct device
    #[arg(value_name = "DEVICE|ID|URI", required_unless_present = "all", conflicts_with = "all")]
    which: Option<String>,
    /// Detach every volume made by 'aquifer volume attach'
    #[arg(long)]
    all: bool,
    /// Detach even a volume of a running agent or 'aquifer run'
    ///
    /// Also detaches a --direct device whose lender is silent: its pages there are lost.
    #[arg(long, conflicts_with = "all")]
    force: bool,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer volume detach /dev/loop3", "Detach one device"),
        ("aquifer volume detach --all", "Detach every volume made by 'aquifer volume attach'"),
    ],
    see_also: &[
        "aquifer-volume-attach(1)",
        "aquifer-volume-list(1)",
        "aquifer-host-return(1)",
        "swapoff(8)",
    ],
    ..Manual::NONE
};

/// The answer of `aquifer volume detach`.
#[derive(Debug, Serialize)]
struct Detached {
    detached: Vec<VolumeId>,
}

impl Detach {
    /// Detaches the named volume, or all of them.
    ///
    /// # Errors
    /// If there is no such volume, if it belongs to an agent or to `aquifer run`, or if the kernel
    /// keeps it. With --all, the command fails after it has detached all others.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let volumes = Volumes::under(&common.run_dir)?;
        let direct = self.meant_directly(common)?;
        let meant = if self.which.is_some() && !direct.is_empty() {
            Vec::new()
        } else {
            self.meant(volumes.all()?)?
        };
        let mut detached = Vec::new();
        let mut failed: Option<Failure> = None;
        let mut note = |volume, result| match result {
            Ok(()) => detached.push(volume),
            Err(failure) => {
                // The command exits with the last failure, so report the others here.
                if let Some(earlier) = failed.replace(failure) {
                    earlier.report(common.json);
                }
            }
        };
        meant.into_iter().for_each(|volume| note(volume, volumes.detach(volume)));
        direct.iter().for_each(|record| note(record.id, self.detach_directly(common, record)));
        let detached = Detached { detached };
        if failed.is_none() || !detached.detached.is_empty() {
            output::answer(common.json, &detached, text)?;
        }
        failed.map_or(Ok(ExitCode::SUCCESS), Err)
    }

    /// Returns the devices attached with --direct that the command line names.
    fn meant_directly(&self, common: &Common) -> Result<Vec<Record>> {
        let mut all = Record::all(&common.run_dir)
            .map_err(|error| direct_failure("looking for attached devices", error))?;
        let is_agents = |record: &Record| Owner::of(&record.note).is_none();
        let Some(which) = &self.which else {
            all.retain(|record| !is_agents(record));
            return Ok(all);
        };
        all.retain(|record| {
            record.device.as_deref() == Some(Path::new(which))
                || record.id.to_string() == *which
                || record.uri.to_string() == *which
        });
        match all.iter().any(is_agents) && !self.force {
            true => Err(agents(which)),
            false => Ok(all),
        }
    }

    fn detach_directly(&self, common: &Common, record: &Record) -> Result<()> {
        let progress = Progress::bytes("swapping back", Bytes::ZERO);
        let off = |device: &Path| {
            swap::off(device, |now| {
                progress.set(now.total.saturating_sub(now.remaining), now.total)
            })
        };
        let detached =
            initiator::detach(&Root::default(), &common.run_dir, record.id, self.force, off);
        detached.map_err(|error| direct_failure(&format!("detaching {}", record.uri), error))
    }

    fn meant(&self, all: Vec<Found>) -> Result<Vec<VolumeId>> {
        let Some(which) = &self.which else {
            let own = all.into_iter().filter(|found| found.owner == Some(Owner::Attach));
            return Ok(own.map(|found| found.record.spec.volume).collect());
        };
        let is_meant = |found: &Found| {
            found.record.device == Path::new(which)
                || found.record.spec.volume.to_string() == *which
        };
        let what = || format!("detaching {which}");
        match all.into_iter().find(is_meant) {
            None => Err(Failure::new(what(), "there is no such volume")
                .help("'aquifer volume list' lists all")),
            Some(found) if self.force || found.owner == Some(Owner::Attach) => {
                Ok(vec![found.record.spec.volume])
            }
            Some(found) => Err(match found.owner {
                Some(Owner::Run(pid)) => {
                    Failure::new(what(), format!("'aquifer run' (process {pid}) uses it"))
                        .help("wait until that process ends, or add --force")
                }
                _ => agents(which),
            }),
        }
    }
}

fn agents(which: &str) -> Failure {
    Failure::new(format!("detaching {which}"), "it belongs to the agent")
        .help("give it back with 'aquifer host return', or add --force if the agent is gone")
}

fn text(detached: &Detached) -> String {
    match detached.detached.as_slice() {
        [] => "nothing was attached".to_owned(),
        volumes => {
            format!(
                "detached {}",
                volumes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            )
        }
    }
}
