//! Limits that the caches of several regions share: those of a group, or of the host. \[Lim12\],
//! section 4, applies its policies to all VMs together.
//!
//! A region under such a limit has a quota, the share of the limit that its cache may use. All
//! quotas together are within the limit at all times. An engine that is short of room takes free
//! parts of the limit. If there are none, it asks another region for a part of its quota. It asks
//! the region in which pages stay cached the longest. The result approximates one cache for all
//! regions that evicts the oldest page. The engines do no work while none is short of room.

mod book;
mod member;

pub(super) use book::Book;
pub use book::{Limits, Quota};
pub(super) use member::Member;
