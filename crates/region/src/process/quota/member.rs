//! The engine's side of a quota: it keeps the cache within the quota, and asks for more.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, PAGE_SIZE};

use super::book::{Book, LEAST, More, now};
use crate::engine::Engine;
use crate::error::RegionError;
use crate::lock;
use crate::process::{Files, RegionSpec, client};

/// The interval between requests for more quota.
const PACE: Duration = Duration::from_millis(100);

/// How long other regions may take to make room for a new one.
const TIMEOUT: Duration = Duration::from_secs(10);

fn no_room(why: &str) -> RegionError {
    RegionError::Misuse(format!(
        "the shared cache limit leaves no room for the region, as {why}; change it with 'aquifer \
         region set-limit'"
    ))
}

/// A region and the quota of its cache.
#[derive(Debug)]
pub(in crate::process) struct Member {
    files: Files,
    book: Book,
    engine: Arc<Engine>,
    /// Held while quota and cache change together, but not while this engine asks another region.
    seen: Mutex<Seen>,
}

/// The number of pages that had come into the cache by a time.
#[derive(Debug)]
struct Seen {
    at: Instant,
    came: u64,
}

impl Member {
    pub(in crate::process) fn new(files: Files, engine: Arc<Engine>) -> Self {
        let book = Book::of(files.directory());
        Self { files, book, engine, seen: Mutex::new(Seen { at: Instant::now(), came: 0 }) }
    }

    /// Puts the region under its limits, before it is served. Returns false if [`Member::have`]
    /// must try again once programs can attach.
    pub(in crate::process) fn join(&self, spec: &RegionSpec) -> Result<bool, RegionError> {
        let join = || self.book.with(|limits| limits.join(&spec.name, &spec.group, spec.cache));
        let Some(mut quota) = join()? else { return Ok(true) };
        let deadline = Instant::now() + TIMEOUT;
        while quota < LEAST {
            let more =
                self.book.with(|limits| limits.more(&spec.name, LEAST, Duration::ZERO, now()))?;
            match more {
                More::Quota(more) => quota = more,
                More::Ask(other, most) if Instant::now() < deadline => {
                    let files = Files::new(self.files.directory(), &other);
                    client::take_quota(&files, most).map_err(|error| {
                        let why = format!("region '{other}' cannot give a part of it: {error}");
                        no_room(&why)
                    })?;
                }
                More::Ask(..) | More::Nothing => {
                    return Err(no_room("other regions need all of it"));
                }
            }
        }
        if let Err(error) = self.engine.may_limit(quota) {
            // Its programs would stop, and the next engine would fail in the same way.
            tracing::warn!("the region stays above the shared cache limit: {error}");
            return Ok(true);
        }
        if quota < spec.size && self.engine.watch_now().is_err() {
            return Ok(false);
        }
        self.engine.limit_cache(quota)?;
        self.engine.watch_room(true);
        Ok(true)
    }

    /// Sets the cache to the least of its quota, `most` and the region's own size. Without a limit
    /// over the region, sets its own size.
    pub(in crate::process) fn have(
        &self,
        spec: &RegionSpec,
        most: Bytes,
    ) -> Result<(), RegionError> {
        let seen = lock(&self.seen);
        let quota = self.book.with(|limits| {
            let over = limits.is_over(&spec.group);
            if !over {
                limits.quotas.remove(&spec.name);
            }
            over.then(|| limits.quotas.get(&spec.name).map_or(Bytes(0), |quota| quota.bytes))
        })?;
        self.engine.watch_room(quota.is_some());
        let cache = quota.map_or(spec.cache, |quota| quota.min(most).min(spec.cache).max(LEAST));
        // The quota shrinks only after the cache, if pages could leave. So all caches stay within
        // the limit at all times.
        self.engine.resize_cache(cache)?;
        if quota.is_some() {
            self.book.with(|limits| limits.set(&spec.name, cache))?;
        }
        drop(seen);
        Ok(())
    }

    /// Gets more quota whenever the cache is short of room and other regions need theirs less,
    /// until the engine ends.
    pub(in crate::process) fn see_to_it(&self, own: impl Fn() -> Bytes) {
        while self.engine.wait_until_short() {
            if let Err(error) = self.grow(own()) {
                tracing::warn!("cannot get a larger part of the shared cache limit: {error}");
            }
            thread::sleep(PACE);
        }
    }

    fn grow(&self, own: Bytes) -> Result<(), RegionError> {
        let mut seen = lock(&self.seen);
        let came = self.engine.came();
        let (cache, new) = (self.engine.cache(), came.saturating_sub(seen.came).max(1));
        // The time in which the whole cache is replaced.
        let stay = seen.at.elapsed().mul_f64(cache.0 as f64 / PAGE_SIZE as f64 / new as f64);
        *seen = Seen { at: Instant::now(), came };
        let more = || self.book.with(|limits| limits.more(self.files.name(), own, stay, now()));
        let mut got = more()?;
        if let More::Ask(other, most) = got {
            // Unlocked, as that region may be asking this one.
            drop(seen);
            client::take_quota(&Files::new(self.files.directory(), &other), most)?;
            seen = lock(&self.seen);
            got = more()?;
        }
        if let More::Quota(quota) = got {
            self.engine.limit_cache(quota)?;
        }
        drop(seen);
        Ok(())
    }
}
