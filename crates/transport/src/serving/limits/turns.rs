//! Turns between borrowers that wait for the same tokens: start-time fair queueing.
//!
//! Each child of a node counts what it got. While others wait, a child may be ahead of the one that
//! got least by a quantum only. A child that was idle starts where the others are, so it cannot
//! save up turns (\[Goyal96\], section 2).

use std::ops::AddAssign;

use aquifer_page::PAGE_SIZE;

/// Weight of a request beside its bytes, so that requests without data take turns, too.
const REQUEST_WEIGHT: u64 = 512;
/// Least quantum: a page with its request.
const LEAST_QUANTUM: u64 = PAGE_SIZE as u64 + REQUEST_WEIGHT;

/// Requests, and the bytes of their data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ahead {
    pub(super) requests: u64,
    pub(super) bytes: u64,
}

impl AddAssign for Ahead {
    fn add_assign(&mut self, other: Self) {
        self.requests = self.requests.saturating_add(other.requests);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// The requests of one lease that wait, in the order in which they came.
///
/// It counts, and knows nobody in it. If one leaves out of order, those before it seem to be
/// further ahead than they are, and ask a little too early.
#[derive(Clone, Debug, Default)]
pub(super) struct Line {
    /// The number of the next one that joins.
    next: u64,
    left: u64,
}

impl Line {
    /// Returns the number that the next one gets.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Records that a request begins to wait.
    pub(super) fn join(&mut self) {
        self.next += 1;
    }

    /// Records that a request no longer waits.
    pub(super) fn leave(&mut self) {
        self.left += 1;
    }

    /// Returns what is before this number, if all requests are this long.
    pub(super) fn before(&self, number: u64, bytes: u64) -> Ahead {
        let requests = number.saturating_sub(self.left);
        Ahead { requests, bytes: requests.saturating_mul(bytes) }
    }
}

/// What one child of a node got, and which of its requests wait.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn {
    got: u64,
    waiting: u32,
    /// Bytes of the requests that wait.
    bytes: u64,
    /// The arrival of the first of them.
    since: u64,
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

    /// Records that a connection waits with a request of so many bytes, which arrived as this
    /// number.
    pub(super) fn queue(&mut self, bytes: u64, since: u64) {
        self.since = if self.waiting == 0 { since } else { self.since.min(since) };
        self.waiting += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Records that a connection with such a request no longer waits.
    pub(super) fn unqueue(&mut self, bytes: u64) {
        self.waiting = self.waiting.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// Records a request that passes, and raises the node's floor. The floor stays a quantum
    /// behind, as a child that sends one request at a time does not wait between two of them.
    pub(super) fn pass(&mut self, floor: &mut u64, quantum: u64, bytes: u64) {
        *floor = (*floor).max(self.got.saturating_sub(quantum.max(LEAST_QUANTUM)));
        self.got = self.got.saturating_add(bytes).saturating_add(REQUEST_WEIGHT);
    }

    /// Records work that a request turned out to take.
    pub(super) fn charge(&mut self, bytes: u64) {
        self.got = self.got.saturating_add(bytes);
    }

    /// Returns what the child got, if a connection of it waits.
    pub(super) fn waits_at(&self) -> Option<u64> {
        (self.waiting > 0).then_some(self.got)
    }

    /// Returns what the child of a node got that got least of those that wait. Adds to `ahead`,
    /// which is before a request of this child, what other children get until then. The request
    /// arrived as number `since`.
    pub(super) fn among<'a>(
        &self,
        children: impl Iterator<Item = &'a Self>,
        since: u64,
        ahead: &mut Ahead,
    ) -> Option<u64> {
        let own = ahead.bytes.saturating_add(ahead.requests.saturating_mul(REQUEST_WEIGHT));
        let got = self.got.saturating_add(own);
        let mut least = None;
        for child in children {
            let Some(waits_at) = child.waits_at() else { continue };
            least = Some(least.map_or(waits_at, |least: u64| least.min(waits_at)));
            if !std::ptr::eq(child, self) {
                *ahead += child.before(got, since);
            }
        }
        least
    }

    /// Returns the requests that come before one of another child, which `got` this much: those
    /// that make both equal. If both are, the one that waits longer is first.
    fn before(&self, got: u64, since: u64) -> Ahead {
        if self.waiting == 0 || (self.got, self.since) >= (got, since) {
            return Ahead::default();
        }
        let waiting = u64::from(self.waiting);
        let each = self.bytes / waiting;
        let behind = got.saturating_sub(self.got) / (each + REQUEST_WEIGHT);
        let requests = behind.clamp(1, waiting);
        Ahead { requests, bytes: requests.saturating_mul(each) }
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
        idle.queue(4096, 0);
        let waits_since = idle.waits_at();
        (0..9).for_each(|_| busy.pass(&mut floor, 0, 4096));
        idle.wake(floor);
        assert_eq!(idle.waits_at(), waits_since, "a child that waits keeps its turn");
    }

    #[test]
    fn a_request_sleeps_for_those_that_got_less() {
        let page = 4096;
        let (mut own, mut other, mut even) = (Turn::default(), Turn::default(), Turn::default());
        (0..10).for_each(|_| own.pass(&mut 0, 0, page));
        (0..10).for_each(|_| even.pass(&mut 0, 0, page));
        (0..7).for_each(|_| other.pass(&mut 0, 0, page));
        let since = 5;
        let ahead = |other: &Turn, even: &Turn| {
            let mut ahead = Ahead::default();
            (own.among([&own, other, even].into_iter(), since, &mut ahead), ahead)
        };
        assert_eq!(ahead(&other, &even), (None, Ahead::default()), "nobody waits");
        other.queue(page, 9);
        let one = Ahead { requests: 1, bytes: page };
        assert_eq!(ahead(&other, &even), (Some(other.got), one), "it has one request");
        (0..9).for_each(|_| other.queue(page, 9));
        let three = Ahead { requests: 3, bytes: 3 * page };
        assert_eq!(ahead(&other, &even).1, three, "until both got the same");
        even.queue(page, 9);
        assert_eq!(ahead(&other, &even).1, three, "it came later");
        even.queue(page, 2);
        let four = Ahead { requests: 4, bytes: 4 * page };
        assert_eq!(ahead(&other, &even).1, four, "it came first");
        let mut more = Ahead { requests: 2, bytes: 2 * page };
        own.among([&own, &other, &even].into_iter(), since, &mut more);
        let ahead = Ahead { requests: 9, bytes: 9 * page };
        assert_eq!(more, ahead, "until its turn, 5 of one and 2 of the other");
    }

    #[test]
    fn those_in_a_line_come_one_after_the_other() {
        let mut line = Line::default();
        let numbers: Vec<_> = (0..3).map(|_| (line.next(), line.join()).0).collect();
        let before = |line: &Line| numbers.iter().map(|one| line.before(*one, 10).bytes).collect();
        let all: Vec<u64> = before(&line);
        assert_eq!(all, [0, 10, 20]);
        line.leave();
        let all: Vec<u64> = before(&line);
        assert_eq!(all, [0, 0, 10]);
    }
}
