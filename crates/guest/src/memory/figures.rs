//! How a guest is, in figures of its own.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_inside::message::Report;
use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::device::Device;
use super::port::Question;
use super::{ANSWERING, ASKING, Memory, TELLING, balloon, lock};
use crate::error::GuestError;

/// How long QEMU may take to greet, and for each answer, where somebody waits for the figures of many VMs.
pub(super) const LOOKING: Duration = Duration::from_secs(3);

/// Who tells a guest's figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The agent inside it.
    Agent,
    /// Its balloon's driver.
    Balloon,
}

/// A guest's figures, as it has told them a moment ago.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Who told them.
    pub source: Source,
    /// What its kernel has to give.
    pub total: Bytes,
    /// What its programs could have without swapping.
    pub available: Bytes,
    /// What of its swap is used, where that is told.
    pub swap_used: Bytes,
    /// Bytes that came from its swap since it booted.
    pub swap_in: u64,
    /// Bytes that went there.
    pub swap_out: u64,
    /// Percent of the last 10 s in which some of its tasks waited for memory, where that is told.
    pub pressure: Option<f64>,
}

impl From<Report> for Figures {
    fn from(report: Report) -> Self {
        let Report { total, available, swap_used, swap_in, swap_out, pressure_some, .. } = report;
        let source = Source::Agent;
        Self { source, total, available, swap_used, swap_in, swap_out, pressure: pressure_some }
    }
}

impl Figures {
    /// Of a guest that tells none.
    pub(super) fn none() -> Self {
        Self::from(Report::default())
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

/// A VM's memory, for who balances it with others'.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// What it has.
    pub size: Bytes,
    /// The least that it can have.
    pub least: Bytes,
    /// The most.
    pub most: Bytes,
    /// What it says of itself, if it does.
    pub figures: Option<Figures>,
    /// What programs in it have asked for and not got.
    pub wish: Bytes,
}

impl Memory {
    /// The newest figures of its agent, if it has one.
    pub(super) fn latest(&self) -> Option<Figures> {
        self.port.latest().map(Figures::from)
    }

    /// The newest figures, whoever tells them.
    pub(super) fn figures(&self, device: &mut Device) -> Result<Option<Figures>, GuestError> {
        match self.latest() {
            Some(figures) => Ok(Some(figures)),
            None => balloon::told(device.qmp()),
        }
    }

    /// Asks its agent for its figures, if that is there: it has that much, and so answers at once.
    pub(super) fn ask_for_figures(&self) -> Option<Question> {
        self.port.ask(Bytes(1))
    }

    /// Its figures of just now, where its agent is there; else the newest that there are. The agent may have been asked already.
    pub(super) fn fresh_figures(
        &self,
        device: &mut Device,
        asked: Option<Question>,
    ) -> Result<Option<Figures>, GuestError> {
        match asked
            .or_else(|| self.ask_for_figures())
            .and_then(|question| self.port.answer(question, ANSWERING))
        {
            Some(report) => Ok(Some(report.into())),
            None => self.figures(device),
        }
    }

    /// Whether the guest says anything at all.
    pub(super) fn answers(&self, device: &mut Device) -> Result<bool, GuestError> {
        let began = Instant::now();
        while self.figures(device)?.is_none() {
            if began.elapsed() > TELLING {
                return Ok(false);
            }
            thread::sleep(ASKING);
        }
        Ok(true)
    }

    /// How it is now.
    ///
    /// # Errors
    /// [`GuestError`]: it cannot be resized, or its QEMU does not answer.
    pub(crate) fn reading(&self) -> Result<Reading, GuestError> {
        let latest = self.latest();
        let reading = read(&self.files.control(), latest)?;
        Ok(Reading { wish: *lock(&self.wish), ..reading })
    }
}

/// How the memory of the VM is whose monitor listens there.
pub(crate) fn look(monitor: &Path) -> Result<Reading, GuestError> {
    read(monitor, None)
}

fn read(monitor: &Path, latest: Option<Figures>) -> Result<Reading, GuestError> {
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
