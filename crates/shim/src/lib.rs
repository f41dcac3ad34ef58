//! Lends a region to a program that knows nothing of regions.
//!
//! Preloaded (`LD_PRELOAD`), it stands between the program and the C library in the few calls that matter: a mapping of a
//! region's file is put under the care of the region's engine before the program sees it, and what the program discards is discarded.
//! Every other call goes to the kernel as it is. If told to, it also has what the program asks for as anonymous memory be in a region.

mod allocator;
mod calls;
mod heap;
mod pinning;
mod regions;
mod sys;
