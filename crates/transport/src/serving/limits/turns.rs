//! Turns between borrowers that wait for the same tokens: start-time fair queueing.
//!
//! Each child of a node counts what it got. While others wait, a child may be ahead of the one that
//! got least by a quantum only. A child that was idle starts where the others are, so it cannot
//! save up turns (\[Goyal96\], section 2).

use aquifer_page::PAGE_SIZE;

/// Weight of a request beside its bytes, so that requests without data take turns, too.
const REQUEST_WEIGHT: u64 = 512;
/// Least quantum: a page with its request.
const LEAST_QUANTUM: u64 = PAGE_SIZE as u64 + REQUEST_WEIGHT;

/// What one child of a node got, and how many of its connections wait.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn {
    got: u64,
    waiting: u32,
}

impl Turn {
    /// Forgets what the child got.
    pub(super) fn reset(&mut self) {
        self.got = 0;
    }

    /// Moves a child that was idle up to the others.
    pub(super) fn wake(&mut self, floor: u64) {
        if self.waiting == 0 {
            self.got = self.got.max(floor);
        }
    }

    /// Records that a connection begins to wait.
    pub(super) fn queue(&mut self) {
        self.waiting += 1;
    }

    /// Records that a connection no longer waits.
    pub(super) fn unqueue(&mut self) {
        self.waiting = self.waiting.saturating_sub(1);
    }

    /// Records a request that passes, and raises the node's floor. The floor stays a quantum
    /// behind, as a child that sends one request at a time does not wait between two of them.
    pub(super) fn pass(&mut self, floor: &mut u64, quantum: u64, bytes: u64) {
        *floor = (*floor).max(self.got.saturating_sub(quantum.max(LEAST_QUANTUM)));
        self.got = self.got.saturating_add(bytes).saturating_add(REQUEST_WEIGHT);
    }

    /// Returns what the child got, if a connection of it waits.
    pub(super) fn waits_at(&self) -> Option<u64> {
        (self.waiting > 0).then_some(self.got)
    }

    /// Returns whether the child may pass, beside the waiting one that got `least`.
    pub(super) fn may_pass(&self, least: Option<u64>, quantum: u64) -> bool {
        least.is_none_or(|least| self.got <= least.saturating_add(quantum.max(LEAST_QUANTUM)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_waits_only_if_it_is_a_quantum_ahead() {
        let mut turn = Turn::default();
        assert!(turn.may_pass(None, 0));
        assert!(turn.may_pass(Some(0), 0));
        turn.pass(&mut 0, 0, 2 * LEAST_QUANTUM);
        assert!(turn.may_pass(None, 0), "no other waits");
        assert!(!turn.may_pass(Some(0), 0));
        assert!(turn.may_pass(Some(0), 3 * LEAST_QUANTUM));
    }

    #[test]
    fn an_idle_child_saves_up_no_turns() {
        let (mut busy, mut idle, mut floor) = (Turn::default(), Turn::default(), 0);
        (0..100).for_each(|_| busy.pass(&mut floor, 0, 4096));
        idle.wake(floor);
        assert!(idle.got > busy.got - 4 * LEAST_QUANTUM, "it starts near the other");
        idle.queue();
        let waits_since = idle.waits_at();
        (0..9).for_each(|_| busy.pass(&mut floor, 0, 4096));
        idle.wake(floor);
        assert_eq!(idle.waits_at(), waits_since, "a child that waits keeps its turn");
    }
}
