use super::Answer;
use crate::nvme::proto::feature::event;
use crate::nvme::proto::identify::controller;
use crate::nvme::proto::{Status, log};
use crate::nvme::target::controller::notice;

/// Asynchronous event requests at a time.
pub(super) const REQUESTS: usize = 4;

/// Asynchronous events (Base, section 5.2 "Asynchronous Event Request command").
#[derive(Debug, Default)]
pub(super) struct Events {
    /// The requests that wait for an event.
    requests: Vec<u16>,
    /// The events that are wanted, as the feature has it.
    pub(super) wanted: u32,
    /// What has happened and is not told yet, see [`notice`].
    pending: u32,
    /// What was told, and is not told again before the host has read the log about it.
    told: u32,
    /// The namespace has changed since the host read the log about that.
    namespace_changed: bool,
}

/// Everything there is to tell: what happens, the bit by which it is wanted, what is told, and the log to read.
const ALL: [(u32, u32, u32, u8); 2] = [
    (
        notice::NAMESPACE,
        controller::NAMESPACE_ATTRIBUTE_NOTICES,
        event::NAMESPACE_CHANGED,
        log::page::CHANGED_NAMESPACES,
    ),
    (
        notice::DISCOVERY,
        controller::DISCOVERY_LOG_NOTICES,
        event::DISCOVERY_CHANGED,
        log::page::DISCOVERY,
    ),
];

impl Events {
    /// Takes a request, to be answered later.
    pub(super) fn request(&mut self, id: u16) -> Result<Answer, Status> {
        if self.requests.len() >= REQUESTS {
            return Err(Status::ASYNC_LIMIT.final_());
        }
        self.requests.push(id);
        Ok(Answer::Later)
    }

    /// Takes a request back. False if there is none.
    pub(super) fn withdraw(&mut self, id: u16) -> bool {
        let before = self.requests.len();
        self.requests.retain(|&request| request != id);
        self.requests.len() < before
    }

    /// Notes what has happened.
    pub(super) fn note(&mut self, notices: u32) {
        self.pending |= notices;
        self.namespace_changed |= notices & notice::NAMESPACE != 0;
    }

    /// A request and its answer, if there is something to tell.
    pub(super) fn next(&mut self) -> Option<(u16, u32)> {
        let ready = self.pending & !self.told;
        let (bit, _, event, _) = ALL
            .into_iter()
            .find(|(bit, wanted, ..)| ready & bit != 0 && self.wanted & wanted != 0)?;
        let request = self.requests.pop()?;
        self.pending &= !bit;
        self.told |= bit;
        Some((request, event))
    }

    /// The host has read a log, and is told of what happens from here on.
    pub(super) fn read(&mut self, page: u8) {
        for (bit, _, _, log) in ALL {
            if log == page {
                self.told &= !bit;
                // What happened before is in the log.
                self.pending &= !bit;
            }
        }
    }

    /// Whether the namespace has changed since this was asked last.
    pub(super) fn take_namespace_changed(&mut self, keep: bool) -> bool {
        let changed = self.namespace_changed;
        self.namespace_changed &= keep;
        changed
    }
}
