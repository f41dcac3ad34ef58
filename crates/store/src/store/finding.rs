//! Findings of an open, for the operator.

use std::fmt;

use aquifer_page::{Group, LeaseId};

use crate::{LeaseRecord, StoreError};

/// An anomaly that [`Store::open`](crate::Store::open) found, for the operator.
#[derive(Debug)]
pub enum Finding {
    /// Pages without a record: their lease was never granted, or its removal had begun. The open
    /// has deleted them.
    PagesWithoutRecord(LeaseId),
    /// A record without pages: another process has deleted the file. The lease and its data are
    /// lost.
    RecordWithoutPages(Box<LeaseRecord>),
    /// A lease that cannot be served. Its files and its shared frames stay.
    Unusable(LeaseId, StoreError),
    /// Shared frames of a group without leases. The open has deleted them.
    FramesWithoutLeases(Group),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PagesWithoutRecord(id) => {
                write!(f, "deleted the pages of lease {id}, which has no record")
            }
            Self::RecordWithoutPages(record) => {
                write!(
                    f,
                    "lease {} of {} is lost: another process deleted its pages",
                    record.id, record.borrower
                )
            }
            Self::FramesWithoutLeases(group) => {
                write!(f, "deleted the shared pages of group {group}, which has no lease")
            }
            Self::Unusable(id, error) => {
                write!(f, "cannot recover lease {id}, its files stay: {error}")
            }
        }
    }
}
