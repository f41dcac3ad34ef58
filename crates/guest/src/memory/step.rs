//! What is done in a resize: the backend and the guest, in the order in which it must be (Resizing, section III and Fig. 2).

use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::Bytes;

use super::device::Device;
use super::port::Question;
use super::resize::{Order, Short};
use super::stages::Took;
use super::{Memory, counts};
use crate::error::GuestError;

/// A guest whose size stays the same for so long is asked again.
const STALL: Duration = Duration::from_secs(2);

/// How often it is asked then.
const AGAIN: Duration = Duration::from_secs(1);

/// How often a guest is looked at that will say when it has all.
const GLANCE: Duration = Duration::from_millis(20);

/// A guest that has not begun after so long does nothing: a first answer may take longer than others.
const SILENCE: Duration = Duration::from_secs(10);

/// How often it is looked whether a guest that has given what it could can give more.
const LOOK: Duration = Duration::from_millis(200);

/// What a guest keeps available when it shrinks, and of which share of its memory.
const LEFT: Bytes = Bytes::mib(48);
const LEFT_SHARE: u64 = 16;

/// The guest will say when it counts so much.
#[derive(Clone, Copy)]
struct Promise {
    question: Question,
    all: Bytes,
}

/// What came of waiting.
struct Waited {
    /// What the VM has come to.
    reached: Bytes,
    /// Why to no more.
    why: Option<Short>,
    /// Whether the guest has said that it has all.
    told: bool,
}

/// How it has ended.
pub(super) struct End {
    pub(super) reached: Bytes,
    pub(super) why: Option<Short>,
    pub(super) usable: Option<bool>,
}

/// A resize on its way.
pub(super) struct Step<'a> {
    pub(super) memory: &'a Memory,
    pub(super) device: Device,
    pub(super) from: Bytes,
    pub(super) to: Bytes,
    pub(super) stages: Vec<Took>,
    pub(super) retries: u32,
    /// What the guest's agent was asked meanwhile, when it is to give: what there is to give.
    pub(super) asked: Option<Question>,
}

impl Step<'_> {
    fn took(&mut self, stage: &str, since: Instant) {
        self.stages.push(Took { stage: stage.to_owned(), us: since.elapsed().as_secs_f64() * 1e6 });
    }

    /// The backend first, then the guest.
    pub(super) fn grow(
        &mut self,
        order: &Order,
        tell: &mut dyn FnMut(Bytes) -> bool,
    ) -> Result<End, GuestError> {
        let (memory, vm) = (self.memory, self.memory.files.name());
        let before = memory.total_now(&mut self.device, self.from)?;
        let began = Instant::now();
        memory.budget.grow(vm, self.to.saturating_sub(self.from), order.urgent)?;
        self.took("backend_reservation", began);
        let began = Instant::now();
        // It tells when it has all of it, and need not be looked at all the time until then.
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

    /// The guest first, then the backend.
    pub(super) fn shrink(
        &mut self,
        order: &Order,
        tell: &mut dyn FnMut(Bytes) -> bool,
    ) -> Result<End, GuestError> {
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

    /// Asks the guest, and waits for it to do what it can.
    fn wait(
        &mut self,
        order: &Order,
        mut promise: Option<Promise>,
        tell: &mut dyn FnMut(Bytes) -> bool,
    ) -> Result<Waited, GuestError> {
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
            let (patience, next) = if now == goal {
                // It has given what it could. By now that may be more.
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
            if idle >= patience {
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

    /// What the guest is to be asked for that has so much: all, when it grows. When it shrinks it keeps what it uses, and some: a kernel that is
    /// asked for more than that kills programs to give it.
    fn goal(&mut self, size: Bytes) -> Result<Bytes, GuestError> {
        if self.to > self.from {
            return Ok(self.to);
        }
        let Some(figures) = self.memory.fresh_figures(&mut self.device, self.asked.take())? else {
            return Ok(self.to);
        };
        let keeps = LEFT.max(Bytes(figures.total.0 / LEFT_SHARE));
        let gives = figures.available.saturating_sub(keeps).0 / self.device.is.block.0
            * self.device.is.block.0;
        Ok(size.saturating_sub(Bytes(gives)).max(self.to))
    }

    /// Has the VM stay at what it has come to, and says why that is not all.
    fn give_up(&mut self, told: bool) -> Result<Waited, GuestError> {
        let answers = self.memory.answers(&mut self.device)?;
        let reached = stay(&mut self.device)?;
        let why = if answers && self.to < self.from {
            Short::InUse {
                available: self.memory.figures(&mut self.device)?.map(|is| is.available),
            }
        } else {
            Short::NoAnswer
        };
        Ok(Waited { reached, why: (reached != self.to).then_some(why), told })
    }
}

/// How long to wait until a guest is looked at again: a fiftieth of the time that it has taken, so that what is late is late by a hundredth, and the
/// guest loses little to QEMU's answers.
fn pause(elapsed: Duration) -> Duration {
    (elapsed / 50).clamp(Duration::from_millis(1), Duration::from_millis(10))
}

/// Has a VM stay at the size that it has.
pub(super) fn stay(device: &mut Device) -> Result<Bytes, GuestError> {
    // It may be moving still.
    loop {
        let size = device.size()?;
        device.request(size)?;
        if device.size()? == size {
            return Ok(size);
        }
    }
}
