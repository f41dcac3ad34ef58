//! A VM's memory, grown and shrunk at run time by whole sections (\[Bielski18\]).
//!
//! [`Budget`] accounts for the memory that a host has set aside for its guests. `VmMemory` is the
//! supervisor's view of one VM's memory. `VmMemory` resizes the VM by its virtio-mem device
//! ([`Order`], [`Resized`]), serves the requests of the guest's agent, and records how long each
//! stage took.

mod balancing;
mod balloon;
mod budget;
mod device;
mod figures;
mod growth;
mod held;
mod port;
mod request;
mod resident;
mod resize;
mod rounding;
mod stages;
mod step;

use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

pub use aquifer_control::balance::Limits;
use aquifer_page::{Bytes, lock};
use aquifer_region::process::record;

pub use balancing::{BalancerStep, Balancing, Moved};
pub use balloon::Ballooned;
pub use budget::{Account, Accounts, Budget, Kind, Share};
pub(crate) use figures::look;
pub use figures::{Figures, Reading, Source};
pub use growth::{GrowthLimit, Room};
pub use held::{Held, HeldMemory, InRegion, held};
pub(crate) use resident::of as resident;
pub use resize::{Order, Resized, Short};
pub use stages::{Direction, Spread, Times, Took};

use crate::error::VmError;
use crate::process::Files;
use device::{Device, Known};
use figures::Need;
use port::{Port, Question};

/// Timeout of an answer of the guest's agent, which may have to bring blocks online first.
const ANSWERING: Duration = Duration::from_secs(3);

/// How long a guest without an agent may take to send figures to its balloon.
const TELLING: Duration = Duration::from_secs(3);

/// How often figures are requested meanwhile.
const ASKING: Duration = Duration::from_millis(250);

/// A guest counts at least all but one part in this many of its new memory; its kernel uses the
/// rest.
const OWN_USE: u64 = 50;

/// A VM's memory, as its supervisor sees it.
#[derive(Clone, Debug)]
pub(crate) struct VmMemory {
    files: Files,
    budget: Budget,
    port: Port,
    device: Arc<Mutex<Option<Known>>>,
    /// Part of the VM's memory that the guest's kernel does not count as its own, once known.
    uncounted: Arc<Mutex<Option<Bytes>>>,
    /// The thread that records the times of the last resize.
    keeping: Arc<Mutex<Option<JoinHandle<()>>>>,
    /// Memory that applications in the guest wait for.
    wish: Arc<Mutex<Bytes>>,
}

/// The limits of a VM without limits: only its device bounds it.
pub const UNLIMITED: Limits =
    Limits { min: Bytes::ZERO, max: Bytes(u64::MAX), weight: 1, reserve: Bytes::ZERO };

impl VmMemory {
    pub(crate) fn of(files: &Files) -> Self {
        Self {
            files: files.clone(),
            budget: Budget::of(files.run_dir()),
            port: Port::new(&files.agent()),
            device: Arc::default(),
            uncounted: Arc::default(),
            keeping: Arc::default(),
            wish: Arc::default(),
        }
    }

    fn device(&self) -> Result<Device, VmError> {
        let monitor = self.files.mover();
        // The lock is not held while QEMU may be silent.
        let known = lock(&self.device).clone();
        if let Some(known) = known {
            return Device::again(&monitor, known);
        }
        let device = Device::find(&monitor, device::TIMEOUT)?;
        *lock(&self.device) = Some(device.is.clone());
        Ok(device)
    }

    /// Returns the memory that the guest's kernel counts while the VM has `size`; `None` if the
    /// guest does not say.
    fn total_now(&self, device: &mut Device, size: Bytes) -> Result<Option<Bytes>, VmError> {
        if let Some(uncounted) = *lock(&self.uncounted) {
            return Ok(Some(size.saturating_sub(uncounted)));
        }
        let asked = self.port.ask(Bytes::ZERO);
        let total = match asked.and_then(|question| self.port.answer(question, ANSWERING)) {
            Some(report) => Some(report.total),
            // The statistics may be of another size. A guest that never sent any sends none now.
            None if balloon::statistics(device.qmp())?.is_none() => None,
            None => match balloon::current(device.qmp())? {
                Need::Known(figures) => Some(figures.total),
                Need::Untold | Need::NoSource => None,
            },
        };
        *lock(&self.uncounted) = total.map(|total| size.saturating_sub(total));
        Ok(total)
    }

    /// Waits until the guest counts `needed`, and can thus use its new memory. Returns the missing
    /// part, or `None` if the guest does not say. `asked` is a question that the agent was already
    /// sent.
    fn confirm(
        &self,
        device: &mut Device,
        needed: Bytes,
        asked: Option<Question>,
    ) -> Result<Option<Bytes>, VmError> {
        let began = Instant::now();
        let asked = asked.or_else(|| self.port.ask(needed));
        if let Some(report) = asked.and_then(|question| self.port.answer(question, ANSWERING)) {
            return Ok(Some(needed.saturating_sub(report.total)));
        }
        let called = balloon::epoch_seconds();
        let mut asked: Option<Instant> = None;
        loop {
            if asked.is_none_or(|at| at.elapsed() > ASKING) {
                balloon::ask_for_statistics(device.qmp())?;
                asked = Some(Instant::now());
            }
            let Some((statistics, at)) = balloon::statistics(device.qmp())? else {
                return Ok(None);
            };
            let now = total(&statistics).filter(|_| at >= called);
            let missing = now.map(|now| needed.saturating_sub(now));
            if missing == Some(Bytes::ZERO) || began.elapsed() > TELLING {
                return Ok(missing);
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Records the times of a resize, with those that the guest's kernel measures. The kernel has
    /// work left after the last block is plugged, so this waits for its times only if `waits`.
    fn keep_times(&self, resized: Resized, waits: bool) -> Resized {
        if resized.reached == resized.from {
            return resized;
        }
        if waits {
            return self.with_inside(resized);
        }
        let (memory, copy) = (self.clone(), resized.clone());
        let keeping = thread::Builder::new().name("times".to_owned());
        match keeping.spawn(move || drop(memory.with_inside(copy))) {
            Ok(keeping) => *lock(&self.keeping) = Some(keeping),
            Err(error) => tracing::warn!("cannot record the times of a resize: {error}"),
        }
        resized
    }

    /// Waits until the times of the last resize are recorded, so that they do not mix with the next
    /// one's.
    fn times_are_kept(&self) {
        let keeping = lock(&self.keeping).take();
        // A thread that panicked has logged that.
        let _ = keeping.map(JoinHandle::join);
    }

    fn with_inside(&self, mut resized: Resized) -> Resized {
        let inside = self.port.stages(ANSWERING);
        resized
            .stages
            .extend(inside.into_iter().map(|stage| Took { stage: stage.name, us: stage.took_us }));
        let path = self.files.times();
        let mut times: Times = record::read(&path).ok().flatten().unwrap_or_default();
        times.record(resized.direction(), &resized.stages);
        if let Err(error) = record::write(&path, &times) {
            tracing::warn!("cannot write the times of a resize to {}: {error}", path.display());
        }
        resized
    }

    /// Returns the RAM of this host that the VM's memory takes.
    fn resident(&self) -> Bytes {
        resident(&self.files)
    }
}

/// Returns the least that a guest counts after gaining `gained`, if it counted `before`.
fn counts(before: Bytes, gained: Bytes) -> Bytes {
    before + Bytes(gained.0 - gained.0 / OWN_USE)
}

fn total(statistics: &serde_json::Value) -> Option<Bytes> {
    // All ones stand for a value that the guest does not send.
    statistics["stat-total-memory"].as_u64().filter(|bytes| *bytes < u64::MAX).map(Bytes)
}
