//! A lender's RAM: sparse, elastic, accounted.
//!
//! A [`Store`] is a directory on a tmpfs, a [`Lease`] one sparse file in it, beside a small record. A page takes RAM
//! at its first non-zero write and gives it back when it is discarded or written with zeroes, so what a lease costs is
//! what the borrower keeps in it. The files outlive the process that serves them: after a crash or an upgrade the
//! next [`Store::open`] finds every page again, as the file itself says which pages are there.

mod dir;
mod error;
mod lease;
mod lock;
mod record;
mod span;
mod store;
mod sys;
mod usage;

pub use error::StoreError;
pub use lease::{Held, Lease, Run, Segment};
pub use record::LeaseRecord;
pub use store::{Finding, Store};
pub use usage::{GroupUsage, LeaseUsage, Usage};
