//! One resize, from the request to its outcome (\[Bielski18\], section III and Fig. 2).

use std::cmp::Ordering;
use std::fmt;
use std::time::{Duration, Instant};

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use super::VmMemory;
use super::budget::Share;
use super::rounding::Shape;
use super::stages::{Direction, Took};
use super::step::{End, Step, stay};
use crate::error::VmError;

/// An order to resize a VM's memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// The size to reach, of all of the VM's memory.
    pub size: Bytes,
    /// The size that the decision is based on: another size is an error. `None` accepts any.
    #[serde(default)]
    pub from: Option<Bytes>,
    /// Whether to reach the size without rounding to whole sections.
    pub exact: bool,
    /// How long a guest that stops short is asked again.
    pub retry: Duration,
    /// Whether the answer includes the times of the guest's kernel, which it then has to wait for.
    #[serde(default)]
    pub stages: bool,
    /// Whether the VM may draw on its reserve, because the guest is out of memory.
    #[serde(default)]
    pub urgent: bool,
}

/// The reason why a VM did not reach its size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Short {
    /// The guest uses the memory that it was to give.
    InUse {
        /// Memory available to its programs, by its own figures.
        available: Option<Bytes>,
    },
    /// The guest does not say how much memory it uses.
    NoFigures,
    /// The guest does not react.
    NoAnswer,
    /// The guest has the memory, but leaves some of it offline.
    NotOnline {
        /// Size of the offline part.
        offline: Bytes,
    },
    /// The client has hung up.
    Interrupted,
}

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse { available } => {
                f.write_str("the guest uses the rest of its memory, or cannot move it")?;
                available.map_or(Ok(()), |bytes| write!(f, " ({bytes} is available)"))
            }
            Self::NoFigures => f.write_str(
                "the guest does not say how much memory it uses: run 'aquifer-guest run' in it, or \
                 load the driver virtio_balloon",
            ),
            Self::NoAnswer => f.write_str(
                "the guest does not answer: its kernel lacks the driver virtio_mem, is still \
                 booting, or hangs",
            ),
            Self::NotOnline { offline } => write!(
                f,
                "the guest leaves {offline} of the new memory offline: run 'aquifer-guest run' in \
                 it, or boot it with memhp_default_state=online_movable"
            ),
            Self::Interrupted => f.write_str("the client hung up"),
        }
    }
}

/// The outcome of a resize.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resized {
    /// Size before.
    pub from: Bytes,
    /// Requested size.
    pub asked: Bytes,
    /// Requested size after rounding.
    pub to: Bytes,
    /// Size after.
    pub reached: Bytes,
    /// Distance to the rounded size, up or down.
    pub missing: Bytes,
    /// Reason of the distance, if any.
    pub why: Option<Short>,
    /// Whether the guest confirms that its programs can use the new memory; `None` if it says
    /// nothing or got nothing.
    pub usable: Option<bool>,
    /// How often a guest that had stopped short was asked again.
    pub retries: u32,
    /// Milliseconds from the request to the answer.
    pub total_ms: f64,
    /// Times of the stages.
    pub stages: Vec<Took>,
    /// RAM of this host that the VM's memory took before.
    pub host_before: Bytes,
    /// RAM that it takes after.
    pub host_after: Bytes,
}

impl Resized {
    /// Returns whether the VM was to grow or to shrink.
    pub fn direction(&self) -> Direction {
        if self.to >= self.from { Direction::Add } else { Direction::Remove }
    }
}

impl VmMemory {
    /// Resizes the VM. The caller excludes other resizes. `tell` receives the size; if it returns
    /// false, the VM stays at the size reached.
    ///
    /// # Errors
    /// [`VmError`] if the order cannot be met, or QEMU has exited.
    pub(crate) fn resize(
        &self,
        order: &Order,
        tell: &mut dyn FnMut(Bytes) -> bool,
    ) -> Result<Resized, VmError> {
        self.times_are_kept();
        let began = Instant::now();
        let accounts = self.budget.accounts()?;
        let has = accounts.vms.get(self.files.name()).map(Share::memory);
        // The agent answers while this function prepares the rest.
        let asked = has.filter(|has| order.size < *has).and_then(|_| self.ask_for_figures());
        let mut device = self.device()?;
        if !device.runs()? {
            let why =
                "the VM is paused and cannot resize: resume it with 'aquifer vm resume'".to_owned();
            return Err(VmError::Misuse(why));
        }
        let from = device.size()?;
        if order.from.is_some_and(|seen| seen != from) {
            let why = format!("another command resized the VM meanwhile: it has {from}");
            return Err(VmError::Misuse(why));
        }
        let shape = Shape {
            boot: device.is.boot,
            max: self.files.limits()?.max.min(device.is.max),
            block: device.is.block,
            section: Bytes(accounts.section.0.next_multiple_of(device.is.block.0)),
        };
        let to = shape.round(from, order.size, order.exact)?;
        let host_before = self.resident();
        let mut step = Step {
            memory: self,
            device,
            from,
            to,
            stages: Vec::new(),
            retries: 0,
            asked,
            is_untold: false,
        };
        let ended = match to.cmp(&from) {
            Ordering::Greater => step.grow(order, tell),
            Ordering::Less => step.shrink(order, tell),
            Ordering::Equal => Ok(End { reached: from, why: None, usable: None }),
        };
        let End { reached, why, usable } = ended.inspect_err(|_| {
            // The note must match the VM's size; the budget forgets a VM whose QEMU is gone.
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

    /// Stops a resize whose supervisor has died: the VM stays at its size, which the budget notes.
    ///
    /// # Errors
    /// [`VmError`] if QEMU does not answer, or the budget cannot be read or written.
    pub(crate) fn settle(&self) -> Result<(), VmError> {
        if !self.budget.accounts()?.vms.contains_key(self.files.name()) {
            return Ok(());
        }
        let mut device = match self.device() {
            // A VM that cannot be resized has its size at boot.
            Err(VmError::Misuse(_)) => return Ok(()),
            found => found?,
        };
        let reached = stay(&mut device)?;
        self.budget.settle(self.files.name(), reached)
    }
}
