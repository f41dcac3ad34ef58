//! The points at which tests kill an engine.
//!
//! An engine leaves to the next one: the region's file, the table, the notes of places and frames,
//! what lenders have, and page tables of programs. [`at`] stands before each step that changes one.

/// The engine is about to change something that outlives it. Compiles to nothing outside of tests.
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn at(_point: &'static str) {}

#[cfg(test)]
pub(crate) use hook::{at, set};

#[cfg(test)]
mod hook {
    use std::cell::RefCell;
    use std::rc::Rc;

    type Hook = Rc<dyn Fn(&'static str)>;

    thread_local! {
        static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    }

    /// Calls `hook` at every point that this thread passes.
    pub(crate) fn set(hook: Option<Hook>) {
        HOOK.with(|is| *is.borrow_mut() = hook);
    }

    pub(crate) fn at(point: &'static str) {
        let hook = HOOK.with(|is| is.borrow().clone());
        if let Some(hook) = hook {
            hook(point);
        }
    }
}
