//! Memory for this library itself.
//!
//! In a program with its heap in a region, memory from the C library's allocator may have been
//! evicted. Memory that serves an order of the engine must be present, as the engine waits for the
//! order before it fetches another page. There this library uses memory of its own. In any other
//! program it uses the C library's allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use aquifer_page::lock;
use dlmalloc::Dlmalloc;

use crate::sys;

/// Address space reserved for the library, in bytes; unused pages cost nothing.
const SPACE: usize = 1 << 30;

#[global_allocator]
static ALLOCATOR: Ours =
    Ours { from: AtomicUsize::new(0), own: Mutex::new(Dlmalloc::new_with_allocator(Pages)) };

/// The address of the next unused page.
static NEXT: AtomicUsize = AtomicUsize::new(0);

struct Ours {
    /// The start of the library's space; 0 while it uses the C library's allocator.
    from: AtomicUsize,
    own: Mutex<Dlmalloc<Pages>>,
}

/// Switches this library to memory of its own, which the engine never evicts.
///
/// # Errors
/// The kernel has no such address space.
pub(crate) fn stand_alone() -> std::io::Result<()> {
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
    );
    // SAFETY: a new mapping replaces nothing.
    let from = unsafe { sys::mmap(0, SPACE, protection, flags, -1, 0) }?;
    NEXT.store(from, Ordering::Relaxed);
    ALLOCATOR.from.store(from, Ordering::Release);
    Ok(())
}

impl Ours {
    fn space(&self) -> Range<usize> {
        let from = self.from.load(Ordering::Acquire);
        from..if from == 0 { 0 } else { from + SPACE }
    }

    fn own(&self) -> MutexGuard<'_, Dlmalloc<Pages>> {
        lock(&self.own)
    }
}

// SAFETY: both allocators meet the contract, and each frees only memory that it allocated.
unsafe impl GlobalAlloc for Ours {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if self.space().is_empty() {
            // SAFETY: the caller's promise.
            return unsafe { System.alloc(layout) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.own().malloc(layout.size(), layout.align()) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if self.space().contains(&pointer.addr()) {
            // SAFETY: this allocator allocated it.
            unsafe { self.own().free(pointer, layout.size(), layout.align()) };
        } else {
            // SAFETY: the C library's allocator allocated it.
            unsafe { System.dealloc(pointer, layout) };
        }
    }
}

/// The pages of the library's space, given out in ascending order.
struct Pages;

// SAFETY: no two calls are given the same pages.
unsafe impl dlmalloc::Allocator for Pages {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let none = (std::ptr::null_mut(), 0, 0);
        let end = ALLOCATOR.space().end;
        // The caller holds the allocator's lock, so no other thread is here.
        let at = NEXT.load(Ordering::Relaxed);
        if size > end.saturating_sub(at) {
            return none;
        }
        NEXT.store(at + size, Ordering::Relaxed);
        (std::ptr::with_exposed_provenance_mut(at), size, 0)
    }

    fn remap(&self, _: *mut u8, _: usize, _: usize, _: bool) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn free_part(&self, _: *mut u8, _: usize, _: usize) -> bool {
        false
    }

    fn free(&self, _: *mut u8, _: usize) -> bool {
        false
    }

    fn can_release_part(&self, _: u32) -> bool {
        false
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        aquifer_page::PAGE_SIZE
    }
}
