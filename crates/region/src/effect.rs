//! Where an engine changes what outlives it, so that tests can kill it there.
//!
//! What one engine leaves to the next is the region's file, the table, the notes of places and of frames, what lenders have, and the page
//! tables of programs. [`at`] stands before each step that changes one of them, or asks a program to.

/// Something is about to change that outlives the engine. Nothing at all in what is shipped.
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

    /// Has `hook` be called at every point that this thread comes by.
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
