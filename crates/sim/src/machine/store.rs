//! A lease in the store of its lender.

use std::time::Duration;

use aquifer_control::LentLease;
use aquifer_page::Bytes;

use crate::event::HostNumber;

/// A lease in the store of its lender.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) lent: LentLease,
    /// The hosts that may use it, by `lent`.
    pub(crate) users: Vec<HostNumber>,
    /// The bytes in the lease, by the book of the lender.
    pub(crate) stored: Bytes,
    /// The last time at which the borrower's volume was connected to the lease.
    pub(crate) connected: Duration,
    /// Whether the lender has heard the borrower's `mem_bor_fin`.
    pub(crate) is_finished: bool,
    /// Whether the lender's agent is dropping the lease.
    pub(crate) is_freeing: bool,
    /// Whether the lender has recalled the lease.
    pub(crate) is_recalled: bool,
}
