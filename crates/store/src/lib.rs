//! A lender's RAM: sparse, elastic, accounted, and shared by those of one group who store the same.
//!
//! A [`Store`] is a directory on a tmpfs, a [`Lease`] one sparse file in it, beside a small record. A page takes RAM
//! at its first non-zero write and gives it back when it is discarded or written with zeroes, so what a lease costs is
//! what the borrower keeps in it. The files outlive the process that serves them: after a crash or an upgrade the
//! next [`Store::open`] finds every page again, as the file itself says which pages are there.
//!
//! # Leases that share
//!
//! A lease whose record says [`shared`](LeaseRecord::shared) keeps equal pages once, its own and those of all leases of its
//! [group](LeaseRecord::group) that share, whoever borrows them. Who writes such a page gets another (copy-on-write). Each
//! page still counts for the [quota](LeaseRecord::quota) of each lease that stores it, so what a borrower may store depends
//! on nobody else; what is saved is the lender's ([`Usage`]). What is not shared has a file of its own as before and costs
//! nothing more.
//!
//! Equal pages are found by a fingerprint with a random key, and compared byte by byte before they are taken for equal. A
//! stored page that is shared by nobody costs 0.8 % beside itself: an entry and a lock of 4 bytes each in the lease, and 22
//! to 27 bytes for its frame. A group can have 16 TiB of different pages.
//!
//! ## What it tells
//!
//! *Inside a group:* writing what some member has stored already is several times faster than writing what nobody has, and
//! so is discarding it. Who can time his own writes can so find out, one guess at a time, whether a certain page (4 KiB, all
//! of it guessed) is stored by another member on the same lender. A group is for those who may know that of each other;
//! others are to be given leases of another group, or leases that do not share.
//!
//! *Between groups:* nothing. Each has a file, an index, locks, free frames and a key of its own, and no page of one is ever
//! looked at for another. What is left is what all who use one machine have in common, whether they share or not: its load,
//! and the room on the tmpfs, of which a group keeps up to 2 MiB free for its next writes. The figures of [`Usage`] are for
//! the lender alone: those of a group say how much of it is equal, and the store's say how much all save together.

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
pub use lease::{Held, Lease, Run, Segment};
pub use record::LeaseRecord;
pub use store::{Finding, Store};
pub use tenancy::{Claim, Denied, End, Stay, Visitor};
pub use usage::{GroupUsage, LeaseUsage, SharedUsage, Usage};
