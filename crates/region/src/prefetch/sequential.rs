use super::{Guess, Prefetcher};

/// Streams that are followed at a time.
const STREAMS: usize = 8;

/// Pages behind a fault that follows the one before.
const FIRST: u64 = 4;

/// Follows streams of pages one behind the other. A window doubles each time that a stream goes on just behind it.
#[derive(Debug, Default)]
pub(super) struct Sequential {
    /// The next fault of each if it goes on, and its window; the latest last.
    streams: Vec<(u64, u64)>,
}

impl Prefetcher for Sequential {
    fn after(&mut self, page: u64, most: u64) -> Option<Guess> {
        let goes_on = self.streams.iter().position(|(next, _)| *next == page);
        let count = match goes_on {
            Some(at) => (2 * self.streams.remove(at).1).max(FIRST).min(most),
            None => 0,
        };
        if self.streams.len() == STREAMS {
            self.streams.remove(0);
        }
        self.streams.push((page + count + 1, count));
        (count > 0).then_some(Guess { stride: 1, count })
    }
}
