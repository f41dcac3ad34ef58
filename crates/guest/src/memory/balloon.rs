//! A VM's balloon, as QEMU shows it: virtio-balloon (Virtual I/O Device specification 1.2, section 5.5).

use std::time::{Duration, SystemTime};

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::device::by_type;
use super::figures::{Figures, LOOKING};
use super::port::FRESH;
use super::{Limits, Memory};
use crate::error::GuestError;
use crate::qmp::Qmp;

/// How often a guest is to tell its figures to its balloon: it has no shorter period.
const POLLING: Duration = Duration::from_secs(1);

/// What of a VM's memory its guest leaves to the host, for who hands out what a group of VMs saves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ballooned {
    /// What the VM has while its balloon is empty.
    pub memory: Bytes,
    /// The least that its limits leave it; all that it has where they say nothing.
    pub base: Bytes,
    /// The most that its limits allow.
    pub max: Bytes,
    /// What its balloon leaves it now.
    pub size: Bytes,
    /// What it says of itself, if it does.
    pub figures: Option<Figures>,
}

/// What the guest has told its balloon of itself last, and when, in seconds since the epoch. None if it has told nothing yet.
pub(super) fn statistics(qmp: &mut Qmp) -> Result<Option<(Value, u64)>, GuestError> {
    let Some(balloon) = find(qmp)? else { return Ok(None) };
    let answer = qmp.execute("qom-get", json!({ "path": balloon, "property": "guest-stats" }))?;
    Ok(answer["last-update"].as_u64().filter(|at| *at > 0).map(|at| (answer["stats"].clone(), at)))
}

/// Has the guest tell its figures, at once and from now on.
pub(super) fn ask_for_statistics(qmp: &mut Qmp) -> Result<(), GuestError> {
    let Some(balloon) = find(qmp)? else { return Ok(()) };
    // Who begins to poll asks at once.
    for seconds in [0, POLLING.as_secs()] {
        let set = json!({ "path": balloon, "property": "guest-stats-polling-interval", "value": seconds });
        qmp.execute("qom-set", set)?;
    }
    Ok(())
}

/// What the guest has told its balloon, which is asked to from now on.
pub(super) fn told(qmp: &mut Qmp) -> Result<Option<Figures>, GuestError> {
    let now =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_secs());
    match statistics(qmp)? {
        Some((statistics, at)) if now.saturating_sub(at) < FRESH.as_secs() => {
            Ok(Figures::from_balloon(&statistics))
        }
        _ => {
            ask_for_statistics(qmp)?;
            Ok(None)
        }
    }
}

fn find(qmp: &mut Qmp) -> Result<Option<String>, GuestError> {
    by_type(qmp, "child<virtio-balloon-pci>")
}

impl Memory {
    /// What its balloon leaves it; first, if that is said, it is to leave it so much.
    ///
    /// # Errors
    /// [`GuestError`]: it has none, or its QEMU does not answer.
    pub(crate) fn balloon(&self, target: Option<Bytes>) -> Result<Ballooned, GuestError> {
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
    /// Of a VM with so much memory that may hold all that its limits allow.
    pub(crate) fn within(memory: Bytes, limits: &Limits) -> Self {
        let base = if limits.min == Bytes::ZERO { memory } else { limits.min.min(memory) };
        let max = limits.max.min(memory);
        Self { memory, base, max, size: max, figures: None }
    }
}
