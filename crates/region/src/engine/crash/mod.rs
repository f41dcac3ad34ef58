//! A harness that kills engines at any point and then checks the content of the region.
//!
//! A seed determines a schedule. Programs read, write, discard and die. Engines evict, persist and
//! hand the region over. Leases and second copies come and go. Lenders of copies die, and come back
//! with their pages, with old ones, or with none. The harness kills some engines meanwhile, and
//! another continues after each. A model checks every read byte by byte. The engine's code is the
//! real one, over a file on a tmpfs, real page tables and real userfaultfds. Only lenders are
//! simulated, by a map that outlives engines.
//!
//! To kill an engine, the harness unwinds it at a point and drops its state in memory. SIGKILL has
//! the same effect, for these reasons:
//! - SIGKILL ends an engine between two instructions. Changes to the engine's own memory are gone
//!   either way. So only the places before a change to lasting state differ, and `effect::at`
//!   stands at each of them.
//! - The same state outlives both. The kernel keeps each store to a shared mapping from the moment
//!   it is made, and the program keeps its userfaultfd and its page table.
//! - Unwinding runs destructors. They close files, unmap memory and unlock, as the kernel does for
//!   a killed process. None of them writes anything.
//! - A call that covers several pages is one point if the kernel completes it. Scans and writes to
//!   lenders are not completed so, and are cut into single steps here.
//!
//! The harness simulates other threads at the points, too. While the engine's thread stands there,
//! a thread of a program writes, faults, or drops an entry of its page table.
//!
//! `AQUIFER_SCHEDULES` is the number of schedules, `AQUIFER_SEED` the seed of the first.

mod copies;
mod hostile;
mod leases;
mod lender;
mod migrate;
mod points;
mod program;
mod schedule;
mod world;
