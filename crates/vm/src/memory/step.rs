//! The execution of a resize: backend and guest, in the required order (\[Bielski18\], section III
//! and Fig. 2).

use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::Bytes;

use super::device::Device;
use super::figures::Need;
use super::port::Question;
use super::resize::{Order, Short};
use super::stages::Took;
use super::{VmMemory, counts};
use crate::error::VmError;

/// A guest whose size has not changed for this long is asked again.
const STALL: Duration = Duration::from_secs(2);

/// How often it is asked then.
const AGAIN: Duration = Duration::from_secs(1);

/// How often a guest's size is read if its agent announces the end.
const GLANCE: Duration = Duration::from_millis(20);

/// How long a guest may take to begin: the first change may take longer than later ones.
const SILENCE: Duration = Duration::from_secs(10);

/// How often a guest that has given all it could is checked for more.
const LOOK: Duration = Duration::from_millis(200);

/// Memory that a shrinking guest keeps available: this size, or one part in `LEFT_SHARE` of its
/// memory.
const LEFT: Bytes = Bytes::mib(48);
const LEFT_SHARE: u64 = 16;

/// The agent's pending announcement that the guest counts `all`.
#[derive(Clone, Copy)]
struct Promise {
    question: Question,
    all: Bytes,
}

/// The outcome of waiting.
struct Waited {
    /// Size reached.
    reached: Bytes,
    /// Why no more was reached.
    why: Option<Short>,
    /// Whether the agent announced that the guest counts everything.
    told: bool,
}

/// The end of a resize.
pub(super) struct End {
    pub(super) reached: Bytes,
    pub(super) why: Option<Short>,
    pub(super) usable: Option<bool>,
}

/// A resize in progress.
pub(super) struct Step<'a> {
    pub(super) memory: &'a VmMemory,
    pub(super) device: Device,
    pub(super) from: Bytes,
    pub(super) to: Bytes,
    pub(super) stages: Vec<Took>,
    pub(super) retries: u32,
    /// A question for figures that a shrinking guest's agent was already sent.
    pub(super) asked: Option<Question>,
    /// Whether a shrinking guest did not say what it needs.
    pub(super) is_untold: bool,
}

impl Step<'_> {
    fn took(&mut self, stage: &str, since: Instant) {
        self.stages.push(Took { stage: stage.to_owned(), us: since.elapsed().as_secs_f64() * 1e6 });
    }

    /// Grows the VM: the backend first, then the guest.
    pub(super) fn grow(
        &mut self,
        order: &Order,
        tell: &mut dyn FnMut(Bytes) -> bool,
    ) -> Result<End, VmError> {
        let (memory, vm) = (self.memory, self.memory.files.name());
        let before = memory.total_now(&mut self.device, self.from)?;
        let began = Instant::now();
        memory.budget.grow(vm, self.to.saturating_sub(self.from), order.urgent)?;
        self.took("backend_reservation", began);
        let began = Instant::now();
        // The agent announces when the guest counts all of it, so that the size need not be polled
        // often.
        let all = before.map(|before| counts(before, self.to.saturating_sub(self.from)));
        let promise = all.and_then(|all| Some(Promise { question: memory.port.ask(all)?, all }));
        let waited = self.wait(order, promise, tell);
        self.took("request_reply", began);
        let Waited { reached, why, told } = waited?;
        if reached < self.to {
            memory.budget.settle(vm, reached)?;
        }
        if reached == self.from {
            return Ok(End { reached, why, usable: None });
        }
        let began = Instant::now();
        let offline = match before.map(|before| counts(before, reached.saturating_sub(self.from))) {
            Some(_) if told => Some(Bytes::ZERO),
            Some(needed) => {
                let question =
                    promise.map(|promise| promise.question).filter(|_| reached == self.to);
                memory.confirm(&mut self.device, needed, question)?
            }
            None => None,
        };
        self.took("confirmation", began);
        let usable = offline.map(|offline| offline == Bytes::ZERO);
        let idle = offline.filter(|offline| *offline > Bytes::ZERO);
        Ok(End { reached, why: why.or(idle.map(|offline| Short::NotOnline { offline })), usable })
    }

    /// Shrinks the VM: the guest first, then the backend.
    pub(super) fn shrink(
        &mut self,
        order: &Order,
        tell: &mut dyn FnMut(Bytes) -> bool,
    ) -> Result<End, VmError> {
        let (memory, vm) = (self.memory, self.memory.files.name());
        let began = Instant::now();
        let waited = self.wait(order, None, tell);
        self.took("request_reply", began);
        let Waited { reached, why, .. } = waited?;
        let began = Instant::now();
        memory.budget.settle(vm, reached)?;
        self.took("backend_release", began);
        Ok(End { reached, why, usable: None })
    }

    /// Requests the size, and waits until the guest has got as far as it can.
    fn wait(
        &mut self,
        order: &Order,
        mut promise: Option<Promise>,
        tell: &mut dyn FnMut(Bytes) -> bool,
    ) -> Result<Waited, VmError> {
        let began = Instant::now();
        let (mut size, mut moved, mut asked) = (self.from, began, began);
        let mut goal = self.goal(size)?;
        self.device.request(goal)?;
        let mut told = false;
        loop {
            let now = self.device.size()?;
            if now == self.to {
                return Ok(Waited { reached: now, why: None, told });
            }
            if now != size {
                (size, moved) = (now, Instant::now());
            }
            if !tell(size) {
                let reached = stay(&mut self.device)?;
                return Ok(Waited { reached, why: Some(Short::Interrupted), told });
            }
            let (timeout, next) = if now == goal {
                // The guest has given all that it could. By now it may have more to give.
                let further = self.goal(now)?;
                if further < goal {
                    (goal, moved) = (further, Instant::now());
                    self.device.request(goal)?;
                    continue;
                }
                (order.retry, LOOK)
            } else if size == self.from {
                (SILENCE, pause(began.elapsed()))
            } else {
                (STALL + order.retry, pause(began.elapsed()))
            };
            let idle = moved.elapsed();
            if idle >= timeout {
                return self.give_up(told);
            }
            if now != goal && idle > STALL && asked.elapsed() > AGAIN {
                self.device.request_again(goal)?;
                (self.retries, asked) = (self.retries + 1, Instant::now());
            }
            match promise {
                None => thread::sleep(next),
                Some(Promise { question, all }) => {
                    let report = self.memory.port.answer(question, next.max(GLANCE));
                    told |= report.is_some_and(|report| report.total >= all);
                    promise = promise.filter(|_| !told);
                }
            }
        }
    }

    /// Returns the size to request of a guest that has `size`: all of it when growing. When
    /// shrinking, the guest keeps the memory in use and a margin, or all while it does not say what
    /// is in use: asked for more, its kernel would kill programs.
    fn goal(&mut self, size: Bytes) -> Result<Bytes, VmError> {
        if self.to > self.from {
            return Ok(self.to);
        }
        let need = self.memory.need(&mut self.device, self.asked.take())?;
        self.is_untold = need == Need::Untold;
        let figures = match need {
            Need::Known(figures) => figures,
            Need::Untold => return Ok(size),
            Need::NoSource => return Ok(self.to),
        };
        let keeps = LEFT.max(Bytes(figures.total.0 / LEFT_SHARE));
        let gives = figures.available.saturating_sub(keeps).0 / self.device.is.block.0
            * self.device.is.block.0;
        Ok(size.saturating_sub(Bytes(gives)).max(self.to))
    }

    /// Stops at the size reached, and says why that is not all.
    fn give_up(&mut self, told: bool) -> Result<Waited, VmError> {
        let answers = !self.is_untold && self.memory.answers(&mut self.device)?;
        let reached = stay(&mut self.device)?;
        let why = if self.is_untold {
            Short::NoFigures
        } else if answers && self.to < self.from {
            Short::InUse {
                available: self.memory.figures(&mut self.device)?.map(|is| is.available),
            }
        } else {
            Short::NoAnswer
        };
        Ok(Waited { reached, why: (reached != self.to).then_some(why), told })
    }
}

/// Returns the pause until the next look at the size: a fiftieth of the time elapsed. So the delay
/// adds little, and the guest loses little time to QEMU's answers.
fn pause(elapsed: Duration) -> Duration {
    (elapsed / 50).clamp(Duration::from_millis(1), Duration::from_millis(10))
}

/// Stops a resize at the VM's current size, and returns that size.
pub(super) fn stay(device: &mut Device) -> Result<Bytes, VmError> {
    // The size may still change.
    loop {
        let size = device.size()?;
        device.request(size)?;
        if device.size()? == size {
            return Ok(size);
        }
    }
}
