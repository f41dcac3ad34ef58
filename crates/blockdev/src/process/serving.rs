//! A volume while its process serves it as a block device.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use aquifer_page::{LeaseId, WorkerId, lock};
use aquifer_transport::tls::Identity;
use aquifer_volume::{
    Event, Happening, LeaseTarget, SecondCopy, Upkeep, Volume, VolumeConfig, VolumeError,
};

use super::disk::VolumeDisk;
use super::message::VolumeProcessStatus;
use super::spec::{Files, Locked, VolumeRecord, VolumeSpec};
use super::{ProcessError, swap_off};
use crate::backend::{self, Attached, Options};
use crate::safety::SafetyReport;
use crate::swap;

/// Number of threads without connections of their own. While a silent lender blocks other threads,
/// they serve the pages of other lenders. Each takes half a megabyte of locked memory.
const SPARE: usize = 12;

/// A volume with its block device.
#[derive(Debug)]
pub(super) struct Serving {
    files: Files,
    volume: Arc<Volume>,
    _upkeep: Upkeep,
    safety: SafetyReport,
    /// Held while the device is being detached, so that only one thread detaches it.
    attached: Mutex<Box<dyn Attached>>,
    record: Mutex<(VolumeRecord, Locked)>,
}

impl Serving {
    /// Makes the volume and its device. On failure nothing is left.
    pub(super) fn start(spec: &VolumeSpec, safety: SafetyReport) -> Result<Self, ProcessError> {
        let files = spec.files();
        files.make_directory()?;
        let mut lock = Locked::take(&files)?;
        let made = lock.clear().map_err(note_error(&files)).and_then(|()| make(spec));
        let (volume, attached) = made.inspect_err(|_| files.remove())?;
        let record = VolumeRecord {
            spec: spec.clone(),
            pid: std::process::id(),
            device: attached.path().to_owned(),
            backend: attached.kind(),
            copies: Some(Vec::new()),
        };
        lock.write(&record).map_err(note_error(&files)).inspect_err(|_| files.remove())?;
        let upkeep = Upkeep::start(&volume, log)
            .map_err(ProcessError::io("cannot start the volume's upkeep"))
            .inspect_err(|_| files.remove())?;
        let (attached, record) = (Mutex::new(attached), Mutex::new((record, lock)));
        Ok(Self { files, volume, _upkeep: upkeep, safety, attached, record })
    }

    /// Formats the device and turns swap on, if requested.
    pub(super) fn swap_on(&self) -> Result<(), ProcessError> {
        let VolumeRecord { spec, device, .. } = self.record();
        if spec.swap {
            swap::format(&device, spec.capacity, "aquifer", spec.volume.0)?;
            swap::on(&device, spec.priority)?;
        }
        Ok(())
    }

    pub(super) fn files(&self) -> &Files {
        &self.files
    }

    /// Returns the record, with the leases that the volume has at present.
    pub(super) fn record(&self) -> VolumeRecord {
        lock(&self.record).0.clone()
    }

    pub(super) fn status(&self) -> VolumeProcessStatus {
        let record = self.record();
        let swap_used = swap::usage(&record.device).ok().flatten().unwrap_or_default();
        VolumeProcessStatus {
            record,
            swap_used,
            volume: self.volume.known_status(),
            safety: self.safety.clone(),
        }
    }

    pub(super) fn add_lease(&self, lease: LeaseTarget) -> Result<(), VolumeError> {
        self.volume.add_lease(lease.clone())?;
        self.note(|record| record.spec.leases.push(lease));
        Ok(())
    }

    /// Begins a second copy of the lease `of`, unless the volume has this one.
    pub(super) fn add_copy(&self, of: LeaseId, lease: LeaseTarget) -> Result<(), VolumeError> {
        let is_it = |known: &SecondCopy| {
            let there = &known.lease;
            known.of == of && there.lease == lease.lease && there.is_same_place(&lease)
        };
        if self.volume.copies().iter().any(is_it) {
            return Ok(());
        }
        self.volume.add_copy(SecondCopy { of, lease, lags: false }, |copy| {
            self.note(|record| {
                let copies = record.copies.get_or_insert_default();
                copies.retain(|known| known.of != of);
                copies.push(copy.clone());
            });
            Ok(())
        })
    }

    /// Moves all extents off a lease and releases it, or ends the second copy on it; see
    /// [`Volume::release`].
    pub(super) fn evacuate(
        &self,
        lease: LeaseId,
        spills: bool,
        progress: impl FnMut(aquifer_volume::Progress),
    ) -> Result<(), VolumeError> {
        self.volume.end_copy(lease)?;
        match spills {
            true => self.volume.release(lease, progress)?,
            false => self.volume.release_to_lenders(lease, progress)?,
        }
        self.note(|record| {
            record.spec.leases.retain(|target| target.lease != lease);
            // A copy ends with the lease of which it is one.
            let copies = record.copies.get_or_insert_default();
            copies.retain(|copy| copy.of != lease && copy.lease.lease != lease);
        });
        Ok(())
    }

    fn note(&self, change: impl FnOnce(&mut VolumeRecord)) {
        let (record, lock) = &mut *lock(&self.record);
        change(record);
        // The record only informs the next agent; the volume has its leases in any case.
        if let Err(error) = lock.write(record) {
            tracing::warn!("{}", note_error(&self.files)(error));
        }
    }

    /// Turns swap off, detaches the device and removes the process's files. On failure the volume
    /// stays served; `status` tells whether swap is still on.
    pub(super) fn detach(&self, progress: impl FnMut(swap::Progress)) -> Result<(), ProcessError> {
        let mut attached = self.claim()?;
        let used =
            swap::usage(attached.path()).map_err(ProcessError::io("cannot read /proc/swaps"))?;
        if used.is_some() {
            swap_off::by_helper(swap_off::this_program(), attached.path(), progress)?;
        }
        attached.detach()?;
        self.give_back();
        self.files.remove();
        Ok(())
    }

    /// Discards all stored pages, as nothing refers to them. A lender that does not answer does not
    /// stop the detach.
    fn give_back(&self) {
        if let Err(error) = self.volume.discard(WorkerId(0), 0, self.record().spec.capacity.0) {
            tracing::warn!("cannot discard the volume's pages: {error}");
        }
        // They may have missed discards.
        self.volume.empty_copies();
    }

    fn claim(&self) -> Result<MutexGuard<'_, Box<dyn Attached>>, ProcessError> {
        match self.attached.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => Ok(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) => Err(ProcessError::Refused(format!(
                "another request is already detaching volume {}",
                self.files.id
            ))),
        }
    }
}

/// Writes an event to the process's log.
fn log(event: &Event) {
    match event.what {
        Happening::LenderBack { .. }
        | Happening::SpillEnded
        | Happening::CopiesWhole { .. }
        | Happening::DiskCopiesResumed => tracing::info!("{}", event.what),
        Happening::SpillStarted
        | Happening::CopyBehind { .. }
        | Happening::DiskCopiesPaused { .. } => tracing::warn!("{}", event.what),
        Happening::LenderLost { .. } | Happening::PageLost { .. } => {
            tracing::error!("{}", event.what)
        }
    }
}

fn note_error(files: &Files) -> impl FnOnce(std::io::Error) -> ProcessError {
    ProcessError::io(format!("cannot write the volume's record {}", files.record().display()))
}

/// Makes the volume, adds its leases and attaches it.
fn make(spec: &VolumeSpec) -> Result<(Arc<Volume>, Box<dyn Attached>), ProcessError> {
    let volume = Arc::new(Volume::new(VolumeConfig {
        id: spec.volume,
        capacity: spec.capacity,
        workers: spec.workers,
        io_timeout: spec.io_timeout,
        tls: spec.identity.as_deref().map(Identity::load).transpose()?,
        spill: spec.spill.clone(),
        ledger: None,
    })?);
    for lease in &spec.leases {
        volume.add_lease(lease.clone())?;
    }
    let disk = Arc::new(VolumeDisk(volume.clone()));
    let options = Options { workers: spec.workers, spare: SPARE, label: spec.label() };
    let attached = backend::choose(spec.backend)?.attach(disk, &options)?;
    Ok((volume, attached))
}
