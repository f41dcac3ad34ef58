//! The prefetcher of sequential streams.

use super::{Guess, PROOF, Prefetcher, Proven};

/// The number of streams followed at a time.
const STREAMS: usize = 8;

/// The size in pages of the first guess for a proven stream.
const FIRST: u64 = 4;

/// A stream of consecutive pages.
#[derive(Debug)]
struct Stream {
    /// The page of the next fault, if the stream continues.
    next: u64,
    /// The number of faults that continued the stream.
    hits: usize,
    /// The size of the last guess, in pages.
    window: u64,
}

/// Follows streams of consecutive pages. Its window doubles each time that a stream continues just
/// behind it.
#[derive(Debug, Default)]
pub(super) struct Sequential {
    /// The streams, the most recently used last.
    streams: Vec<Stream>,
}

impl Prefetcher for Sequential {
    fn proven(&self, page: u64) -> Option<Proven> {
        let stream = self.streams.iter().find(|stream| stream.next == page && stream.window > 0)?;
        Some(Proven { guess: Guess { stride: 1, count: stream.window }, behind: page })
    }

    fn after(&mut self, page: u64, most: &dyn Fn() -> u64) -> Option<Guess> {
        let before = self.streams.iter().position(|stream| stream.next == page);
        let before = before.map(|at| self.streams.remove(at));
        let (hits, last) = before.map_or((0, 0), |stream| (stream.hits + 1, stream.window));
        let window = if hits < PROOF { 0 } else { (2 * last).max(FIRST).min(most()) };
        if self.streams.len() == STREAMS {
            self.streams.remove(0);
        }
        self.streams.push(Stream { next: page + window + 1, hits, window });
        (window > 0).then_some(Guess { stride: 1, count: window })
    }
}
