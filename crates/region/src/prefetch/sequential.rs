use super::{Guess, PROOF, Prefetcher, Proven};

/// Streams that are followed at a time.
const STREAMS: usize = 8;

/// Pages that are guessed when a stream is proven.
const FIRST: u64 = 4;

/// A stream of pages one behind the other.
#[derive(Debug)]
struct Stream {
    /// The next fault if it goes on.
    next: u64,
    /// Faults that went on where they should.
    hits: usize,
    /// Pages that were guessed at last.
    window: u64,
}

/// Follows streams of pages one behind the other. A window doubles each time that a stream goes on just behind it.
#[derive(Debug, Default)]
pub(super) struct Sequential {
    /// The latest last.
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
