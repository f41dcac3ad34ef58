//! The system's allocator, counting what it is asked for.

// Each test program uses the part of it that it needs.
#![allow(dead_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

static BY_ALL: AtomicU64 = AtomicU64::new(0);
thread_local! {
    static BY_THIS: Cell<u64> = const { Cell::new(0) };
}

/// Allocations of all threads so far.
pub fn allocations() -> u64 {
    BY_ALL.load(Ordering::SeqCst)
}

/// Allocations of the calling thread so far.
pub fn allocations_here() -> u64 {
    BY_THIS.get()
}

struct Counting;

// SAFETY: all is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BY_ALL.fetch_add(1, Ordering::SeqCst);
        BY_THIS.set(BY_THIS.get() + 1);
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;
