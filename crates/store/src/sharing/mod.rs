//! Leases that share: the group keeps equal pages once, copy-on-write.
//!
//! Each group has frames of its own ([`GroupFrames`](frames::GroupFrames)): a sparse file,
//! `GROUP.frames`, that holds each content once, an index by keyed fingerprint, and reference
//! counts. A lease of the group has a page table ([`SharedPages`]), `LEASE.GROUP.table`, that says
//! in which frame each page is.
//!
//! A frame is filled before anything refers to it, and does not change while anything does. So a
//! write finds or makes a frame with the new content, changes the table's entry, and gives up the
//! reference to the old frame. In that order, a kill at any point is safe. Tables and frames
//! outlive the process; [`Groups::recover`] rebuilds the rest from them.
//!
//! Lock order: the pages of a lease in ascending order, then one lock of a shard, or the one under
//! which address space grows. A thread that holds one of the latter takes no other lock.

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
