//! Engines that are killed at any point, over and over, and what their region holds then.
//!
//! A schedule is what a seed makes of it: programs read, write, discard and die, engines evict, persist and hand the region over, and some are killed
//! on the way. After each kill another engine goes on. Every read is compared with a model, byte by byte. All of it is the engine's own code, over a
//! file on a tmpfs, page tables with the kernel's marks, and userfaultfds; only lenders are played, by a map that outlives engines.
//!
//! An engine is killed by unwinding it at a point and dropping what it had in memory. That is what SIGKILL does to it:
//! - SIGKILL ends an engine between two instructions. What it did in its own memory since it last changed what outlives it
//!   is gone either way, so only the places before such changes differ; `effect::at` stands at each of them.
//! - What outlives it is the same: the kernel keeps a shared mapping's stores from the moment they are made, and the program keeps its userfaultfd
//!   and its page table. What unwinding runs beside that are destructors that close files, unmap memory and unlock; the kernel does the same for the dead.
//! - A call that covers several pages is one point, where the kernel does not end it between two of them: scans and
//!   punches are made a few pages at a time here, and pages are written to lenders one by one.
//! - Other threads are played at the points as well: there a thread of a program writes, has a fault, or drops an entry
//!   of its page table, while the engine's thread is where it is.
//!
//! `AQUIFER_SCHEDULES` says how many schedules to run, `AQUIFER_SEED` from which seed on.

mod lender;
mod migrate;
mod program;
mod schedule;
mod world;
