//! A guest's figures about its memory.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_guest_agent::message::GuestReport;
use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::device::Device;
use super::port::Question;
use super::{ANSWERING, ASKING, TELLING, VmMemory, balloon, lock};
use crate::error::VmError;

/// Timeout of QEMU's greeting and of each answer, for callers that query many VMs.
pub(super) const LOOKING: Duration = Duration::from_secs(3);

/// The source of a guest's figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The agent in the guest.
    Agent,
    /// The guest's balloon driver.
    Balloon,
}

/// A guest's recent figures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Source of the figures.
    pub source: Source,
    /// Memory that the guest's kernel manages.
    pub total: Bytes,
    /// Memory that its programs can allocate without swapping.
    pub available: Bytes,
    /// Used swap; zero if the source is the balloon.
    pub swap_used: Bytes,
    /// Bytes read from swap since the guest booted.
    pub swap_in: u64,
    /// Bytes written to swap since then.
    pub swap_out: u64,
    /// Percent of the last 10 s in which some task waited for memory; `None` if unknown.
    pub pressure: Option<f64>,
}

impl From<GuestReport> for Figures {
    fn from(report: GuestReport) -> Self {
        let GuestReport { total, available, swap_used, swap_in, swap_out, stalls, .. } = report;
        let (source, pressure) = (Source::Agent, stalls.pressure_some);
        Self { source, total, available, swap_used, swap_in, swap_out, pressure }
    }
}

impl Figures {
    /// Makes the figures of a guest that sends none: all zero.
    pub(super) fn none() -> Self {
        Self::from(GuestReport::default())
    }

    pub(super) fn from_balloon(statistics: &Value) -> Option<Self> {
        let get = |name: &str| statistics[name].as_u64().filter(|bytes| *bytes < u64::MAX);
        Some(Self {
            source: Source::Balloon,
            total: Bytes(get("stat-total-memory")?),
            available: Bytes(get("stat-available-memory").or_else(|| get("stat-free-memory"))?),
            swap_used: Bytes::ZERO,
            swap_in: get("stat-swap-in").unwrap_or(0),
            swap_out: get("stat-swap-out").unwrap_or(0),
            pressure: None,
        })
    }
}

/// What is known of a guest's need for memory.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Need {
    /// By these figures.
    Known(Figures),
    /// The guest could send figures, but does not.
    Untold,
    /// The VM has nothing by which its guest could send figures.
    NoSource,
}

/// The state of a VM's memory, for a balancer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// Size of the memory.
    pub size: Bytes,
    /// Least size that the device allows.
    pub least: Bytes,
    /// Greatest size that the device allows.
    pub most: Bytes,
    /// The guest's figures, if it sends any.
    pub figures: Option<Figures>,
    /// Memory that programs in the guest wait for.
    pub wish: Bytes,
}

impl VmMemory {
    /// Returns the agent's newest figures, if they are fresh.
    pub(super) fn latest(&self) -> Option<Figures> {
        self.port.latest().map(Figures::from)
    }

    /// Returns the newest figures, of the agent or else of the balloon.
    pub(super) fn figures(&self, device: &mut Device) -> Result<Option<Figures>, VmError> {
        match self.latest() {
            Some(figures) => Ok(Some(figures)),
            None => balloon::told(device.qmp()),
        }
    }

    /// Asks the agent for its figures. The agent answers at once, because the guest has at least a
    /// byte.
    pub(super) fn ask_for_figures(&self) -> Option<Question> {
        self.port.ask(Bytes(1))
    }

    /// Returns what the guest needs now: by figures of its agent, or else of its balloon, that are
    /// newer than this call. Older figures belong to another size or to another need. `asked` is a
    /// question that the agent was already sent.
    pub(super) fn need(
        &self,
        device: &mut Device,
        mut asked: Option<Question>,
    ) -> Result<Need, VmError> {
        loop {
            let question = asked.take().or_else(|| self.ask_for_figures());
            let report = question.and_then(|question| self.port.answer(question, ANSWERING));
            if let Some(report) = report {
                return Ok(Need::Known(report.into()));
            }
            if !self.port.awaits_first_report() {
                break;
            }
            thread::sleep(ASKING);
        }
        Ok(match balloon::current(device.qmp())? {
            Need::NoSource if self.port.has_report() => Need::Untold,
            need => need,
        })
    }

    /// Returns whether the guest sends any figures within [`TELLING`].
    pub(super) fn answers(&self, device: &mut Device) -> Result<bool, VmError> {
        let began = Instant::now();
        while self.figures(device)?.is_none() {
            if began.elapsed() > TELLING {
                return Ok(false);
            }
            thread::sleep(ASKING);
        }
        Ok(true)
    }

    /// Returns the current state of the VM's memory.
    ///
    /// # Errors
    /// [`VmError`] if the VM cannot be resized, or its QEMU does not answer.
    pub(crate) fn reading(&self) -> Result<Reading, VmError> {
        let latest = self.latest();
        let reading = read(&self.files.control(), latest)?;
        Ok(Reading { wish: *lock(&self.wish), ..reading })
    }
}

/// Returns the state of the memory of the VM with this monitor.
pub(crate) fn look(monitor: &Path) -> Result<Reading, VmError> {
    read(monitor, None)
}

fn read(monitor: &Path, latest: Option<Figures>) -> Result<Reading, VmError> {
    let mut device = Device::find(monitor, LOOKING)?;
    let figures = match latest {
        Some(figures) => Some(figures),
        None => balloon::told(device.qmp())?,
    };
    Ok(Reading {
        size: device.size()?,
        least: device.is.boot,
        most: device.is.max,
        figures,
        wish: Bytes::ZERO,
    })
}
