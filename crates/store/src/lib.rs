//! A lender's RAM: sparse, elastic and accounted; leases of one group can share equal pages.
//!
//! A [`Store`] is a directory on a tmpfs, a [`Lease`] one sparse file in it, beside a small record.
//! A page takes RAM at its first non-zero write and frees it when the borrower discards it or
//! writes zeroes. So a lease costs as much as the borrower keeps in it. The files outlive the
//! process that serves them. After a crash or an upgrade the next [`Store::open`] finds every page
//! again, as the file itself says which pages exist.
//!
//! # Leases that share
//!
//! A lease whose record says [`shared`](LeaseRecord::shared) keeps equal pages once. It shares them
//! with all sharing leases of its [group](LeaseRecord::group), of any borrower. A write to such a
//! page moves it to another frame (copy-on-write). Each page counts for the
//! [quota](LeaseRecord::quota) of each lease that stores it, so a borrower's limit does not depend
//! on other leases. The lender keeps the savings ([`Usage`]). A lease that does not share has a
//! file of its own and no extra cost.
//!
//! The store finds equal pages by a fingerprint with a random key, and compares them byte by byte
//! before it shares them. A stored page without sharers costs 0.8 % overhead: an entry and a lock
//! of 4 bytes each in the lease, and 22 to 27 bytes for its frame. A group can have 16 TiB of
//! different pages.
//!
//! ## Side channels
//!
//! *Inside a group:* a write of a page that some member stores already is several times faster than
//! a write of a new page, and so is a discard of such a page. A borrower that times its own writes
//! can find out whether another member stores a certain page on the same lender. Each guess must
//! match a whole page (4 KiB). Put borrowers in one group only if they may learn that about each
//! other. Give others leases of another group, or leases that do not share.
//!
//! *Between groups:* nothing. Each group has its own file, index, locks, free frames and key, and
//! the store never compares pages of two groups. All users of one machine share its load and the
//! room on the tmpfs, with or without sharing; a group keeps up to 2 MiB of that room for its next
//! writes. The figures of [`Usage`] are for the lender alone. A group's figures say how much of its
//! data is equal; the store's say how much all groups save.

mod dir;
mod error;
mod guarded;
mod lease;
mod lock;
mod ram;
mod record;
mod sharing;
mod span;
mod store;
mod sys;
mod tenancy;
pub mod tmpfs;
mod usage;

pub use error::StoreError;
pub use lease::{Held, Lease};
pub use record::LeaseRecord;
pub use store::{Finding, Store};
pub use tenancy::{Claim, Stay};
pub use usage::{GroupUsage, LeaseUsage, SharedUsage, Usage};
