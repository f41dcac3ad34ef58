//! The thread that writes the ring to the sinks of lagging copies.

use aquifer_page::PAGE_SIZE;
use zerocopy::IntoBytes as _;

use super::super::Piece;
use super::super::file::Page;
use super::ring::{Key, Ring, is_away};
use super::{Backing, PAGE};

/// The most pages of one write: 256 KiB. Larger ones keep a processor longer from the threads that
/// write the first copy.
const BATCH: usize = 64;

/// Writes until the ring ends.
pub(super) fn run(ring: &Ring) {
    let mut round = Round {
        ring,
        keys: Vec::with_capacity(ring.capacity),
        holes: Vec::new(),
        pages: vec![Page([0; PAGE_SIZE]); BATCH].into(),
        staged: Vec::with_capacity(BATCH),
    };
    while ring.wait_for_work() {
        if round.run() {
            ring.end_round();
        }
    }
}

/// One pass over the ring, and its buffers.
struct Round<'a> {
    ring: &'a Ring,
    keys: Vec<Key>,
    holes: Vec<u32>,
    pages: Box<[Page]>,
    /// Which pages these are, and their versions.
    staged: Vec<(Key, u64)>,
}

impl Round<'_> {
    /// Writes all that is in the ring now. What a sink refuses stays there, and the rest goes on.
    /// Returns false if it stopped early: a sink does not answer, or the ring has ended.
    fn run(&mut self) -> bool {
        let Self { ring, keys, holes, pages, staged } = self;
        ring.begin_round(keys, holes);
        // Adjacent pages go together.
        keys.sort_unstable();
        for keys in keys.chunk_by(|one, next| one.0 == next.0) {
            // A sink that refuses all pages of a batch is full: then no batch is taken apart.
            let mut is_full = false;
            for batch in keys.chunks(pages.len()) {
                // If there is none, the pages were discarded, or their copy has ended.
                let Some(backing) = ring.stage(batch, pages, staged) else { continue };
                let mut runs: [Piece<'_>; BATCH] = [(0, &[]); BATCH];
                let follows = |one: &(Key, u64), next: &(Key, u64)| one.0.1 + 1 == next.0.1;
                let (mut count, mut rest) = (0, &**pages);
                for run in staged.chunk_by(follows) {
                    let (now, later) = rest.split_at(run.len());
                    runs[count] = (run[0].0.1 * PAGE, now.as_bytes());
                    (count, rest) = (count + 1, later);
                }
                if ring.has_ended() {
                    return false;
                }
                let done = backing.sink.write_many(backing.worker, &runs[..count]);
                let is_away = done.as_ref().is_err_and(is_away);
                let is_refused = done.is_err() && !is_away;
                if !is_refused || is_full {
                    is_full &= is_refused;
                    ring.wrote(staged, done);
                } else if let Some(taken) = write_each(ring, &backing, staged, pages) {
                    is_full = taken == 0 && staged.len() > 1;
                } else {
                    return false;
                }
                if is_away {
                    return false;
                }
            }
        }
        for number in &*holes {
            let mut from = 0;
            while let Some((backing, pages)) = ring.next_hole(*number, from) {
                from = pages.end;
                let (at, length) = (pages.start * PAGE, (pages.end - pages.start) * PAGE);
                let done = backing.sink.discard(backing.worker, at, length);
                let is_away = done.as_ref().is_err_and(is_away);
                let is_done = ring.punched(*number, pages, done);
                if is_away || ring.has_ended() {
                    return false;
                }
                if !is_done {
                    break;
                }
            }
        }
        true
    }
}

/// Writes pages one by one. Returns how many the sink took; `None` if the round must stop.
fn write_each(
    ring: &Ring,
    backing: &Backing,
    staged: &[(Key, u64)],
    pages: &[Page],
) -> Option<usize> {
    let mut taken = 0;
    for (page, data) in staged.chunks(1).zip(pages) {
        let at = page[0].0.1 * PAGE;
        let done = backing.sink.write(backing.worker, at, data.as_bytes());
        let is_away = done.as_ref().is_err_and(is_away);
        taken += usize::from(ring.wrote(page, done));
        if is_away || ring.has_ended() {
            return None;
        }
    }
    Some(taken)
}
