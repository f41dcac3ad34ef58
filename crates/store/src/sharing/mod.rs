//! Leases that share: equal pages of one group are kept once, copy-on-write, whoever of the group has stored them.
//!
//! Each group has frames of its own ([`GroupFrames`](frames::GroupFrames)): a sparse file, `GROUP.frames`, in which each content is kept once,
//! an index by keyed fingerprint, and reference counts. A lease of the group has a page table ([`SharedPages`]),
//! `LEASE.GROUP.table`, that says in which frame each page is.
//!
//! A frame is filled before anything refers to it and does not change as long as something does. So a page is written by
//! finding or making a frame with the new content, swinging the entry of the table, and giving up the reference to the
//! frame before: in that order, so that a process may be killed anywhere in between. Tables and frames outlive it; all the
//! rest is made of them by [`Groups::recover`].
//!
//! Locks: the pages of a lease in ascending order, and then at most one shard of the index at a time, or the one under
//! which address space grows. Whoever has one of those takes no other.

mod audit;
mod batch;
mod counters;
mod fingerprint;
mod frames;
mod free;
mod groups;
mod pages;
mod recover;
mod shard;
#[cfg(test)]
mod tests;

pub(crate) use groups::Groups;
pub(crate) use pages::{SharedPages, SharedRead, SharedWrite};
pub(crate) use recover::Found;
