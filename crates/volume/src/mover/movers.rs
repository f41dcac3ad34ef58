//! Which threads move extents now: several, an extent each, or one alone.

use std::array;
use std::mem;
use std::sync::{Condvar, Mutex, PoisonError};

use aquifer_transport::sleep::going_to_sleep;

use super::copy::buffer;
use crate::lock;

/// The most extents that move at a time: while one is read, another is written.
pub(super) const MOVERS: usize = 2;

/// The turns of threads that move extents of a volume. Threads get them in the order in which they
/// come. Otherwise a thread that moves one extent after the other would let no other in.
#[derive(Debug)]
pub(crate) struct Movers {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The buffers that no thread has.
    free: Vec<Box<[u8]>>,
    /// A thread moves an extent alone.
    is_alone: bool,
    /// The numbers of the next thread to come, and of the next one to get a turn.
    comes: u64,
    gets: u64,
}

impl State {
    /// Returns whether no thread has a turn.
    fn is_idle(&self) -> bool {
        self.free.len() == MOVERS
    }
}

/// A thread's turn to move an extent. The buffer is for its pages.
pub(super) struct Turn<'a> {
    movers: &'a Movers,
    pub(super) buffer: Box<[u8]>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.movers.state);
        state.free.push(mem::take(&mut self.buffer));
        state.is_alone = false;
        self.movers.changed.notify_all();
    }
}

impl Movers {
    pub(crate) fn new() -> Self {
        let free = array::from_fn::<_, MOVERS, _>(|_| buffer()).into();
        let state = State { free, is_alone: false, comes: 0, gets: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits for a turn beside other threads. A background move stops for this.
    pub(super) fn beside(&self) -> Turn<'_> {
        self.turn(|state| !state.is_alone && !state.free.is_empty(), false)
    }

    /// Waits for a turn while no other extent moves. A background move stops for this.
    pub(super) fn alone(&self) -> Turn<'_> {
        self.turn(State::is_idle, true)
    }

    /// Takes a turn alone if no thread has one or waits for one.
    pub(super) fn try_alone(&self) -> Option<Turn<'_>> {
        let mut state = lock(&self.state);
        if !state.is_idle() || state.comes > state.gets {
            return None;
        }
        state.is_alone = true;
        state.free.pop().map(|buffer| Turn { movers: self, buffer })
    }

    /// Returns whether a thread waits for a turn.
    pub(super) fn are_hurried(&self) -> bool {
        let state = lock(&self.state);
        state.comes > state.gets
    }

    fn turn(&self, may: impl Fn(&State) -> bool, is_alone: bool) -> Turn<'_> {
        let mut state = lock(&self.state);
        let number = state.comes;
        state.comes += 1;
        loop {
            if state.gets == number
                && may(&state)
                && let Some(buffer) = state.free.pop()
            {
                state.gets += 1;
                state.is_alone = is_alone;
                // The next thread may go on, too.
                self.changed.notify_all();
                return Turn { movers: self, buffer };
            }
            going_to_sleep();
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    fn until(what: &str, is: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(30);
        while !is() {
            assert!(Instant::now() < end, "{what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn threads_get_turns_in_their_order() {
        let movers = Movers::new();
        let (first, second) = (movers.beside(), movers.beside());
        assert!(movers.try_alone().is_none() && !movers.are_hurried());
        let (alone, later) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                let _turn = movers.alone();
                assert!(!later.load(Ordering::SeqCst), "a thread that came later went first");
                alone.store(true, Ordering::SeqCst);
            });
            until("one waits", || movers.are_hurried());
            scope.spawn(|| {
                let _turn = movers.beside();
                later.store(true, Ordering::SeqCst);
            });
            until("two wait", || {
                let state = lock(&movers.state);
                state.comes == state.gets + 2
            });
            drop(first);
            assert!(!alone.load(Ordering::SeqCst), "it is alone beside another one");
            drop(second);
        });
        assert!(alone.load(Ordering::SeqCst) && later.load(Ordering::SeqCst));
        assert!(movers.try_alone().is_some() && movers.try_alone().is_some());
    }
}
