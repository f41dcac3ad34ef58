//! The regions of this host with leases that its agent borrowed for them.
//!
//! A region's record lists its leases, so the next agent finds them there. A region is gone when
//! its record is, or when the record is that of another region.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use aquifer_api::status;
use aquifer_control::{BorrowedLease, Cause, LiveVolume, Owner};
use aquifer_page::{Bytes, HostName, LeaseId, RegionName, VolumeId, lock};
use aquifer_region::RegionError;
use aquifer_region::process::{Files, RegionSpec, client};
use aquifer_volume::{Claim, LeaseTarget, SecondCopy};

use super::arrivals::{Arrivals, Whereabouts, ended_in_a_move, whereabouts};
use super::hand_over::{HandOvers, Outcome};
use super::{has_own_key, held};

#[cfg(test)]
mod tests;

/// How long a region's engine may take to tell its state.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The changes of a region's leases while its engine runs.
pub(super) trait Engines: fmt::Debug + Send + Sync {
    /// Adds a lease to the region. `identity` is the directory of the host's certificate.
    fn add_lease(
        &self,
        files: &Files,
        lease: LeaseTarget,
        identity: &Path,
    ) -> Result<(), RegionError>;

    /// Begins a second copy of a lease.
    fn add_copy(&self, files: &Files, copy: SecondCopy) -> Result<(), RegionError>;

    /// Keeps second copies of the region's pages in files in this directory.
    fn keep_disk_copies(&self, files: &Files, directory: &Path) -> Result<(), RegionError>;

    /// Moves all pages out of a lease; the region then no longer has it. Pages without other room
    /// go to a spill file in the directory `spill`.
    fn evacuate(
        &self,
        files: &Files,
        lease: LeaseId,
        spill: Option<&Path>,
    ) -> Result<(), RegionError>;
}

/// The engines of this host's regions.
#[derive(Debug)]
pub(super) struct RunningEngines;

impl Engines for RunningEngines {
    fn add_lease(
        &self,
        files: &Files,
        lease: LeaseTarget,
        identity: &Path,
    ) -> Result<(), RegionError> {
        client::add_lease(files, lease, Some(identity))
    }

    fn add_copy(&self, files: &Files, copy: SecondCopy) -> Result<(), RegionError> {
        client::add_copy(files, copy)
    }

    fn keep_disk_copies(&self, files: &Files, directory: &Path) -> Result<(), RegionError> {
        client::keep_disk_copies(files, directory)
    }

    fn evacuate(
        &self,
        files: &Files,
        lease: LeaseId,
        spill: Option<&Path>,
    ) -> Result<(), RegionError> {
        client::evacuate(files, lease, spill, |_| ())
    }
}

/// The regions with leases that this host's agent borrowed.
#[derive(Debug)]
pub(super) struct Regions {
    directory: PathBuf,
    /// The directory of the host's certificate.
    identity: PathBuf,
    engines: Box<dyn Engines>,
    known: Mutex<BTreeMap<VolumeId, RegionSpec>>,
    /// Why regions keep no copies on the disk, as told last. `None` while a thread orders that.
    no_disk_copies: Mutex<Option<BTreeMap<VolumeId, String>>>,
    hand_overs: HandOvers,
    arrivals: Arrivals,
}

/// Returns whether an agent borrowed this lease. Only agents claim a lease under its own id.
pub(crate) fn is_borrowed(target: &LeaseTarget) -> bool {
    let own = |claim: &Claim| claim.owner.0 == target.lease.0;
    target.claim.as_ref().is_some_and(own)
}

/// Returns the leases of a region that an agent borrowed, those that hold second copies last.
fn borrowed(spec: &RegionSpec) -> impl Iterator<Item = &LeaseTarget> {
    let copies = spec.copies.iter().map(|copy| &copy.lease);
    spec.leases.iter().chain(copies).filter(|target| is_borrowed(target))
}

fn leases_of(spec: &RegionSpec) -> BTreeSet<LeaseId> {
    borrowed(spec).map(|target| target.lease).collect()
}

/// Returns how often a lease has moved with its region.
pub(crate) fn generation(target: &LeaseTarget) -> u32 {
    target.claim.as_ref().map_or(0, |claim| claim.generation)
}

impl Regions {
    /// Finds the regions in `directory` that hold borrowed leases.
    pub(super) fn open(
        directory: PathBuf,
        identity: PathBuf,
        engines: Box<dyn Engines>,
    ) -> Result<Self, RegionError> {
        let (mut known, arrivals) = (BTreeMap::new(), Arrivals::default());
        for files in client::list(&directory)? {
            match client::record(&files) {
                Ok(spec) if is_known(&spec) => match whereabouts(&files) {
                    Whereabouts::Arrives => arrivals.expect(&spec, leases_of(&spec)),
                    _ => drop(known.insert(spec.volume, spec)),
                },
                // It was removed meanwhile, or lenders were named by hand.
                Ok(_) | Err(RegionError::Unknown(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let hand_overs = HandOvers::default();
        let no_disk_copies = Mutex::new(Some(BTreeMap::new()));
        let known = Mutex::new(known);
        Ok(Self { directory, identity, engines, known, no_disk_copies, hand_overs, arrivals })
    }

    /// Returns the directory of the regions' files.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    fn files(&self, region: &RegionName) -> Files {
        Files::new(&self.directory, region)
    }

    /// Returns the regions in the controller's form.
    pub(super) fn live(&self) -> Vec<LiveVolume> {
        lock(&self.known).values().map(live).collect()
    }

    /// Tells whether this is the volume of a region.
    pub(super) fn has(&self, volume: VolumeId) -> bool {
        lock(&self.known).contains_key(&volume)
    }

    /// Reads the region's record; `None` if the region is gone.
    fn read(
        &self,
        region: &RegionName,
        volume: VolumeId,
    ) -> Result<Option<RegionSpec>, RegionError> {
        match client::record(&self.files(region)) {
            Ok(spec) => Ok(Some(spec).filter(|spec| spec.volume == volume)),
            Err(RegionError::Unknown(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads the region's record again, and keeps it.
    fn refresh(&self, volume: VolumeId) -> Option<RegionSpec> {
        let name = lock(&self.known).get(&volume)?.name.clone();
        match self.read(&name, volume) {
            Ok(spec) => {
                let spec = spec?;
                lock(&self.known).insert(volume, spec.clone());
                Some(spec)
            }
            Err(error) => {
                tracing::debug!(region = %name, "cannot read which leases a region has: {error}");
                None
            }
        }
    }

    /// Tells whether a region has left this lease; `None` if there is no such region, or its record
    /// cannot be read.
    pub(super) fn has_left(&self, volume: VolumeId, lease: LeaseId) -> Option<bool> {
        let spec = self.refresh(volume)?;
        Some(!has(&spec, lease))
    }

    /// Returns the volumes of regions that are gone.
    pub(super) fn gone(&self) -> Vec<VolumeId> {
        self.gone_regions().into_iter().map(|(volume, _)| volume).collect()
    }

    fn gone_regions(&self) -> Vec<(VolumeId, RegionName)> {
        let known: Vec<_> =
            lock(&self.known).iter().map(|(volume, spec)| (*volume, spec.name.clone())).collect();
        let is_gone =
            |(volume, name): &(VolumeId, RegionName)| matches!(self.read(name, *volume), Ok(None));
        known.into_iter().filter(is_gone).collect()
    }

    /// Expects a region that another host may move here; returns its borrowed leases.
    pub(super) fn expect_arrival(&self, spec: &RegionSpec) -> BTreeSet<LeaseId> {
        let leases = leases_of(spec);
        if !leases.is_empty() {
            self.arrivals.expect(spec, leases.clone());
        }
        leases
    }

    /// No longer expects a region.
    pub(super) fn miss(&self, volume: VolumeId) {
        self.arrivals.forget(volume);
    }

    /// Returns the leases of regions that may come, by volume.
    pub(super) fn expected(&self) -> BTreeMap<VolumeId, BTreeSet<LeaseId>> {
        self.arrivals.leases()
    }

    /// Returns the regions that have come, and the volumes of those that do not come.
    pub(super) fn arrived(&self) -> (Vec<LiveVolume>, Vec<VolumeId>) {
        let (here, missed) = self.arrivals.look(|region, volume| {
            let files = self.files(region);
            Ok(self.read(region, volume)?.map(|spec| (whereabouts(&files), spec)))
        });
        let arrived = here.iter().map(live).collect();
        lock(&self.known).extend(here.into_iter().map(|spec| (spec.volume, spec)));
        (arrived, missed)
    }

    /// Returns the volumes of regions that are on other hosts now. While its files are here, a VM
    /// may come back: the other host may not have got it.
    pub(super) fn moved(&self) -> Vec<(VolumeId, HostName)> {
        let gone = self.gone_regions().into_iter();
        gone.filter_map(|(volume, name)| Some((volume, ended_in_a_move(&self.files(&name))?)))
            .collect()
    }

    /// Returns the generations of leases that have moved here with their regions.
    pub(super) fn generations(&self) -> BTreeMap<LeaseId, u32> {
        let known = lock(&self.known);
        let leases = known.values().flat_map(borrowed);
        let generations = leases.map(|target| (target.lease, generation(target)));
        generations.filter(|(_, generation)| *generation > 0).collect()
    }

    /// Forgets the regions for which this host holds no lease. One with a spill file stays until it
    /// is gone, and the controller has heard so.
    pub(super) fn keep(
        &self,
        is_held: impl Fn(VolumeId) -> bool,
        is_known: impl Fn(VolumeId) -> bool,
    ) {
        let exists = |spec: &RegionSpec| !matches!(self.read(&spec.name, spec.volume), Ok(None));
        lock(&self.known).retain(|volume, spec| {
            let spills = spec.spill.is_some();
            is_held(*volume) || (spills && (is_known(*volume) || exists(spec)))
        });
    }

    /// Begins to hand leases over to a region in the making. If the region exists, no maker waits
    /// for them, and this agent [supplies](Self::supply) it.
    pub(super) fn expect(&self, region: &RegionName, volume: VolumeId) {
        if !matches!(self.read(region, volume), Ok(Some(_))) {
            self.hand_overs.begin(volume);
        }
    }

    /// Returns whether a region's maker waits for leases.
    pub(super) fn is_awaited(&self, volume: VolumeId) -> bool {
        self.hand_overs.is_open(volume)
    }

    /// Adds its first leases to a region that exists. It gets all of them or none.
    ///
    /// # Errors
    /// Says why the region does not use them.
    pub(super) fn supply(
        &self,
        region: &RegionName,
        volume: VolumeId,
        targets: Vec<LeaseTarget>,
    ) -> Result<(), String> {
        let files = self.files(region);
        let leases: Vec<_> = targets.iter().map(|target| target.lease).collect();
        let mut targets = targets.into_iter();
        let added =
            targets.try_for_each(|target| self.engines.add_lease(&files, target, &self.identity));
        if let Err(error) = &added {
            tracing::warn!(%region, "a lease cannot be used: {error}");
            for lease in leases {
                // A region that lacks the lease counts as moved off it.
                if let Err(error) = self.engines.evacuate(&files, lease, None) {
                    tracing::warn!(%region, %lease, "the region keeps a lease: {error}");
                }
            }
        }
        // The record decides: an engine that died may have added a lease without an answer.
        self.take(region, volume)?;
        let has_some = lock(&self.known).get(&volume).is_some_and(|spec| !spec.leases.is_empty());
        match added {
            Err(error) if !has_some => {
                lock(&self.known).remove(&volume);
                Err(error.to_string())
            }
            _ => Ok(()),
        }
    }

    /// Ends a hand-over: nobody receives the leases.
    pub(super) fn refuse(&self, volume: VolumeId) {
        let why = "its maker did not receive the leases".to_owned();
        self.hand_overs.end(volume, Outcome::Refused(why));
    }

    /// Waits until the region of these leases exists.
    ///
    /// # Errors
    /// Says why the region does not use them.
    pub(super) fn wait_for(&self, live: &LiveVolume, timeout: Duration) -> Result<(), String> {
        let Some(region) = live.owner.region() else { return Ok(()) };
        match self.hand_overs.wait(live.volume, timeout) {
            Some(Outcome::Taken) => Ok(()),
            Some(Outcome::Refused(why)) => Err(why),
            None => self
                .take(region, live.volume)
                .map_err(|why| format!("it does not exist after {timeout:?}: {why}")),
        }
    }

    /// Takes note of a new region.
    fn take(&self, region: &RegionName, volume: VolumeId) -> Result<(), String> {
        let spec = self.read(region, volume).map_err(|error| error.to_string())?;
        let spec =
            spec.ok_or_else(|| format!("{} has no record of it", self.directory.display()))?;
        lock(&self.known).insert(volume, spec);
        Ok(())
    }

    /// Ends a hand-over: the region exists, or will not. Returns whether this agent still held the
    /// leases for it.
    ///
    /// # Errors
    /// Says why this agent does not find the region.
    pub(super) fn settle(
        &self,
        region: &RegionName,
        volume: VolumeId,
        exists: bool,
    ) -> Result<bool, String> {
        if !self.hand_overs.is_open(volume) {
            return Ok(self.has(volume));
        }
        // The record decides: a maker may fail after it made the region, and fail to remove it.
        let taken = self.take(region, volume);
        let outcome = match &taken {
            Ok(()) => Outcome::Taken,
            Err(_) if !exists => Outcome::Refused("its maker does not make it".to_owned()),
            Err(why) => Outcome::Refused(why.clone()),
        };
        let in_time = self.hand_overs.end(volume, outcome);
        match exists {
            true => taken.map(|()| in_time),
            false => Ok(true),
        }
    }

    /// Adds more leases to a region. Returns those that it does not have then.
    pub(super) fn extend(
        &self,
        volume: VolumeId,
        leases: Vec<(LeaseId, Result<LeaseTarget, String>)>,
    ) -> Vec<LeaseId> {
        let name = lock(&self.known).get(&volume).map(|spec| spec.name.clone());
        let Some(name) = name else { return leases.into_iter().map(|(lease, _)| lease).collect() };
        let files = self.files(&name);
        let mut unused = self.add(&files, leases);
        // The engine may have added a lease without an answer.
        unused.retain(|lease| {
            let evacuated = self.engines.evacuate(&files, *lease, None);
            evacuated.is_ok() || self.has_left(volume, *lease) != Some(false)
        });
        self.refresh(volume);
        unused
    }

    /// Begins a second copy of a lease of a region.
    ///
    /// # Errors
    /// Says why the lease does not hold one. The region then does not have the lease.
    pub(super) fn add_copy(&self, volume: VolumeId, copy: SecondCopy) -> Result<(), String> {
        let name = lock(&self.known).get(&volume).map(|spec| spec.name.clone());
        let name = name.ok_or_else(|| format!("the region of volume {volume} is gone"))?;
        let (files, lease) = (self.files(&name), copy.lease.lease);
        let added = self.engines.add_copy(&files, copy).map_err(|error| error.to_string());
        // The engine may have begun it without an answer.
        if added.is_err() && self.has_left(volume, lease) == Some(false) {
            let evacuated = self.engines.evacuate(&files, lease, None);
            if let Err(error) = evacuated
                && self.has_left(volume, lease) == Some(false)
            {
                tracing::warn!(region = %name, %lease, "the region keeps a copy: {error}");
                return Ok(());
            }
        }
        self.refresh(volume);
        added
    }

    /// Returns whether a region with borrowed leases that wants copies on this host's disk keeps
    /// none, and no thread sees to that.
    pub(super) fn lacks_disk_copies(&self, wants: impl Fn(&RegionSpec) -> bool) -> bool {
        let lacks = |spec: &RegionSpec| {
            spec.disk.is_none() && borrowed(spec).next().is_some() && wants(spec)
        };
        lock(&self.no_disk_copies).is_some() && lock(&self.known).values().any(lacks)
    }

    /// Orders each region with borrowed leases that wants it to keep copies of its pages in files
    /// in this directory. The caller repeats this for those that cannot yet.
    pub(super) fn keep_disk_copies(&self, directory: &Path, wants: impl Fn(&RegionSpec) -> bool) {
        let Some(mut told) = lock(&self.no_disk_copies).take() else { return };
        let known: Vec<_> = lock(&self.known).values().cloned().collect();
        for spec in known {
            if spec.disk.is_some() || borrowed(&spec).next().is_none() || !wants(&spec) {
                continue;
            }
            let kept = self.engines.keep_disk_copies(&self.files(&spec.name), directory);
            let why = kept.err().map(|error| error.to_string());
            if let Some(why) = why.clone().filter(|why| told.get(&spec.volume) != Some(why)) {
                tracing::warn!(region = %spec.name, "no copies of its pages on the disk: {why}");
            }
            match why {
                Some(why) => _ = told.insert(spec.volume, why),
                None => _ = told.remove(&spec.volume),
            }
            self.refresh(spec.volume);
        }
        *lock(&self.no_disk_copies) = Some(told);
    }

    /// Adds leases to a region. Returns those for which that failed.
    fn add(
        &self,
        files: &Files,
        leases: Vec<(LeaseId, Result<LeaseTarget, String>)>,
    ) -> Vec<LeaseId> {
        let mut failed = Vec::new();
        for (lease, target) in leases {
            let add = |target| {
                self.engines
                    .add_lease(files, target, &self.identity)
                    .map_err(|error| error.to_string())
            };
            if let Err(error) = target.and_then(add) {
                super::cannot_be_used(lease, &error);
                failed.push(lease);
            }
        }
        failed
    }

    /// Adds the leases `onto` to a region, then moves all pages out of `lease` while programs use
    /// the region. Pages without other room go to a spill file in the directory `spill`.
    /// Returns the leases that could not be added, and the result of the move.
    pub(super) fn evacuate(
        &self,
        volume: VolumeId,
        (lease, spill): (LeaseId, Option<&Path>),
        onto: Vec<(LeaseId, Result<LeaseTarget, String>)>,
    ) -> (Vec<LeaseId>, Result<(), String>) {
        let name = lock(&self.known).get(&volume).map(|spec| spec.name.clone());
        let Some(name) = name else {
            let unused = onto.into_iter().map(|(lease, _)| lease).collect();
            return (unused, Err(format!("the region of volume {volume} is gone")));
        };
        let files = self.files(&name);
        let mut unused = self.add(&files, onto);
        let moved = self.engines.evacuate(&files, lease, spill);
        let moved = moved.map_err(|error| error.to_string());
        let spec = self.refresh(volume);
        let has = |lease: LeaseId| spec.as_ref().map(|spec| has(spec, lease));
        // An engine that died after it had added a lease did not answer, but its record has it.
        unused.retain(|lease| has(*lease) != Some(true));
        match has(lease) {
            Some(false) => (unused, Ok(())),
            _ => (unused, moved),
        }
    }

    /// Returns the leases of regions with keys of their own. Second copies are under the keys of
    /// other leases.
    pub(super) fn own_keys(&self) -> Vec<LeaseId> {
        let known = lock(&self.known);
        let leases = known.values().flat_map(|spec| &spec.leases);
        let own = leases.filter(|target| is_borrowed(target) && has_own_key(target));
        own.map(|target| target.lease).collect()
    }

    /// Returns the borrowed leases of all regions, by lender.
    pub(super) fn leases_by_lender(&self) -> BTreeMap<HostName, Vec<LeaseId>> {
        let mut lenders: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for target in lock(&self.known).values().flat_map(borrowed) {
            lenders.entry(target.lender.clone()).or_default().push(target.lease);
        }
        lenders
    }

    /// Asks each region's engine for the state of its leases.
    pub(super) fn status(&self) -> Vec<status::Region> {
        let known: Vec<_> = lock(&self.known).values().cloned().collect();
        aquifer_vm::process::side_by_side(known, |spec| self.region_status(spec))
            .into_iter()
            .flatten()
            .collect()
    }

    /// Returns the state of a region's leases; `None` if the region is gone.
    fn region_status(&self, spec: RegionSpec) -> Option<status::Region> {
        let leases: BTreeSet<_> = borrowed(&spec).map(|target| target.lease).collect();
        let mut shown = status::Region {
            region: spec.name.clone(),
            volume: spec.volume,
            leases: Vec::new(),
            spilled: Bytes::ZERO,
            last_error: None,
        };
        match client::status_within(&self.files(&spec.name), TIMEOUT) {
            Ok(region) => {
                let own = region.volume.leases.into_iter();
                shown.leases = own.filter(|it| leases.contains(&it.lease)).map(held).collect();
                shown.last_error = region.volume.last_error;
                shown.spilled = region.volume.spill.map_or(Bytes::ZERO, |spill| spill.bytes());
            }
            Err(RegionError::Unknown(_)) => return None,
            Err(error) => shown.last_error = Some(error.to_string()),
        }
        Some(shown)
    }
}

/// Returns whether the region uses a lease.
fn has(spec: &RegionSpec, lease: LeaseId) -> bool {
    spec.leases.iter().any(|target| target.lease == lease)
        || spec.copies.iter().any(|copy| copy.lease.lease == lease)
}

/// Returns whether an agent borrowed for the region, even if all of it is in its spill file now.
fn is_known(spec: &RegionSpec) -> bool {
    borrowed(spec).next().is_some() || spec.spill.is_some()
}

/// Converts a region's record to the controller's form.
fn live(spec: &RegionSpec) -> LiveVolume {
    let lease = |target: &LeaseTarget| BorrowedLease {
        lease: target.lease,
        lender: target.lender.clone(),
        bytes: target.capacity,
        uris: vec![target.uri()],
        generation: generation(target),
    };
    let leases: Vec<_> =
        spec.leases.iter().filter(|target| is_borrowed(target)).map(lease).collect();
    let copies = spec.copies.iter().filter(|copy| is_borrowed(&copy.lease));
    let copies = copies.map(|copy| (copy.of, lease(&copy.lease))).collect();
    LiveVolume {
        volume: spec.volume,
        bytes: leases.iter().map(|lease| lease.bytes).sum(),
        owner: Owner::Region(spec.name.clone()),
        group: spec.group.clone(),
        cause: Cause::ByHand,
        leases,
        copies,
    }
}
