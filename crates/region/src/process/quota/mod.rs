//! Limits that the caches of several regions share: those of a group, or of the host (Disaggregation's policies are over all VMs).
//!
//! A region that such a limit is over has a quota: what its cache may have of it. All quotas together are within the limit at every moment. An engine
//! that is short of room takes what is free of the limit; where nothing is, it asks another region for a part of its quota: the one
//! in whose cache pages stay the longest. So it comes to what one cache for all of them would do that has the oldest page leave. Nobody
//! looks on while nobody is short.

mod book;
mod member;

pub(super) use book::Book;
pub use book::{Limits, Quota};
pub(super) use member::Member;
