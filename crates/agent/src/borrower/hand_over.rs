//! Leases on their way to regions in the making. The maker of a region says whether it exists.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use aquifer_page::{VolumeId, lock};

/// How a hand-over ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The region exists, and has the leases.
    Taken,
    /// It does not use them, for this reason.
    Refused(String),
}

/// The hand-overs in progress, each with its outcome once known.
#[derive(Debug, Default)]
pub(super) struct HandOvers {
    open: Mutex<BTreeMap<VolumeId, Option<Outcome>>>,
    changed: Condvar,
}

impl HandOvers {
    /// Begins a hand-over, unless it has begun.
    pub(super) fn begin(&self, volume: VolumeId) {
        lock(&self.open).entry(volume).or_default();
    }

    /// Returns whether a hand-over has begun, and nobody has taken its outcome.
    pub(super) fn is_open(&self, volume: VolumeId) -> bool {
        lock(&self.open).contains_key(&volume)
    }

    /// Tells the outcome. Returns false if the hand-over is over, or had another outcome before.
    pub(super) fn end(&self, volume: VolumeId, outcome: Outcome) -> bool {
        let mut open = lock(&self.open);
        let Some(known) = open.get_mut(&volume) else { return false };
        let is_first = known.get_or_insert_with(|| outcome.clone()) == &outcome;
        self.changed.notify_all();
        is_first
    }

    /// Waits for the outcome, and takes it. `None` after `timeout`: from then on it is too late.
    pub(super) fn wait(&self, volume: VolumeId, timeout: Duration) -> Option<Outcome> {
        let waits = |open: &mut BTreeMap<VolumeId, Option<Outcome>>| {
            matches!(open.get(&volume), Some(None))
        };
        let (mut open, _) = self
            .changed
            .wait_timeout_while(lock(&self.open), timeout, waits)
            .unwrap_or_else(PoisonError::into_inner);
        open.remove(&volume).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: VolumeId = VolumeId(1);
    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn a_hand_over_waits_for_its_outcome() {
        let hand_overs = HandOvers::default();
        hand_overs.begin(VOLUME);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| hand_overs.wait(VOLUME, LONG));
            assert!(hand_overs.end(VOLUME, Outcome::Taken));
            assert_eq!(waits.join().unwrap(), Some(Outcome::Taken));
        });
        assert!(!hand_overs.is_open(VOLUME));
    }

    #[test]
    fn an_outcome_after_the_timeout_is_too_late() {
        let hand_overs = HandOvers::default();
        hand_overs.begin(VOLUME);
        assert_eq!(hand_overs.wait(VOLUME, Duration::ZERO), None);
        assert!(!hand_overs.end(VOLUME, Outcome::Taken));
    }

    #[test]
    fn the_first_outcome_counts() {
        let hand_overs = HandOvers::default();
        hand_overs.begin(VOLUME);
        let refused = Outcome::Refused("its maker is gone".to_owned());
        assert!(hand_overs.end(VOLUME, refused.clone()));
        assert!(!hand_overs.end(VOLUME, Outcome::Taken));
        assert!(hand_overs.end(VOLUME, refused.clone()), "a copy of the word");
        assert_eq!(hand_overs.wait(VOLUME, LONG), Some(refused));
    }
}
