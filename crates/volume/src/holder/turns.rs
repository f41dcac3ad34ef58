//! Turns of changes to the same pages.

use std::array;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use crate::lock;

/// Pages that take turns together, and the number of such parts.
const PART: u64 = 64;
const PARTS: usize = 64;

/// Locks over the pages of a lease. Pages far apart share a lock: they wait for one another at
/// times, and nothing else follows from that.
pub(super) struct Turns([Mutex<()>; PARTS]);

impl Default for Turns {
    fn default() -> Self {
        Self(array::from_fn(|_| Mutex::new(())))
    }
}

impl Turns {
    /// Waits until no other change of these pages is under way, and keeps others away.
    pub(super) fn take(
        &self,
        pages: impl Iterator<Item = Range<u64>>,
    ) -> [Option<MutexGuard<'_, ()>>; PARTS] {
        let mut wanted = [false; PARTS];
        for pages in pages.filter(|pages| !pages.is_empty()) {
            let (first, last) = (pages.start / PART, (pages.end - 1) / PART);
            for part in first..=last.min(first + PARTS as u64 - 1) {
                wanted[(part % PARTS as u64) as usize] = true;
            }
        }
        // In ascending order, so that no two changes wait for each other.
        array::from_fn(|part| wanted[part].then(|| lock(&self.0[part])))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn changes_of_the_same_pages_take_turns_and_others_do_not_wait() {
        let turns = Turns::default();
        let first = turns.take([10..20, 1000..1001].into_iter());
        drop(turns.take(std::iter::once(64..128)));
        let is_over = AtomicBool::new(false);
        thread::scope(|threads| {
            let second = threads.spawn(|| {
                let _turn = turns.take([0..1, 990..2000].into_iter());
                is_over.load(Ordering::SeqCst)
            });
            thread::sleep(Duration::from_millis(5));
            is_over.store(true, Ordering::SeqCst);
            drop(first);
            assert_eq!(second.join().ok(), Some(true));
        });
        // As many pages as there may be.
        drop(turns.take(std::iter::once(0..u64::MAX)));
    }
}
