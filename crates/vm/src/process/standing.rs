//! Whether the VMs of a host can move to another one, by their records.

use std::path::Path;
use std::time::{Duration, SystemTime};

use aquifer_control::node::Obstacle;
use aquifer_page::{Bytes, RegionName};
use aquifer_region::process::client as regions;

use super::client::{in_a_region, list};
use super::files::Files;
use super::message::{Origin, Record};
use super::supervisor_call::ANSWERING;
use crate::error::VmError;
use crate::spec::VmSpec;

/// A VM of this host, and what keeps it here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Name of the VM.
    pub name: RegionName,
    /// Why it cannot move now.
    pub obstacle: Option<Obstacle>,
    /// Time since it arrived from another host, if it did.
    pub arrived: Option<Duration>,
}

/// Returns the VMs under `run_dir` that have memory here. No process is asked.
///
/// # Errors
/// [`VmError::Io`] if the directory cannot be read.
pub fn standings(run_dir: &Path) -> Result<Vec<Standing>, VmError> {
    let present = list(run_dir)?.into_iter().filter(Files::has_memory);
    Ok(present.filter_map(|files| standing(&files)).collect())
}

fn standing(files: &Files) -> Option<Standing> {
    let name = files.name().clone();
    let record = match files.read() {
        Err(VmError::Unknown(_)) => return None,
        Err(error) => {
            let obstacle = Some(Obstacle::Silent(error.to_string()));
            return Some(Standing { name, obstacle, arrived: None });
        }
        Ok(record) => record,
    };
    let at = |ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms);
    // A clock that was set back counts as a fresh arrival.
    let arrived = record.arrived_ms.map(|ms| at(ms).elapsed().unwrap_or_default());
    Some(Standing { name, obstacle: movable(&record).err(), arrived })
}

/// Returns the specification of a VM that can move.
///
/// # Errors
/// The reason why it cannot.
pub(super) fn movable(record: &Record) -> Result<&VmSpec, Obstacle> {
    let vm = match &record.origin {
        Origin::Adopted { .. } => return Err(Obstacle::Adopted),
        origin => in_a_region(origin).ok_or(Obstacle::LocalMemory)?,
    };
    match record {
        Record { handed_over: Some(handed_over), .. } => {
            Err(Obstacle::HandedOver(handed_over.to.clone()))
        }
        Record { incoming: Some(incoming), .. } => Err(Obstacle::Arrives(incoming.from.clone())),
        Record { awaiting_source: Some(link), .. } => Err(Obstacle::AwaitsPages(link.host.clone())),
        Record { pid: None, .. } => Err(Obstacle::Starts),
        _ => Ok(vm),
    }
}

/// Returns how much of a VM's memory here is known to be dirty.
///
/// # Errors
/// The reason why the VM cannot move: the place of its memory, or its engine does not answer.
pub fn dirty(run_dir: &Path, name: &RegionName) -> Result<Bytes, Obstacle> {
    let region = Files::new(run_dir, name).region();
    let status = regions::status_within(&region, ANSWERING)
        .map_err(|error| Obstacle::Silent(error.to_string()))?;
    match status.volume.spill.map(|spill| spill.bytes()) {
        None | Some(Bytes::ZERO) => Ok(status.usage.dirty),
        Some(spilled) => Err(Obstacle::Spilled(spilled)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::net::{Ipv4Addr, SocketAddr};

    use aquifer_page::{HostName, MigrationId};

    use super::*;
    use crate::migrate::{HandedOver, Incoming, Link};
    use crate::spec::Backing;

    fn pooled() -> VmSpec {
        VmSpec::new("web".parse().unwrap(), Bytes::mib(32), Backing::Region)
    }

    /// Returns the record of a VM that runs.
    fn runs(spec: &VmSpec) -> Record {
        Record { pid: Some(7), ..Record::of(spec, None, None) }
    }

    fn obstacle(record: &Record) -> Option<Obstacle> {
        movable(record).err()
    }

    #[test]
    fn a_vm_stays_for_what_it_was_made_of() {
        assert_eq!(obstacle(&runs(&pooled())), None);
        let local = VmSpec { backing: Backing::Local { huge: None }, ..pooled() };
        assert_eq!(obstacle(&runs(&local)), Some(Obstacle::LocalMemory));
        let cached = VmSpec { cached_disks: vec!["a.img".into()], ..pooled() };
        assert_eq!(obstacle(&runs(&cached)), None);
        let adopted = Record::new(Origin::Adopted { qmp: "qmp".into(), agent: None });
        assert_eq!(obstacle(&adopted), Some(Obstacle::Adopted));
    }

    #[test]
    fn a_vm_that_starts_or_moves_does_not_move_again() {
        let (to, migration): (HostName, _) = ("b".parse().unwrap(), MigrationId::random());
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let vm = runs(&pooled());
        let starts = Record { pid: None, ..vm.clone() };
        assert_eq!(obstacle(&starts), Some(Obstacle::Starts));

        let handed_over =
            HandedOver { migration, to: to.clone(), left_at_source: None, defined: false };
        let gone = Record { handed_over: Some(handed_over), ..vm.clone() };
        assert_eq!(obstacle(&gone), Some(Obstacle::HandedOver(to.clone())));

        let incoming = Incoming {
            migration,
            from: to.clone(),
            listen: address.ip(),
            identity: "tls".into(),
            prepared: true,
            left_at_source: None,
            cpu: None,
        };
        let arrives = Record { incoming: Some(incoming), ..vm.clone() };
        assert_eq!(obstacle(&arrives), Some(Obstacle::Arrives(to.clone())));

        let link = Link { migration, host: to.clone(), address, identity: "tls".into() };
        let awaits = Record { awaiting_source: Some(link), ..vm };
        assert_eq!(obstacle(&awaits), Some(Obstacle::AwaitsPages(to)));
    }
}
