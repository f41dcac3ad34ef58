//! Events that the operator should know of, outside the decisions.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An event that the operator should know of, outside the decisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The kind of the event.
    pub kind: EventKind,
    /// The subject of the event: a host, a volume, a cgroup, a VM.
    pub who: String,
    /// One sentence.
    pub what: String,
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A lender does not answer.
    LenderLost,
    /// A lender answers again.
    LenderBack,
    /// The I/O of a page failed.
    PageUnreachable,
    /// A lender has lost a lease that this host holds, with its pages.
    LeaseLost,
    /// A borrower has lost a lease of this host, with its pages. The borrower was silent for too
    /// long, or the operator forced the agent to stop.
    BorrowerLost,
    /// Pages went to the local spill file, because no lender had room.
    Spill,
    /// Pages came back from the spill file.
    SpillBack,
    /// The kernel killed a program for lack of memory.
    OomKill,
    /// A VM ended.
    VmEnded,
    /// A VM with a definition did not start, or its definition is damaged.
    VmNotStarted,
    /// Another host has this host's name, or peers call this host at a wrong address.
    NameTaken,
    /// A host of the cluster is up.
    HostUp,
    /// A host of the cluster has left, or answers no host.
    HostDown,
    /// A drain has started, or all leases are back.
    Drain,
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::LenderLost => "lender lost",
            Self::LenderBack => "lender back",
            Self::PageUnreachable => "page unreachable",
            Self::LeaseLost => "lease lost",
            Self::BorrowerLost => "borrower lost",
            Self::Spill => "spill",
            Self::SpillBack => "spill back",
            Self::OomKill => "oom kill",
            Self::VmEnded => "vm ended",
            Self::VmNotStarted => "vm not started",
            Self::NameTaken => "name taken",
            Self::HostUp => "host up",
            Self::HostDown => "host down",
            Self::Drain => "drain",
        })
    }
}
