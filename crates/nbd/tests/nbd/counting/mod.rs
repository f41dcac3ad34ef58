//! A global allocator that counts allocations and otherwise forwards to the system's.

// Each test uses only a part of this module.
#![allow(dead_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

static BY_ALL: AtomicU64 = AtomicU64::new(0);
thread_local! {
    static BY_THIS: Cell<u64> = const { Cell::new(0) };
}

/// Returns the number of allocations of all threads.
pub fn allocations() -> u64 {
    BY_ALL.load(Ordering::SeqCst)
}

/// Returns the number of allocations of the calling thread.
pub fn allocations_here() -> u64 {
    BY_THIS.get()
}

struct Counting;

// SAFETY: all calls go unchanged to the system's allocator.
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
