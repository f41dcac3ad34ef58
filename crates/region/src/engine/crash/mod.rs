//! A harness that kills engines at any point and checks what the region holds then.
//!
//! A seed makes a schedule. Programs read, write, discard and die; engines evict, persist and hand
//! the region over; some engines are killed on the way, and another goes on after each. A model
//! checks every read byte by byte. The engine's code is the real one, over a file on a tmpfs, real
//! page tables and real userfaultfds. Only lenders are played, by a map that outlives engines.
//!
//! To kill an engine, the harness unwinds it at a point and drops what it had in memory. SIGKILL
//! does the same, for these reasons:
//! - SIGKILL ends an engine between two instructions. What the engine did in its own memory since
//!   it last changed something that outlives it is gone either way. So only the places before such
//!   changes differ, and `effect::at` stands at each of them.
//! - The same things outlive both. The kernel keeps each store to a shared mapping from the moment
//!   it is made, and the program keeps its userfaultfd and its page table.
//! - Unwinding runs destructors. They close files, unmap memory and unlock, which the kernel does
//!   for a killed process, too. None of them writes anything.
//! - A call that covers several pages is one point where the kernel completes it. Scans and writes
//!   to lenders, which it does not, are cut into single steps here.
//!
//! Other threads are played at the points, too: while the engine's thread stands there, a thread of
//! a program writes, faults, or drops an entry of its page table.
//!
//! `AQUIFER_SCHEDULES` is the number of schedules, `AQUIFER_SEED` the first one's seed.

mod lender;
mod migrate;
mod points;
mod program;
mod schedule;
mod world;
