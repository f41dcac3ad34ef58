use std::fmt;

use aquifer_page::{Group, LeaseId};

use crate::{LeaseRecord, StoreError};

/// Something odd that [`Store::open`](crate::Store::open) came across, for the operator's eyes.
#[derive(Debug)]
pub enum Finding {
    /// Pages without a record belong to a lease that was never granted or was being removed; they are gone now.
    PagesWithoutRecord(LeaseId),
    /// A record without pages: somebody else deleted the file. The lease and what it stored are lost.
    RecordWithoutPages(Box<LeaseRecord>),
    /// A lease that cannot be served. Its files stay where they are, and so does what it shares.
    Unusable(LeaseId, StoreError),
    /// Shared pages of a group that has no lease any more; they are gone now.
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
                    "lease {} of {} is lost: somebody deleted its pages",
                    record.id, record.borrower
                )
            }
            Self::FramesWithoutLeases(group) => {
                write!(f, "deleted the shared pages of group {group}, which has no lease")
            }
            Self::Unusable(id, error) => write!(f, "lease {id} is left alone: {error}"),
        }
    }
}
