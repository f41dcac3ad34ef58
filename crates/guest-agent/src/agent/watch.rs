//! The agent's watch over the guest's memory.

use std::io;
use std::path::Path;
use std::time::Instant;

use aquifer_page::Bytes;

use crate::figures::{Figures, Online};
use crate::message::GuestReport;
use crate::urgency::{SampledMemory, Urgency};

/// The figures of the memory, and the decision whether more is urgent.
#[derive(Debug)]
pub(super) struct Watch {
    figures: Figures,
    /// The newest figures; a sample does not renew all of them.
    last: GuestReport,
    urgency: Urgency,
    /// Time of the next look, if any.
    pub(super) next_look: Option<Instant>,
}

impl Watch {
    pub(super) fn new(root: &Path) -> io::Result<Self> {
        let mut figures = Figures::open(root)?;
        let last = figures.read()?;
        Ok(Self { figures, last, urgency: Urgency::default(), next_look: None })
    }

    /// Makes less available memory than `below` urgent.
    pub(super) fn set_limit(&mut self, below: Bytes, now: Instant) {
        self.urgency.watch(below);
        self.next_look = self.urgency.interval().map(|_| now);
    }

    /// Returns the limit; zero if nothing is urgent.
    pub(super) fn limit(&self) -> Bytes {
        self.urgency.below()
    }

    /// Forgets the limit.
    pub(super) fn end(&mut self) {
        self.urgency = Urgency::default();
        self.next_look = None;
    }

    /// Looks at the memory. Returns how much to ask for, and why, if it is urgent.
    pub(super) fn look(&mut self, now: Instant) -> Option<(Bytes, String)> {
        let memory = self.sample().ok();
        let urgent = memory.and_then(|memory| self.urgency.look(now, memory));
        self.next_look = self.urgency.interval().map(|interval| now + interval);
        Some((urgent?, format!("{} of {} is available", self.last.available, self.last.total)))
    }

    /// Decides the same after tasks stalled for memory.
    pub(super) fn stalls(&mut self, now: Instant) -> Option<(Bytes, String)> {
        let memory = self.sample().ok()?;
        let urgent = self.urgency.stalls(now, memory)?;
        let GuestReport { available, total, .. } = &self.last;
        Some((urgent, format!("tasks stall for memory, and {available} of {total} is available")))
    }

    /// Notes that the urgent request has an answer, or gets none.
    pub(super) fn settled(&mut self, now: Instant) {
        self.urgency.settled(now);
    }

    /// Reads what changes from moment to moment.
    pub(super) fn sample(&mut self) -> io::Result<SampledMemory> {
        self.figures.sample(&mut self.last)?;
        let GuestReport { total, available, blocks, .. } = self.last;
        Ok(SampledMemory { total, available, block: blocks.block })
    }

    /// Reads all figures.
    pub(super) fn read(&mut self) -> io::Result<GuestReport> {
        self.last = self.figures.read()?;
        Ok(self.last.clone())
    }

    /// Brings memory online, and reads all figures.
    pub(super) fn check(&mut self, online: Online) -> io::Result<GuestReport> {
        self.last = self.figures.check(online)?;
        Ok(self.last.clone())
    }
}
