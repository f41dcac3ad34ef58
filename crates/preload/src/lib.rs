//! A region for an unmodified program.
//!
//! `LD_PRELOAD` puts this library between the program and the C library for a few calls. A mapping
//! of a region's file goes under the care of the region's engine before the program sees it. Pages
//! that the program discards are discarded in the region. All other calls go to the kernel
//! unchanged. On request, the library also serves the program's anonymous memory from a region.

mod allocator;
mod calls;
mod heap;
mod pinning;
mod regions;
mod sys;
