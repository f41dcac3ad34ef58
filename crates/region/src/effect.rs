//! The points at which tests kill an engine.
//!
//! State outlives an engine in the region's file, the table, the notes of places and frames, the
//! lenders' pages and the programs' page tables. [`at`] precedes each step that changes one of
//! them.

/// Marks that the engine is about to change state that outlives it. Compiles to nothing outside
/// tests.
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
