//! Memory for this library itself.
//!
//! In a program whose heap is in a region, the C library's allocator gives memory that may have left. What an order of the engine is
//! carried out with must be here: the engine waits for that before it can bring another page. So there this library has memory of its
//! own; in any other program it uses the C library's, like everybody.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dlmalloc::Dlmalloc;

use crate::sys;

/// Address space set aside for it; what is not used costs nothing.
const SPACE: usize = 1 << 30;

#[global_allocator]
static ALLOCATOR: Ours =
    Ours { from: AtomicUsize::new(0), own: Mutex::new(Dlmalloc::new_with_allocator(Pages)) };

/// Where the next pages are.
static NEXT: AtomicUsize = AtomicUsize::new(0);

struct Ours {
    /// Where its space begins; 0 as long as the C library's will do.
    from: AtomicUsize,
    own: Mutex<Dlmalloc<Pages>>,
}

/// From now on this library allocates nothing that others could take away.
///
/// # Errors
/// Where there is no such address space.
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
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY: both allocators are such, and each gets back what it gave.
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
            // SAFETY: it was allocated there.
            unsafe { self.own().free(pointer, layout.size(), layout.align()) };
        } else {
            // SAFETY: it was not allocated there.
            unsafe { System.dealloc(pointer, layout) };
        }
    }
}

/// The pages of its space, one after the other.
struct Pages;

// SAFETY: no two calls are given the same pages.
unsafe impl dlmalloc::Allocator for Pages {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let none = (std::ptr::null_mut(), 0, 0);
        let end = ALLOCATOR.space().end;
        // Only the one who holds the lock of the allocator is here.
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
