//! The requests that the host has not answered yet: state without I/O.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The origin of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asker {
    /// The agent itself.
    Own,
    /// An application, by its number.
    Client(u64),
}

/// The unanswered requests, by number.
#[derive(Debug)]
pub(super) struct Pending {
    next: u64,
    requests: BTreeMap<u64, (Asker, Instant)>,
}

impl Pending {
    /// Starts numbering after `before`. An agent that starts later must pass a greater number.
    pub(super) fn new(before: u64) -> Self {
        Self { next: before + 1, requests: BTreeMap::new() }
    }

    /// Adds a request with this timeout for its answer; returns its number.
    pub(super) fn add(&mut self, asker: Asker, now: Instant, timeout: Duration) -> u64 {
        let id = self.next;
        self.next += 1;
        self.requests.insert(id, (asker, now + timeout));
        id
    }

    /// Removes an answered request; returns its origin.
    pub(super) fn answered(&mut self, id: u64) -> Option<Asker> {
        self.requests.remove(&id).map(|(asker, _)| asker)
    }

    /// Removes a request that has timed out.
    pub(super) fn late(&mut self, now: Instant) -> Option<Asker> {
        let id = *self.requests.iter().find(|(_, (_, until))| *until <= now)?.0;
        self.answered(id)
    }

    /// Removes any request, after the host has gone.
    pub(super) fn any(&mut self) -> Option<Asker> {
        self.requests.pop_first().map(|(_, (asker, _))| asker)
    }

    /// Returns whether an application waits for an answer.
    pub(super) fn has(&self, client: u64) -> bool {
        self.requests.values().any(|(asker, _)| *asker == Asker::Client(client))
    }

    /// Returns when the next request times out.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.requests.values().map(|(_, until)| *until).min()
    }

    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_reaches_its_asker_once_and_every_wait_ends() {
        let (mut pending, now) = (Pending::new(41), Instant::now());
        let one = pending.add(Asker::Client(1), now, Duration::from_secs(9));
        let own = pending.add(Asker::Own, now, Duration::from_secs(3));
        assert_eq!((one, own, pending.len()), (42, 43, 2));
        assert!(pending.has(1) && !pending.has(2));
        assert_eq!(pending.deadline(), Some(now + Duration::from_secs(3)));
        assert_eq!(pending.late(now), None);
        assert_eq!(pending.late(now + Duration::from_secs(3)), Some(Asker::Own));
        assert_eq!(pending.answered(own), None);
        assert_eq!(pending.answered(one), Some(Asker::Client(1)));
        assert_eq!(pending.answered(one), None);
        assert_eq!(pending.any(), None);
    }
}
