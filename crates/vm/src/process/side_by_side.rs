//! Parallel queries, so that a silent peer does not delay the others.

use std::sync::{Mutex, PoisonError};
use std::thread;

use aquifer_page::lock;

/// Most threads for one call.
const MOST_THREADS: usize = 64;

/// Runs `work` for each item, in parallel, and returns the results in the order of the items.
pub fn side_by_side<I: Send, T: Send>(
    items: impl IntoIterator<Item = I>,
    work: impl Fn(I) -> T + Sync,
) -> Vec<T> {
    let items: Vec<_> = items.into_iter().collect();
    let threads = items.len().min(MOST_THREADS);
    let (queue, done) = (Mutex::new(items.into_iter().enumerate()), Mutex::new(Vec::new()));
    let take = || lock(&queue).next();
    let work_off = || {
        while let Some((number, item)) = take() {
            let result = work(item);
            lock(&done).push((number, result));
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // The calling thread works too: if no other thread can start, it does everything.
            if thread::Builder::new().name("ask".to_owned()).spawn_scoped(scope, work_off).is_err()
            {
                break;
            }
        }
        work_off();
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn items_are_processed_in_parallel_and_results_stay_in_order() {
        // No thread passes before all have arrived.
        let all_there = Barrier::new(8);
        let results = side_by_side(0..8, |item| {
            all_there.wait();
            item * 10
        });
        assert_eq!(results, [0, 10, 20, 30, 40, 50, 60, 70]);
        assert!(side_by_side(0..0, |item: u8| item).is_empty());
    }
}
