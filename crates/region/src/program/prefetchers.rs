//! The prefetchers of a program's threads.

use std::sync::Mutex;

use crate::lock;
use crate::prefetch::{Guess, PrefetchKind, Prefetcher, Proven};

/// The number of a program's threads for which a prefetcher is kept.
const THREADS: usize = 64;

/// The prefetchers of a program's threads.
#[derive(Debug)]
pub(crate) struct Prefetchers {
    kind: PrefetchKind,
    /// By thread id, the most recently used last.
    each: Mutex<Vec<(u32, Box<dyn Prefetcher>)>>,
}

impl Prefetchers {
    pub(super) fn new(kind: PrefetchKind) -> Self {
        Self { kind, each: Mutex::default() }
    }

    /// Guesses what a thread that waits for a page may touch next. A proven pattern gives `most()`
    /// pages at most. Calls `used` with the last guess if this fault proves it right.
    pub(crate) fn guess(
        &self,
        thread: u32,
        page: u64,
        used: &dyn Fn(Proven),
        most: &dyn Fn() -> u64,
    ) -> Option<Guess> {
        if self.kind == PrefetchKind::Off {
            return None;
        }
        let mut prefetchers = lock(&self.each);
        let known = prefetchers.iter().position(|(id, _)| *id == thread);
        let mut own = match known {
            Some(at) => prefetchers.remove(at),
            None => (thread, self.kind.make()?),
        };
        own.1.proven(page).into_iter().for_each(used);
        let guess = own.1.after(page, most);
        if prefetchers.len() == THREADS {
            prefetchers.remove(0);
        }
        prefetchers.push(own);
        guess
    }
}
