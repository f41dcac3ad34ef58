//! Requests that the host has not answered yet. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Who has asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asker {
    /// The agent itself.
    Own,
    /// An application, by its number.
    Client(u64),
}

/// Requests by their numbers.
#[derive(Debug)]
pub(super) struct Pending {
    next: u64,
    requests: BTreeMap<u64, (Asker, Instant)>,
}

impl Pending {
    /// Numbers begin after `before`, which an agent that is started later must give as more.
    pub(super) fn new(before: u64) -> Self {
        Self { next: before + 1, requests: BTreeMap::new() }
    }

    /// Notes a request, whose answer may take so long; its number.
    pub(super) fn add(&mut self, asker: Asker, now: Instant, patience: Duration) -> u64 {
        let id = self.next;
        self.next += 1;
        self.requests.insert(id, (asker, now + patience));
        id
    }

    /// The host has answered; who is to hear it.
    pub(super) fn answered(&mut self, id: u64) -> Option<Asker> {
        self.requests.remove(&id).map(|(asker, _)| asker)
    }

    /// Takes out a request to which there is no answer in time.
    pub(super) fn late(&mut self, now: Instant) -> Option<Asker> {
        let id = *self.requests.iter().find(|(_, (_, until))| *until <= now)?.0;
        self.answered(id)
    }

    /// Takes out any: the host has gone.
    pub(super) fn any(&mut self) -> Option<Asker> {
        self.requests.pop_first().map(|(_, (asker, _))| asker)
    }

    /// Whether an application waits for an answer.
    pub(super) fn has(&self, client: u64) -> bool {
        self.requests.values().any(|(asker, _)| *asker == Asker::Client(client))
    }

    /// When the next one is late.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.requests.values().map(|(_, until)| *until).min()
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_goes_to_who_asked_once_and_nobody_waits_for_ever() {
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
