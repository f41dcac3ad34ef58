//! Asynchronous events of an admin queue.

use super::Answer;
use crate::proto::feature::event;
use crate::proto::identify::controller;
use crate::proto::{NvmeStatus, log};
use crate::target::controller::notice;

/// The most asynchronous event requests held at a time.
pub(super) const REQUESTS: usize = 4;

/// Asynchronous events (Base, section 5.2 "Asynchronous Event Request command").
#[derive(Debug, Default)]
pub(super) struct Events {
    /// The identifiers of the requests that wait for an event.
    requests: Vec<u16>,
    /// The enabled events, as bits of the feature.
    pub(super) wanted: u32,
    /// The events that occurred and are not reported yet, as bits of [`notice`].
    pending: u32,
    /// The events reported and not repeated until the host reads the log page about them.
    told: u32,
    /// Whether the namespace has changed since the host last read the log of changed namespaces.
    namespace_changed: bool,
}

/// All events: the notice, the bit that enables its event, the result that reports it, the log page
/// to read.
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
    /// Holds a request until an event occurs.
    pub(super) fn request(&mut self, id: u16) -> Result<Answer, NvmeStatus> {
        if self.requests.len() >= REQUESTS {
            return Err(NvmeStatus::ASYNC_LIMIT.final_());
        }
        self.requests.push(id);
        Ok(Answer::Later)
    }

    /// Removes a request. Returns false if there is none.
    pub(super) fn withdraw(&mut self, id: u16) -> bool {
        let before = self.requests.len();
        self.requests.retain(|&request| request != id);
        self.requests.len() < before
    }

    /// Records events that have occurred.
    pub(super) fn note(&mut self, notices: u32) {
        self.pending |= notices;
        self.namespace_changed |= notices & notice::NAMESPACE != 0;
    }

    /// Takes a waiting request and an event to report by it, if there are both.
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

    /// Records that the host has read a log page, and reports later events about it again.
    pub(super) fn read(&mut self, page: u8) {
        for (bit, _, _, log) in ALL {
            if log == page {
                self.told &= !bit;
                // The log page includes the earlier changes.
                self.pending &= !bit;
            }
        }
    }

    /// Returns whether the namespace has changed; resets that unless `keep` is set.
    pub(super) fn take_namespace_changed(&mut self, keep: bool) -> bool {
        let changed = self.namespace_changed;
        self.namespace_changed &= keep;
        changed
    }
}
