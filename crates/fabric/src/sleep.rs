//! Word from a thread that is going to sleep, to whoever counts on it.

use std::cell::RefCell;

thread_local! {
    static BEFORE: RefCell<Option<Box<dyn Fn()>>> = const { RefCell::new(None) };
}

/// Lets `call` be called whenever this thread is going to wait for a peer, a disk or another thread; replaces what was
/// there. It must be quick and must not wait itself.
///
/// For threads that take turns at something: one that answers at once keeps its turn, which saves waking another.
pub fn before_sleep(call: impl Fn() + 'static) {
    BEFORE.set(Some(Box::new(call)));
}

/// To be called by whoever makes the thread wait, each time before it does. Costs nothing where nobody listens.
pub fn going_to_sleep() {
    // A thread that is ending has nobody left who listens.
    let _ = BEFORE.try_with(|before| {
        if let Some(call) = &*before.borrow() {
            call();
        }
    });
}
