//! Regions that move: those that other hosts may move here, until they are here or do not come, and
//! those that have left.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use aquifer_control::LiveVolume;
use aquifer_page::{HostName, LeaseId, RegionName, VolumeId, lock};
use aquifer_region::RegionError;
use aquifer_region::process::{Files, RegionSpec};
use aquifer_vm::process::{Cause, Files as VmFiles};

use super::{Borrower, is_borrowed};

/// How long this host may take to prepare for a region.
const PREPARING: Duration = Duration::from_secs(120);

/// The host of a region that has files here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Whereabouts {
    /// This host: the record of its VM says so.
    Here,
    /// This host, unless it is on its way here: it has no VM.
    Alone,
    /// This host or another: it may be on its way here.
    Arrives,
    /// Another host, or this one again: as long as its files are here, the VM may come back.
    Leaves,
}

/// A region's files on this host; `None` without files.
pub(super) type Found = Option<(Whereabouts, RegionSpec)>;

impl Borrower {
    /// Expects a region that another host may move here; returns its volume and its leases.
    pub fn expect_region(&self, memory: &RegionSpec) -> (VolumeId, BTreeSet<LeaseId>) {
        let leases = self.regions.expect_arrival(memory);
        (memory.volume, leases)
    }

    /// No longer expects a region.
    pub fn miss_region(&self, volume: VolumeId) {
        self.regions.miss(volume);
    }

    /// Returns a region of another host as this host uses it, with its own way to each lease that
    /// an agent borrowed.
    ///
    /// # Errors
    /// If a lender does not say how this host reaches a lease.
    pub fn for_this_host(&self, mut memory: RegionSpec) -> Result<RegionSpec, String> {
        let name = format!("region '{}' of host {}", memory.name, self.config.host);
        for target in memory.leases.iter_mut().filter(|target| is_borrowed(target)) {
            self.reach.take_on(target)?;
            target.claim.iter_mut().for_each(|claim| claim.name.clone_from(&name));
        }
        Ok(memory)
    }

    /// Returns the leases of regions that may come from other hosts, by volume.
    pub fn expected(&self) -> BTreeMap<VolumeId, BTreeSet<LeaseId>> {
        self.regions.expected()
    }

    /// Returns the regions that have come to this host, and the volumes of those that do not come.
    pub fn arrived(&self) -> (Vec<LiveVolume>, Vec<VolumeId>) {
        self.regions.arrived()
    }

    /// Returns the volumes of regions that are on other hosts now, each with the host.
    pub fn moved(&self) -> Vec<(VolumeId, HostName)> {
        self.regions.moved()
    }

    /// Returns the generations of leases that have moved to this host with their regions.
    pub fn generations(&self) -> BTreeMap<LeaseId, u32> {
        self.regions.generations()
    }
}

/// Returns the host of a region, by the records of the region and its VM.
pub(super) fn whereabouts(files: &Files) -> Whereabouts {
    let vm = files.run_dir().map(|run_dir| VmFiles::new(run_dir, files.name()));
    let is = |test: fn(&VmFiles) -> bool| vm.as_ref().is_some_and(test);
    match () {
        () if is(VmFiles::leaves) => Whereabouts::Leaves,
        () if is(VmFiles::arrives) || files.is_foreign() => Whereabouts::Arrives,
        () if is(VmFiles::is_settled) => Whereabouts::Here,
        () => Whereabouts::Alone,
    }
}

/// Returns the host to which the last VM of a region's name has moved, if that is how it ended.
pub(super) fn ended_in_a_move(files: &Files) -> Option<HostName> {
    let ended = aquifer_vm::process::ended(files.run_dir()?, SystemTime::UNIX_EPOCH).ok()?;
    match ended.into_iter().rfind(|ended| ended.name == *files.name())?.cause {
        Cause::Moved { to } => Some(to),
        _ => None,
    }
}

/// A region that another host may move here.
#[derive(Clone, Debug)]
struct Expected {
    region: RegionName,
    leases: BTreeSet<LeaseId>,
    since: Instant,
    /// Whether its record has been here.
    seen: bool,
}

/// The regions that other hosts may move here.
#[derive(Debug, Default)]
pub(super) struct Arrivals(Mutex<BTreeMap<VolumeId, Expected>>);

impl Arrivals {
    /// Expects a region.
    pub(super) fn expect(&self, spec: &RegionSpec, leases: BTreeSet<LeaseId>) {
        let region = spec.name.clone();
        let expected = Expected { region, leases, since: Instant::now(), seen: false };
        lock(&self.0).insert(spec.volume, expected);
    }

    /// No longer expects a region.
    pub(super) fn forget(&self, volume: VolumeId) {
        lock(&self.0).remove(&volume);
    }

    /// Returns the leases of these regions, by volume.
    pub(super) fn leases(&self) -> BTreeMap<VolumeId, BTreeSet<LeaseId>> {
        let expected = lock(&self.0);
        expected.iter().map(|(volume, it)| (*volume, it.leases.clone())).collect()
    }

    /// Looks for each region with `read`. Returns and forgets those that are here, and the volumes
    /// of those that do not come.
    pub(super) fn look(
        &self,
        read: impl Fn(&RegionName, VolumeId) -> Result<Found, RegionError>,
    ) -> (Vec<RegionSpec>, Vec<VolumeId>) {
        let (mut here, mut missed) = (Vec::new(), Vec::new());
        lock(&self.0).retain(|volume, it| match read(&it.region, *volume) {
            Ok(Some((Whereabouts::Here, spec))) => {
                here.push(spec);
                false
            }
            // Only a record proves that it is here: the files of one that fails go one by one.
            Ok(Some(_)) => {
                it.seen = true;
                true
            }
            Ok(None) if !it.seen && it.since.elapsed() < PREPARING => true,
            Ok(None) => {
                missed.push(*volume);
                false
            }
            Err(error) => {
                tracing::debug!(region = %it.region, "cannot tell whether it has come: {error}");
                true
            }
        });
        (here, missed)
    }
}
