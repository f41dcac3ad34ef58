//! When a guest is near out-of-memory, and what it asks for then (Bielski et al. 2018, section III-C: the reactive request). Pure.

use std::time::{Duration, Instant};

use aquifer_page::Bytes;

/// How often a guest looks after its memory that has much of it.
const CALM: Duration = Duration::from_secs(1);

/// How often one looks whose memory goes quickly.
const QUICK: Duration = Duration::from_millis(50);

/// A program may take so much a second without a warning: a guest looks again before what it has is gone at that rate.
const RATE: u64 = 1 << 30;

/// What is short within so long at the rate of the last look is going quickly.
const AHEAD: Duration = Duration::from_secs(3);

/// After an answer, what it brought is given so long to do good.
const REST: Duration = Duration::from_secs(1);

/// What to ask for where the kernel does not name the size of its blocks.
const BLOCK: Bytes = Bytes::mib(128);

/// What a guest has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) total: Bytes,
    pub(crate) available: Bytes,
    /// The size of a memory block.
    pub(crate) block: Bytes,
}

/// Decides when to ask.
#[derive(Debug, Default)]
pub(crate) struct Urgency {
    /// The available memory under which it is urgent; zero if nobody has said.
    below: Bytes,
    last: Option<(Instant, Bytes)>,
    quick: bool,
    /// A request has no answer yet.
    pending: bool,
    rests_until: Option<Instant>,
}

impl Urgency {
    /// From now on it is urgent below this.
    pub(crate) fn watch(&mut self, below: Bytes) {
        self.below = below;
        self.quick = false;
    }

    /// What it was told.
    pub(crate) fn below(&self) -> Bytes {
        self.below
    }

    /// How long until the next look; nothing if there is nothing to look after.
    pub(crate) fn interval(&self) -> Option<Duration> {
        let (_, available) = self.last.unwrap_or((Instant::now(), Bytes::ZERO));
        let spare = available.saturating_sub(self.below).0 as f64 / RATE as f64;
        let soon = Duration::from_secs_f64(spare).clamp(QUICK, CALM);
        (self.below > Bytes::ZERO).then_some(if self.quick { QUICK } else { soon })
    }

    /// A look at the memory; what to ask for at once, if it is urgent. Whoever calls this asks, then.
    pub(crate) fn look(&mut self, now: Instant, memory: Memory) -> Option<Bytes> {
        self.quick = memory.available < self.below || self.goes_quickly(now, memory.available);
        self.last = Some((now, memory.available));
        if memory.available >= self.below {
            return None;
        }
        self.ask(now, memory)
    }

    /// Tasks wait for memory; what to ask for at once. Whoever calls this asks, then.
    ///
    /// Not where half of all memory is available: what is short then is what some cgroup may have.
    pub(crate) fn stalls(&mut self, now: Instant, memory: Memory) -> Option<Bytes> {
        if memory.available.0 > memory.total.0 / 2 {
            return None;
        }
        self.ask(now, memory)
    }

    /// The request was answered, or will not be.
    pub(crate) fn settled(&mut self, now: Instant) {
        self.pending = false;
        self.rests_until = Some(now + REST);
    }

    fn goes_quickly(&self, now: Instant, available: Bytes) -> bool {
        let Some((then, before)) = self.last else { return false };
        let gone = before.saturating_sub(available);
        let took = now.saturating_duration_since(then).as_secs_f64().max(0.001);
        let soon = available.saturating_sub(gone.scaled(AHEAD.as_secs_f64() / took));
        gone > Bytes::ZERO && soon < self.below
    }

    fn ask(&mut self, now: Instant, memory: Memory) -> Option<Bytes> {
        if self.pending || self.rests_until.is_some_and(|until| now < until) {
            return None;
        }
        self.pending = true;
        let block = if memory.block > Bytes::ZERO { memory.block } else { BLOCK };
        let goal = self.below.scaled(2.0).max(memory.total.scaled(0.125));
        let missing = goal.saturating_sub(memory.available).max(block);
        Some(Bytes(missing.0.div_ceil(block.0) * block.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(available: u64) -> Memory {
        Memory { total: Bytes::gib(1), available: Bytes::mib(available), block: Bytes::mib(128) }
    }

    fn watching(below: u64) -> (Urgency, Instant) {
        let mut urgency = Urgency::default();
        urgency.watch(Bytes::mib(below));
        (urgency, Instant::now())
    }

    #[test]
    fn a_guest_below_its_limit_asks_at_once_for_whole_blocks_that_bring_it_well_above() {
        let (mut urgency, now) = watching(100);
        assert_eq!(urgency.look(now, has(100)), None);
        assert_eq!(urgency.look(now, has(99)), Some(Bytes::mib(128)));
        let (mut urgency, now) = watching(200);
        assert_eq!(urgency.look(now, has(20)), Some(Bytes::mib(384)));
    }

    #[test]
    fn it_does_not_ask_again_before_the_answer_nor_within_a_second_of_it() {
        let (mut urgency, now) = watching(100);
        assert!(urgency.look(now, has(50)).is_some());
        assert_eq!(urgency.look(now + Duration::from_secs(60), has(10)), None);
        assert_eq!(urgency.stalls(now + Duration::from_secs(60), has(10)), None);
        let answered = now + Duration::from_secs(61);
        urgency.settled(answered);
        assert_eq!(urgency.look(answered + Duration::from_millis(999), has(10)), None);
        assert!(urgency.look(answered + Duration::from_secs(1), has(10)).is_some());
    }

    #[test]
    fn it_asks_when_tasks_wait_for_memory_even_if_nobody_has_named_a_limit() {
        let mut urgency = Urgency::default();
        assert_eq!(urgency.stalls(Instant::now(), has(300)), Some(Bytes::mib(128)));
        assert_eq!(urgency.interval(), None);
    }

    #[test]
    fn tasks_that_wait_in_a_cgroup_while_the_guest_has_plenty_are_not_urgent() {
        assert_eq!(Urgency::default().stalls(Instant::now(), has(700)), None);
    }

    #[test]
    fn it_looks_often_only_while_its_memory_would_be_short_soon() {
        let (mut urgency, now) = watching(100);
        let at = |seconds| now + Duration::from_secs(seconds);
        urgency.look(at(0), has(900));
        assert!(urgency.interval().unwrap() > QUICK * 5);
        urgency.look(at(1), has(890));
        assert!(urgency.interval().unwrap() > QUICK * 5, "10 MiB/s is no hurry");
        urgency.look(at(2), has(600));
        assert_eq!(urgency.interval(), Some(QUICK), "290 MiB/s is");
        urgency.look(at(3), has(600));
        assert!(urgency.interval().unwrap() > QUICK * 5);
        urgency.look(at(4), has(90));
        urgency.look(at(5), has(90));
        assert_eq!(urgency.interval(), Some(QUICK), "below the limit it always does");
    }
}
