//! The ring: the pages that have yet to reach the sinks of lagging copies, in locked memory.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_transport::sleep::going_to_sleep;

use super::super::HolderError;
use super::super::file::Page;
use super::{Backing, Lag, Tell};
use crate::tags::{OF_ZEROES, UNKNOWN};
use crate::{lock, sys};

/// Pages of a discard that are marked at a time, while other threads wait for the ring.
const MARKED: u64 = 256;

/// Pages that a writer puts into the ring at a time, and that the thread copies out at a time,
/// while other threads wait: so few that these need not sleep.
const PUT: usize = 8;
const STAGED: usize = 4;

/// How long a full ring waits for a sink that ends no write.
const SILENCE: Duration = Duration::from_secs(5);

/// How long a repair waits for room before it looks whether it may go on.
const HALF: Duration = Duration::from_millis(100);

/// The pause before the next attempt, after a sink took no pages.
const RETRY: Duration = Duration::from_secs(1);

/// A page of a copy: the number of the copy, and that of the page.
pub(super) type Key = (u32, u64);

/// Where the newest version of a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Ring,
    Sink,
    /// It was discarded, and the sink may still have an old version.
    Hole,
}

/// A page in the ring.
#[derive(Clone, Copy)]
struct Entry {
    slot: u32,
    /// Differs for each write of any page.
    version: u64,
    tag: u64,
}

/// A copy, and the pages that were discarded and have yet to become holes in the sink.
struct Copy {
    backing: Arc<Backing>,
    holes: Box<[u64]>,
    hole_count: u64,
}

pub(super) struct State {
    memory: Box<[Page]>,
    index: HashMap<Key, Entry>,
    free: Vec<u32>,
    copies: BTreeMap<u32, Copy>,
    versions: u64,
    /// The rounds of the thread that have begun, and the last one that wrote all that it found.
    rounds: (u64, u64),
    /// The last round that has ended.
    ended: u64,
    /// Why a sink refused a page of the present round, and one of the round before.
    refused: [Option<HolderError>; 2],
    /// Counts writes to sinks that have ended, and those of pages in the present round.
    written: u64,
    written_now: u64,
    /// Somebody waits for the next round.
    is_awaited: bool,
    /// Why the sink takes no pages at all.
    stalled: Option<HolderError>,
    /// The owner knows of the trouble.
    is_told: bool,
    has_ended: bool,
}

/// See the [module](self). Each page is there at most once, in its newest version.
///
/// The lock is held for copies in memory only, never during I/O.
pub(super) struct Ring {
    state: Mutex<State>,
    /// For the thread: there is something to write.
    work: Condvar,
    /// For all others: a write or a round has ended.
    progress: Condvar,
    lag: Duration,
    tell: Tell,
    pub(super) capacity: usize,
}

impl Copy {
    fn is_hole(&self, page: u64) -> bool {
        self.holes[(page / 64) as usize] >> (page % 64) & 1 == 1
    }

    fn set_hole(&mut self, page: u64, is_hole: bool) {
        if self.is_hole(page) == is_hole {
            return;
        }
        self.holes[(page / 64) as usize] ^= 1 << (page % 64);
        self.hole_count = if is_hole { self.hole_count + 1 } else { self.hole_count - 1 };
    }
}

impl State {
    /// Returns why a sink takes no pages, or refuses some.
    fn trouble(&self) -> Option<&HolderError> {
        self.stalled.as_ref().or(self.refused[1].as_ref())
    }

    fn has_work(&self) -> bool {
        !self.index.is_empty() || self.copies.values().any(|copy| copy.hole_count > 0)
    }

    fn take_slot(&mut self, key: Key) -> Option<u32> {
        self.index.get(&key).map(|entry| entry.slot).or_else(|| self.free.pop())
    }

    /// Returns whether no older version was there.
    fn put(&mut self, key: Key, slot: u32, data: &[u8], tag: u64) -> Result<bool, HolderError> {
        let Some(copy) = self.copies.get_mut(&key.0) else {
            self.free.push(slot);
            return Err(ended());
        };
        self.memory[slot as usize].0.copy_from_slice(data);
        copy.set_hole(key.1, false);
        copy.backing.tags.depart(key.1);
        self.versions += 1;
        let entry = Entry { slot, version: self.versions, tag };
        Ok(self.index.insert(key, entry).is_none())
    }

    fn drop_page(&mut self, key: Key) {
        let entry = self.index.remove(&key);
        self.free.extend(entry.map(|entry| entry.slot));
    }
}

impl Ring {
    pub(super) fn new(size: Bytes, Lag { lag, tell, .. }: Lag) -> io::Result<Self> {
        let capacity = size.pages().max(1) as usize;
        let memory = vec![Page([0; PAGE_SIZE]); capacity].into_boxed_slice();
        sys::lock_memory(&memory).map_err(|error| {
            let why = format!(
                "cannot lock {size} of memory for pages on their way to a second copy: {error}; \
                 run with CAP_IPC_LOCK, or raise RLIMIT_MEMLOCK (systemd: LimitMEMLOCK=infinity)"
            );
            io::Error::new(error.kind(), why)
        })?;
        let state = State {
            memory,
            // With twice the room, the table cleans itself in place, and never allocates.
            index: HashMap::with_capacity(2 * capacity),
            free: (0..capacity as u32).rev().collect(),
            copies: BTreeMap::new(),
            versions: 0,
            rounds: (0, 0),
            ended: 0,
            refused: [None, None],
            written: 0,
            written_now: 0,
            is_awaited: false,
            stalled: None,
            is_told: false,
            has_ended: false,
        };
        let (work, progress) = (Condvar::new(), Condvar::new());
        Ok(Self { state: Mutex::new(state), work, progress, lag, tell, capacity })
    }

    /// Half of the pages that have room. So many need not wait for more.
    fn half(&self) -> usize {
        self.capacity / 2
    }

    pub(super) fn add(&self, backing: Arc<Backing>) -> u32 {
        let state = &mut *lock(&self.state);
        let number = state.copies.last_key_value().map_or(0, |(last, _)| last + 1);
        let holes = vec![0; backing.pages.div_ceil(64) as usize].into();
        state.copies.insert(number, Copy { backing, holes, hole_count: 0 });
        number
    }

    pub(super) fn remove(&self, number: u32) {
        let state = &mut *lock(&self.state);
        let State { index, free, .. } = state;
        index.retain(|(copy, _), entry| {
            let stays = *copy != number;
            free.extend((!stays).then_some(entry.slot));
            stays
        });
        state.copies.remove(&number);
        self.progress.notify_all();
    }

    pub(super) fn end(&self) {
        lock(&self.state).has_ended = true;
        self.work.notify_all();
        self.progress.notify_all();
    }

    /// Returns whether the sink takes no pages at all, or the ring has ended.
    pub(super) fn is_stalled(&self) -> bool {
        let state = lock(&self.state);
        state.stalled.is_some() || state.has_ended
    }

    /// Returns why the sink takes no pages, or refuses some.
    pub(super) fn trouble(&self) -> Option<HolderError> {
        lock(&self.state).trouble().map(HolderError::again)
    }

    /// Returns how many pages of a copy are in the ring.
    pub(super) fn pages_of(&self, number: u32) -> u64 {
        lock(&self.state).index.keys().filter(|(copy, _)| *copy == number).count() as u64
    }

    /// Puts adjacent pages into the ring, instead of older versions. Waits for room.
    pub(super) fn put(
        &self,
        (number, first): Key,
        pages: &[u8],
        mut tags: impl Iterator<Item = u64>,
    ) -> Result<(), HolderError> {
        let mut pages = (first..).zip(pages.chunks_exact(PAGE_SIZE)).peekable();
        while pages.peek().is_some() {
            let mut guard = lock(&self.state);
            for (page, data) in pages.by_ref().take(PUT) {
                let key = (number, page);
                let slot = loop {
                    if guard.has_ended {
                        return Err(ended());
                    }
                    match guard.take_slot(key) {
                        Some(slot) => break slot,
                        None => guard = self.wait_for_progress(guard)?,
                    }
                };
                let tag = tags.next().unwrap_or(UNKNOWN);
                // The thread waits for the first page, and then for many.
                let is_new = guard.put(key, slot, data, tag)?;
                let count = guard.index.len();
                if is_new && (count == 1 || count == self.half()) {
                    self.work.notify_one();
                }
            }
        }
        Ok(())
    }

    /// Notes that pages are zeroes from now on.
    pub(super) fn discard(&self, number: u32, pages: Range<u64>) {
        let mut at = pages.start;
        while at < pages.end {
            let some = at..(at + MARKED).min(pages.end);
            at = some.end;
            let state = &mut *lock(&self.state);
            for page in some {
                state.drop_page((number, page));
                let Some(copy) = state.copies.get_mut(&number) else { return };
                let tags = &copy.backing.tags;
                if copy.is_hole(page) || !tags.has_arrived_as_zeroes(page) {
                    tags.depart(page);
                    copy.set_hole(page, true);
                }
            }
        }
        self.work.notify_one();
        self.progress.notify_all();
    }

    /// Copies the page, if it is in the ring. Returns where it is.
    pub(super) fn get(&self, number: u32, page: u64, into: &mut [u8]) -> Place {
        let state = &*lock(&self.state);
        if let Some(entry) = state.index.get(&(number, page)) {
            into.copy_from_slice(&state.memory[entry.slot as usize].0);
            return Place::Ring;
        }
        let is_hole = state.copies.get(&number).is_some_and(|copy| copy.is_hole(page));
        if is_hole { Place::Hole } else { Place::Sink }
    }

    /// Returns whether the sink has the newest version of all these pages.
    pub(super) fn has_none_of(&self, number: u32, mut pages: impl Iterator<Item = u64>) -> bool {
        let state = &*lock(&self.state);
        let Some(copy) = state.copies.get(&number) else { return true };
        if state.index.is_empty() && copy.hole_count == 0 {
            return true;
        }
        pages.all(|page| !state.index.contains_key(&(number, page)) && !copy.is_hole(page))
    }

    /// Waits until the sinks have all that is in the ring now.
    pub(super) fn drain(&self) -> Result<(), HolderError> {
        let mut state = lock(&self.state);
        if !state.has_work() {
            return Ok(());
        }
        let before = state.rounds.0;
        while state.rounds.1 <= before {
            state = self.wait_for_progress(state)?;
            let is_done = state.rounds.1 > before;
            // The last round that ended began after the call, and was not whole.
            if let (true, Some(why)) = (!is_done && state.ended > before, &state.refused[1]) {
                return Err(why.again());
            }
        }
        Ok(())
    }

    /// Makes the thread try again now.
    #[cfg(test)]
    pub(super) fn retry(&self) {
        lock(&self.state).is_awaited = true;
        self.work.notify_one();
    }

    /// Waits a little until half of the ring is free. Returns whether it is, and takes pages.
    pub(super) fn wait_for_half(&self) -> bool {
        let has_half = |state: &State| state.free.len() >= self.half();
        let mut state = lock(&self.state);
        if !has_half(&state) {
            let waited = self.progress.wait_timeout(state, HALF);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        has_half(&state) && state.stalled.is_none() && !state.has_ended
    }

    /// Waits until a write to a sink or a round has ended. The next round begins at once for this,
    /// but a stalled sink is left to rest.
    fn wait_for_progress<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
    ) -> Result<MutexGuard<'a, State>, HolderError> {
        if let Some(why) = &state.stalled {
            return Err(why.again());
        }
        if state.has_ended {
            return Err(ended());
        }
        state.is_awaited = true;
        self.work.notify_one();
        let before = (state.written, state.rounds);
        going_to_sleep();
        let waited = self.progress.wait_timeout(state, SILENCE);
        let (mut state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() && (state.written, state.rounds) == before {
            let why = HolderError::Failed("no write to it has ended for 5 s".into());
            self.stall(&mut state, why);
        }
        Ok(state)
    }

    fn stall(&self, state: &mut State, why: HolderError) {
        state.stalled = Some(why);
        self.tell(state);
        self.progress.notify_all();
    }

    /// Waits until there is something to write, and then a little for more. Returns false at the
    /// end.
    pub(super) fn wait_for_work(&self) -> bool {
        let mut state = lock(&self.state);
        let wait = |state, most| {
            let waited = self.work.wait_timeout(state, most);
            waited.unwrap_or_else(PoisonError::into_inner).0
        };
        let is_urgent = |state: &State| state.is_awaited || state.index.len() >= self.half();
        let rests = state.stalled.is_some() || (state.refused[1].is_some() && !state.is_awaited);
        if rests {
            let is_early = |state: &mut State| !state.has_ended && !state.is_awaited;
            let waited = self.work.wait_timeout_while(state, RETRY, is_early);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        // A ring that became empty ends its trouble with the next round.
        let has_cause =
            |state: &State| state.is_awaited || state.trouble().is_some() || state.has_work();
        while !state.has_ended && !has_cause(&state) {
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if !state.has_ended && !is_urgent(&state) {
            state = wait(state, self.lag);
        }
        !state.has_ended
    }

    /// Begins a round. Lists the pages in the ring, and the copies that need holes.
    pub(super) fn begin_round(&self, keys: &mut Vec<Key>, holes: &mut Vec<u32>) {
        let state = &mut *lock(&self.state);
        state.rounds.0 += 1;
        (state.is_awaited, state.written_now, state.refused[0]) = (false, 0, None);
        keys.clear();
        keys.extend(state.index.keys());
        let with_holes = state.copies.iter().filter(|(_, copy)| copy.hole_count > 0);
        holes.clear();
        holes.extend(with_holes.map(|(number, _)| *number));
    }

    /// Notes that the round went over all that it found. The sink is stalled if it took nothing of
    /// a ring that is half full: writers would wait in vain.
    pub(super) fn end_round(&self) {
        let state = &mut *lock(&self.state);
        state.ended = state.rounds.0;
        state.refused[1] = state.refused[0].take();
        match &state.refused[1] {
            None => {
                state.rounds.1 = state.rounds.0;
                state.stalled = None;
            }
            Some(_) if state.index.len() < self.half() => state.stalled = None,
            Some(why) if state.written_now == 0 => {
                let why = why.again();
                self.stall(state, why);
            }
            Some(_) => {}
        }
        self.tell(state);
        self.progress.notify_all();
    }

    /// Tells the owner that trouble has begun or ended, once.
    fn tell(&self, state: &mut State) {
        let is_trouble = state.trouble().is_some();
        if is_trouble != state.is_told {
            (self.tell)(state.trouble());
            state.is_told = is_trouble;
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        lock(&self.state).has_ended
    }

    /// Copies the pages of one copy that are still in the ring, and notes the version of each.
    pub(super) fn stage(
        &self,
        keys: &[Key],
        pages: &mut [Page],
        staged: &mut Vec<(Key, u64)>,
    ) -> Option<Arc<Backing>> {
        staged.clear();
        for part in keys.chunks(STAGED) {
            let state = &*lock(&self.state);
            for key in part {
                let Some(entry) = state.index.get(key) else { continue };
                pages[staged.len()].0.copy_from_slice(&state.memory[entry.slot as usize].0);
                staged.push((*key, entry.version));
            }
        }
        let ((number, _), _) = staged.first()?;
        Some(lock(&self.state).copies.get(number)?.backing.clone())
    }

    /// Notes that the sink has these versions of pages, or why it does not. Returns whether it has.
    pub(super) fn wrote(&self, staged: &[(Key, u64)], done: Result<(), HolderError>) -> bool {
        let state = &mut *lock(&self.state);
        if !self.end_write(state, done) {
            return false;
        }
        state.written_now += 1;
        for (key, version) in staged {
            let newest = state.index.get(key).filter(|entry| entry.version == *version);
            if let Some((entry, copy)) = newest.zip(state.copies.get(&key.0)) {
                copy.backing.tags.arrive(key.1, entry.tag);
                state.drop_page(*key);
            }
        }
        // With less room, the ring would be full again at once.
        if state.index.len() < self.half() {
            state.stalled = None;
            self.tell(state);
        }
        true
    }

    fn end_write(&self, state: &mut State, done: Result<(), HolderError>) -> bool {
        match done {
            Ok(()) => {
                state.written += 1;
                self.progress.notify_all();
                return true;
            }
            Err(why) if is_away(&why) => self.stall(state, why),
            Err(why) => state.refused[0] = Some(why),
        }
        false
    }

    /// Returns the next run of discarded pages of a copy, from this page on.
    pub(super) fn next_hole(&self, number: u32, from: u64) -> Option<(Arc<Backing>, Range<u64>)> {
        let state = &*lock(&self.state);
        let copy = state.copies.get(&number)?;
        let pages = copy.backing.pages;
        let mut at = from;
        while at < pages && !copy.is_hole(at) {
            let word = copy.holes[(at / 64) as usize] >> (at % 64);
            at += if word == 0 { 64 - at % 64 } else { u64::from(word.trailing_zeros()) };
        }
        let end = (at..pages.min(at + 64 * MARKED)).find(|page| !copy.is_hole(*page));
        let end = end.unwrap_or(pages.min(at + 64 * MARKED));
        (at < end).then(|| (copy.backing.clone(), at..end))
    }

    /// Notes that these pages have become holes in the sink, or why they have not. Returns whether
    /// they have.
    pub(super) fn punched(
        &self,
        number: u32,
        pages: Range<u64>,
        done: Result<(), HolderError>,
    ) -> bool {
        let state = &mut *lock(&self.state);
        if !self.end_write(state, done) {
            return false;
        }
        let Some(copy) = state.copies.get_mut(&number) else { return true };
        for page in pages {
            // A page that was written meanwhile is no longer one.
            if copy.is_hole(page) {
                copy.backing.tags.arrive(page, OF_ZEROES);
                copy.set_hole(page, false);
            }
        }
        true
    }
}

/// Returns whether the sink does not answer, rather than refuse.
pub(super) fn is_away(why: &HolderError) -> bool {
    matches!(why, HolderError::Unreachable { .. } | HolderError::Lost(_))
}

fn ended() -> HolderError {
    HolderError::Failed("the copy has ended".into())
}
