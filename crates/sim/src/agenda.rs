//! The one heap of events, in order of their times, then of their numbers.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use crate::event::Event;

/// Events to come.
#[derive(Debug, Default)]
pub(crate) struct Agenda {
    heap: BinaryHeap<Reverse<Entry>>,
    entered: u64,
}

#[derive(Debug)]
struct Entry {
    at: Duration,
    number: u64,
    event: Event,
}

impl Agenda {
    pub(crate) fn enter(&mut self, at: Duration, event: Event) {
        self.entered += 1;
        self.heap.push(Reverse(Entry { at, number: self.entered, event }));
    }

    /// Takes the first event that is due until `end`, with its time.
    pub(crate) fn next_until(&mut self, end: Duration) -> Option<(Duration, Event)> {
        if self.heap.peek()?.0.at > end {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| (entry.at, entry.event))
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}
