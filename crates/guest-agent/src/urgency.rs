//! The decision when a guest is near out-of-memory, and how much it asks for then (the reactive
//! request of \[Bielski18\], section III-C). State without I/O.

use std::time::{Duration, Instant};

use aquifer_page::Bytes;

/// Interval of looks at the memory while there is plenty.
const CALM: Duration = Duration::from_secs(1);

/// Interval while memory is going quickly.
const QUICK: Duration = Duration::from_millis(50);

/// Assumed worst rate of allocation, in bytes a second: the next look comes before the spare memory
/// is gone at that rate.
const RATE: u64 = 1 << 30;

/// Memory is going quickly if it would be short within this time at the rate since the last look.
const AHEAD: Duration = Duration::from_secs(3);

/// Pause after an answer, so that the new memory can take effect.
const REST: Duration = Duration::from_secs(1);

/// Size of the request's unit if the kernel does not name its block size.
const BLOCK: Bytes = Bytes::mib(128);

/// The state of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SampledMemory {
    pub(crate) total: Bytes,
    pub(crate) available: Bytes,
    /// Size of a memory block.
    pub(crate) block: Bytes,
}

/// The state of the decision.
#[derive(Debug, Default)]
pub(crate) struct Urgency {
    /// Available memory below which it is urgent; zero if the host has not said.
    below: Bytes,
    last: Option<(Instant, Bytes)>,
    quick: bool,
    /// Whether a request has no answer yet.
    pending: bool,
    rests_until: Option<Instant>,
}

impl Urgency {
    /// Sets the available memory below which it is urgent.
    pub(crate) fn watch(&mut self, below: Bytes) {
        self.below = below;
        self.quick = false;
    }

    /// Returns that limit.
    pub(crate) fn below(&self) -> Bytes {
        self.below
    }

    /// Returns the interval until the next look; `None` without a limit.
    pub(crate) fn interval(&self) -> Option<Duration> {
        let (_, available) = self.last.unwrap_or((Instant::now(), Bytes::ZERO));
        let spare = available.saturating_sub(self.below).0 as f64 / RATE as f64;
        let soon = Duration::from_secs_f64(spare).clamp(QUICK, CALM);
        (self.below > Bytes::ZERO).then_some(if self.quick { QUICK } else { soon })
    }

    /// Takes a look at the memory; returns the bytes that the caller must request now, if it is
    /// urgent.
    pub(crate) fn look(&mut self, now: Instant, memory: SampledMemory) -> Option<Bytes> {
        self.quick = memory.available < self.below || self.goes_quickly(now, memory.available);
        self.last = Some((now, memory.available));
        if memory.available >= self.below {
            return None;
        }
        self.ask(now, memory)
    }

    /// Takes the news that tasks stall; returns the bytes that the caller must request now.
    ///
    /// There is no request while half of all memory is available: then only the limit of some
    /// cgroup is short.
    pub(crate) fn stalls(&mut self, now: Instant, memory: SampledMemory) -> Option<Bytes> {
        if memory.available.0 > memory.total.0 / 2 {
            return None;
        }
        self.ask(now, memory)
    }

    /// Notes that the request was answered, or has timed out.
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

    fn ask(&mut self, now: Instant, memory: SampledMemory) -> Option<Bytes> {
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

    fn has(available: u64) -> SampledMemory {
        SampledMemory {
            total: Bytes::gib(1),
            available: Bytes::mib(available),
            block: Bytes::mib(128),
        }
    }

    fn watching(below: u64) -> (Urgency, Instant) {
        let mut urgency = Urgency::default();
        urgency.watch(Bytes::mib(below));
        (urgency, Instant::now())
    }

    #[test]
    fn a_guest_below_its_limit_asks_for_whole_blocks_at_once() {
        let (mut urgency, now) = watching(100);
        assert_eq!(urgency.look(now, has(100)), None);
        assert_eq!(urgency.look(now, has(99)), Some(Bytes::mib(128)));
        let (mut urgency, now) = watching(200);
        assert_eq!(urgency.look(now, has(20)), Some(Bytes::mib(384)));
    }

    #[test]
    fn no_request_repeats_before_an_answer_or_within_a_second_of_it() {
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
    fn stalled_tasks_cause_a_request_even_without_a_limit() {
        let mut urgency = Urgency::default();
        assert_eq!(urgency.stalls(Instant::now(), has(300)), Some(Bytes::mib(128)));
        assert_eq!(urgency.interval(), None);
    }

    #[test]
    fn stalls_in_a_cgroup_are_not_urgent_if_the_guest_has_plenty() {
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
