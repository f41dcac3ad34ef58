use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::Duration;

use aquifer_fabric::tls::Identity;
use aquifer_page::LeaseId;
use aquifer_pool::{Event, Happening, LeaseTarget, PoolError, Upkeep, Volume, VolumeConfig};

use super::disk::PoolDisk;
use super::message::Status;
use super::spec::{Files, Locked, VolumeRecord, VolumeSpec};
use super::{ProcessError, swap_off};
use crate::backend::{self, Attached, Options};
use crate::safety::Report;
use crate::swap;

/// How often a client hears how far an evacuation is that another one has asked for.
const PROGRESS_PERIOD: Duration = Duration::from_millis(200);

/// Threads beside those that have connections of their own: a lender that does not answer keeps those that asked it, and the
/// pages of others are to be served meanwhile. Each takes half a megabyte of locked memory.
const SPARE: usize = 12;

/// A volume on its device.
#[derive(Debug)]
pub(super) struct Serving {
    files: Files,
    volume: Arc<Volume>,
    _upkeep: Upkeep,
    safety: Report,
    /// Held while the device is being detached: by one at a time.
    attached: Mutex<Box<dyn Attached>>,
    record: Mutex<(VolumeRecord, Locked)>,
}

impl Serving {
    /// Makes the volume and its device. When this fails nothing is left.
    pub(super) fn start(spec: &VolumeSpec, safety: Report) -> Result<Self, ProcessError> {
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
        };
        lock.write(&record).map_err(note_error(&files)).inspect_err(|_| files.remove())?;
        let upkeep = Upkeep::start(&volume, log)
            .map_err(ProcessError::io("cannot start the volume's upkeep"))
            .inspect_err(|_| files.remove())?;
        let (attached, record) = (Mutex::new(attached), Mutex::new((record, lock)));
        Ok(Self { files, volume, _upkeep: upkeep, safety, attached, record })
    }

    /// Swaps on the device, if that is wanted.
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

    /// What is served, with the leases that it stands on now.
    pub(super) fn record(&self) -> VolumeRecord {
        locked(&self.record).0.clone()
    }

    pub(super) fn status(&self) -> Status {
        let record = self.record();
        let swap_used = swap::usage(&record.device).ok().flatten().unwrap_or_default();
        Status {
            record,
            swap_used,
            volume: self.volume.known_status(),
            safety: self.safety.clone(),
        }
    }

    pub(super) fn add_lease(&self, lease: LeaseTarget) -> Result<(), PoolError> {
        self.volume.add_lease(lease.clone())?;
        self.note_leases(|leases| leases.push(lease));
        Ok(())
    }

    /// Moves everything off a lease and gives it up. While another caller does so, follows that, and goes on where it fails;
    /// a lease that the volume does not have is empty already.
    pub(super) fn evacuate(
        &self,
        lease: LeaseId,
        mut progress: impl FnMut(aquifer_pool::Progress),
    ) -> Result<(), PoolError> {
        loop {
            match self.volume.evacuate(lease, &mut progress) {
                Ok(_) | Err(PoolError::UnknownLease(..)) => break,
                Err(PoolError::Evacuating(..)) => {
                    while let Some(now) = self.volume.evacuating(lease) {
                        progress(now);
                        thread::sleep(PROGRESS_PERIOD);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        self.note_leases(|leases| leases.retain(|target| target.lease != lease));
        Ok(())
    }

    fn note_leases(&self, change: impl FnOnce(&mut Vec<LeaseTarget>)) {
        let (record, lock) = &mut *locked(&self.record);
        change(&mut record.spec.leases);
        // The record only tells the next agent; the leases are as they are.
        if let Err(error) = lock.write(record) {
            tracing::warn!("{}", note_error(&self.files)(error));
        }
    }

    /// Turns swap off and takes the device away; the process has nothing to serve then and its files are removed.
    /// Where this fails the volume is served as before, with or without swap as `status` says.
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

    /// Discards all that is stored: nobody can find it any more. Lenders that do not answer are no reason to stay.
    fn give_back(&self) {
        if let Err(error) = self.volume.discard(0, 0, self.record().spec.capacity.0) {
            tracing::warn!("what was stored could not be given back: {error}");
        }
    }

    fn claim(&self) -> Result<MutexGuard<'_, Box<dyn Attached>>, ProcessError> {
        match self.attached.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => Ok(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) => Err(ProcessError::Refused(format!(
                "volume {} is being detached already",
                self.files.id
            ))),
        }
    }
}

/// Writes an event to the process's log.
fn log(event: &Event) {
    match event.what {
        Happening::LenderBack { .. } | Happening::SpillEnded => tracing::info!("{}", event.what),
        Happening::SpillStarted => tracing::warn!("{}", event.what),
        Happening::LenderLost { .. } | Happening::PageLost { .. } => {
            tracing::error!("{}", event.what)
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn note_error(files: &Files) -> impl FnOnce(std::io::Error) -> ProcessError {
    ProcessError::io(format!("cannot write the volume's record {}", files.record().display()))
}

/// Makes the volume, lays it over its leases and attaches it.
fn make(spec: &VolumeSpec) -> Result<(Arc<Volume>, Box<dyn Attached>), ProcessError> {
    let volume = Arc::new(Volume::new(VolumeConfig {
        id: spec.volume,
        capacity: spec.capacity,
        workers: spec.workers,
        patience: spec.patience,
        tls: spec.identity.as_deref().map(Identity::load).transpose()?,
        spill: spec.spill.clone(),
        ledger: None,
    })?);
    for lease in &spec.leases {
        volume.add_lease(lease.clone())?;
    }
    let disk = Arc::new(PoolDisk(volume.clone()));
    let options = Options { workers: spec.workers, spare: SPARE, label: spec.label() };
    let attached = backend::choose(spec.backend)?.attach(disk, &options)?;
    Ok((volume, attached))
}
