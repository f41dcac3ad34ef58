//! The VM's balloon, by QEMU's monitor: virtio-balloon (Virtual I/O Device specification 1.2,
//! section 5.5).

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::device::by_type;
use super::figures::{Figures, LOOKING, Need};
use super::port::FRESH;
use super::{ASKING, Limits, TELLING, VmMemory};
use crate::error::VmError;
use crate::qmp::Qmp;

/// How often the guest sends its figures to the balloon: QEMU has no shorter period.
const POLLING: Duration = Duration::from_secs(1);

/// The memory that a balloon leaves the guest, for a policy that hands out a group's savings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ballooned {
    /// Size of the VM's memory while its balloon is empty.
    pub memory: Bytes,
    /// Least memory by the VM's limits; all of its memory if they set no minimum.
    pub base: Bytes,
    /// Most memory by the VM's limits.
    pub max: Bytes,
    /// Memory that the balloon leaves the guest now.
    pub size: Bytes,
    /// The guest's figures, if it sends any.
    pub figures: Option<Figures>,
}

/// Returns the guest's last statistics, and their time in seconds since the epoch; `None` if the
/// guest has sent none yet.
pub(super) fn statistics(qmp: &mut Qmp) -> Result<Option<(Value, u64)>, VmError> {
    let Some(balloon) = find(qmp)? else { return Ok(None) };
    let answer = qmp.execute("qom-get", json!({ "path": balloon, "property": "guest-stats" }))?;
    Ok(answer["last-update"].as_u64().filter(|at| *at > 0).map(|at| (answer["stats"].clone(), at)))
}

/// Requests statistics now, and periodically from now on.
pub(super) fn ask_for_statistics(qmp: &mut Qmp) -> Result<(), VmError> {
    let Some(balloon) = find(qmp)? else { return Ok(()) };
    // QEMU asks the guest at once when polling starts.
    for seconds in [0, POLLING.as_secs()] {
        let property = "guest-stats-polling-interval";
        let set = json!({ "path": balloon, "property": property, "value": seconds });
        qmp.execute("qom-set", set)?;
    }
    Ok(())
}

/// Returns the guest's statistics if they are fresh; otherwise requests them and returns `None`.
pub(super) fn told(qmp: &mut Qmp) -> Result<Option<Figures>, VmError> {
    match statistics(qmp)? {
        Some((statistics, at)) if epoch_seconds().saturating_sub(at) < FRESH.as_secs() => {
            Ok(Figures::from_balloon(&statistics))
        }
        _ => {
            ask_for_statistics(qmp)?;
            Ok(None)
        }
    }
}

/// Returns the guest's need by statistics that are newer than this call.
pub(super) fn current(qmp: &mut Qmp) -> Result<Need, VmError> {
    if find(qmp)?.is_none() {
        return Ok(Need::NoSource);
    }
    // QEMU tells the time of statistics in whole seconds.
    let called = epoch_seconds();
    ask_for_statistics(qmp)?;
    let began = Instant::now();
    while began.elapsed() < TELLING {
        if let Some((statistics, at)) = statistics(qmp)?
            && at > called
            && let Some(figures) = Figures::from_balloon(&statistics)
        {
            return Ok(Need::Known(figures));
        }
        thread::sleep(ASKING);
    }
    Ok(Need::Untold)
}

/// Returns the time now, as QEMU gives that of statistics.
pub(super) fn epoch_seconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_secs())
}

fn find(qmp: &mut Qmp) -> Result<Option<String>, VmError> {
    by_type(qmp, "child<virtio-balloon-pci>")
}

impl VmMemory {
    /// Returns the balloon's state, after setting it to leave the guest `target` if given.
    ///
    /// # Errors
    /// [`VmError`] if the VM has no balloon, or its QEMU does not answer.
    pub(crate) fn balloon(&self, target: Option<Bytes>) -> Result<Ballooned, VmError> {
        let mut qmp = Qmp::connect(&self.files.control(), LOOKING)?;
        let summary = qmp.execute("query-memory-size-summary", json!({}))?;
        let number = |key: &str| Bytes(summary[key].as_u64().unwrap_or(0));
        let memory = number("base-memory") + number("plugged-memory");
        if let Some(target) = target {
            qmp.execute("balloon", json!({ "value": target.min(memory).0 }))?;
        }
        let size = qmp.execute("query-balloon", json!({}))?;
        let figures = match self.latest() {
            Some(figures) => Some(figures),
            None => told(&mut qmp)?,
        };
        let size = Bytes(size["actual"].as_u64().unwrap_or(memory.0));
        Ok(Ballooned { size, figures, ..Ballooned::within(memory, &self.files.limits()?) })
    }
}

impl Ballooned {
    /// Makes the state of a VM of `memory` that holds all that its limits allow.
    pub(crate) fn within(memory: Bytes, limits: &Limits) -> Self {
        let base = if limits.min == Bytes::ZERO { memory } else { limits.min.min(memory) };
        let max = limits.max.min(memory);
        Self { memory, base, max, size: max, figures: None }
    }
}
