//! One resize, from what is asked for to what came of it (Resizing, section III and Fig. 2).

use std::cmp::Ordering;
use std::fmt;
use std::time::{Duration, Instant};

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use super::Memory;
use super::budget::Share;
use super::rounding::Shape;
use super::stages::{Direction, Took};
use super::step::{End, Step, stay};
use crate::error::GuestError;

/// What a VM's memory is to be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// In all.
    pub size: Bytes,
    /// If it has so much now: whoever has decided this has seen that. Whatever it has, unless told.
    #[serde(default)]
    pub from: Option<Bytes>,
    /// It is not rounded to whole sections.
    pub exact: bool,
    /// For how long a guest that stops short is asked again.
    pub retry: Duration,
    /// The answer is to tell also what the guest's kernel spent its time on, for which it has to be waited.
    #[serde(default)]
    pub stages: bool,
    /// It may use the VM's reserve: the guest is out of memory.
    #[serde(default)]
    pub urgent: bool,
}

/// Why a VM has not got to the size that it was to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Short {
    /// The guest uses what it was to give.
    InUse {
        /// What its programs could have, as it says.
        available: Option<Bytes>,
    },
    /// It does nothing.
    NoAnswer,
    /// It has it, and does not use it.
    NotOnline {
        /// How much of it.
        offline: Bytes,
    },
    /// Whoever asked does not wait any more.
    Interrupted,
}

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse { available } => {
                f.write_str("the guest cannot give up more: what is left it uses, or cannot move")?;
                available.map_or(Ok(()), |bytes| write!(f, " (it has {bytes} available)"))
            }
            Self::NoAnswer => f.write_str(
                "the guest does not answer: its kernel has no driver virtio_mem, has not booted yet, or hangs",
            ),
            Self::NotOnline { offline } => write!(
                f,
                "the guest has it, but leaves {offline} offline: run 'aquifer-guest run' in it, or boot it with memhp_default_state=online_movable"
            ),
            Self::Interrupted => f.write_str("interrupted"),
        }
    }
}

/// What came of a resize.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resized {
    /// What the VM had.
    pub from: Bytes,
    /// What was asked for.
    pub asked: Bytes,
    /// What that was rounded to.
    pub to: Bytes,
    /// What the VM has.
    pub reached: Bytes,
    /// What is missing, either way.
    pub missing: Bytes,
    /// Why, if something is.
    pub why: Option<Short>,
    /// Whether the guest has said that its programs can have what it got; none where it says nothing, or got nothing.
    pub usable: Option<bool>,
    /// How often a guest that had stopped short was asked again.
    pub retries: u32,
    /// From the request to the answer.
    pub total_ms: f64,
    /// What that was spent on.
    pub stages: Vec<Took>,
    /// RAM of this host that the VM's memory took before.
    pub host_before: Bytes,
    /// And takes now.
    pub host_after: Bytes,
}

impl Resized {
    /// Which way it went.
    pub fn direction(&self) -> Direction {
        if self.to >= self.from { Direction::Add } else { Direction::Remove }
    }
}

impl Memory {
    /// Resizes the VM, which nobody else does meanwhile. `tell` hears of its size; when it says no the VM stays at what it has by then.
    ///
    /// # Errors
    /// [`GuestError`]: what cannot be, or that its QEMU has gone.
    pub(crate) fn resize(
        &self,
        order: &Order,
        tell: &mut dyn FnMut(Bytes) -> bool,
    ) -> Result<Resized, GuestError> {
        self.times_are_kept();
        let began = Instant::now();
        let accounts = self.budget.accounts()?;
        let has = accounts.vms.get(self.files.name()).map(Share::memory);
        // It answers while all else is looked at.
        let asked = has.filter(|has| order.size < *has).and_then(|_| self.ask_for_figures());
        let mut device = self.device()?;
        if !device.runs()? {
            let why = "the VM stands still, and cannot answer: 'aquifer vm resume' has it go on"
                .to_owned();
            return Err(GuestError::Misuse(why));
        }
        let from = device.size()?;
        if order.from.is_some_and(|seen| seen != from) {
            let why = format!("the VM was resized meanwhile, and has {from}");
            return Err(GuestError::Misuse(why));
        }
        let shape = Shape {
            boot: device.is.boot,
            max: self.files.limits()?.max.min(device.is.max),
            block: device.is.block,
            section: Bytes(accounts.section.0.next_multiple_of(device.is.block.0)),
        };
        let to = shape.round(from, order.size, order.exact)?;
        let host_before = self.resident();
        let mut step =
            Step { memory: self, device, from, to, stages: Vec::new(), retries: 0, asked };
        let ended = match to.cmp(&from) {
            Ordering::Greater => step.grow(order, tell),
            Ordering::Less => step.shrink(order, tell),
            Ordering::Equal => Ok(End { reached: from, why: None, usable: None }),
        };
        let End { reached, why, usable } = ended.inspect_err(|_| {
            // What is noted is to be what it has; one whose QEMU has gone is forgotten with all that it had.
            let _ = self.settle();
        })?;
        let Step { mut stages, retries, .. } = step;
        let total = began.elapsed();
        stages.push(Took { stage: "total".to_owned(), us: total.as_secs_f64() * 1e6 });
        let resized = Resized {
            from,
            asked: order.size,
            to,
            reached,
            missing: Bytes(reached.0.abs_diff(to.0)),
            why,
            usable,
            retries,
            total_ms: total.as_secs_f64() * 1e3,
            stages,
            host_before,
            host_after: self.resident(),
        };
        Ok(self.keep_times(resized, order.stages))
    }

    /// Has the VM stay at what it has, and notes that: whoever was resizing it has died.
    ///
    /// # Errors
    /// [`GuestError`].
    pub(crate) fn settle(&self) -> Result<(), GuestError> {
        if !self.budget.accounts()?.vms.contains_key(self.files.name()) {
            return Ok(());
        }
        let mut device = match self.device() {
            // One that cannot be resized has what it booted with.
            Err(GuestError::Misuse(_)) => return Ok(()),
            found => found?,
        };
        let reached = stay(&mut device)?;
        self.budget.settle(self.files.name(), reached)
    }
}
