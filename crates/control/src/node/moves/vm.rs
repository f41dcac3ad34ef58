//! A VM of this host, what keeps it here, and the ends of its moves.

use std::fmt;
use std::time::Duration;

use aquifer_page::{Bytes, HostName, RegionName};

/// A VM of this host, as its record and the engine of its memory tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmReading {
    /// The VM.
    pub vm: RegionName,
    /// Why it cannot move now.
    pub obstacle: Option<Obstacle>,
    /// The part of its memory here that is known to be dirty. A move copies at least that.
    pub dirty: Bytes,
    /// The time since it arrived from another host, if it did.
    pub arrived: Option<Duration>,
}

/// The reason why a VM cannot move, whatever the other hosts can spare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// Its memory is RAM of this host.
    LocalMemory,
    /// Another program started it.
    Adopted,
    /// Its QEMU starts.
    Starts,
    /// It may still belong to this host, from which it arrives.
    Arrives(HostName),
    /// It belongs to this host.
    HandedOver(HostName),
    /// A part of its memory is still on this host.
    AwaitsPages(HostName),
    /// So much of its memory is in this host's spill file.
    Spilled(Bytes),
    /// Its record cannot be read, or the engine of its memory does not answer.
    Silent(String),
}

impl Obstacle {
    /// Returns whether the obstacle ends without an operator.
    pub fn passes(&self) -> bool {
        !matches!(self, Self::LocalMemory | Self::Adopted)
    }

    /// Returns whether a move of the VM is in progress, or may be.
    pub(super) fn is_move(&self) -> bool {
        matches!(self, Self::Arrives(_) | Self::HandedOver(_) | Self::AwaitsPages(_))
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LocalMemory => {
                f.write_str("its memory is no region: it has '--cache none' or huge pages")
            }
            Self::Adopted => f.write_str("its memory is no region, because it was adopted"),
            Self::Starts => f.write_str("it starts"),
            Self::Arrives(from) => write!(f, "it arrives from host {from}"),
            Self::HandedOver(to) => {
                write!(f, "it belongs to host {to}, which has not confirmed that it has it")
            }
            Self::AwaitsPages(from) => {
                write!(f, "a part of its memory is still on host {from}")
            }
            Self::Spilled(bytes) => {
                write!(
                    f,
                    "{bytes} of its memory are in this host's spill file, as no lender has room"
                )
            }
            Self::Silent(why) => f.write_str(why),
        }
    }
}

/// The end of a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoveEnd {
    /// The VM runs on another host.
    Moved {
        /// That host.
        to: HostName,
        /// The bytes sent to it and to lenders.
        sent: Bytes,
        /// The reason for that host: its room, and the hosts that it was chosen over.
        why: String,
    },
    /// No host takes the VM, and nothing was copied.
    Refused {
        /// The reasons of the hosts.
        why: String,
    },
    /// The move failed. The VM is here, unless its record says otherwise.
    Failed {
        /// The other host, if one was found.
        to: Option<HostName>,
        /// The error.
        why: String,
    },
    /// This host cancelled the move, and the VM stays.
    Cancelled,
}

impl MoveEnd {
    /// Returns the other host, if one was found.
    pub(super) fn host(&self) -> Option<&HostName> {
        match self {
            Self::Moved { to, .. } => Some(to),
            Self::Failed { to, .. } => to.as_ref(),
            Self::Refused { .. } | Self::Cancelled => None,
        }
    }
}

/// What the latest decision about a VM came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoveState {
    /// It moves.
    Moves,
    /// No host took it, for these reasons. This host tries again.
    Refused(String),
    /// Its last move failed, for this reason. This host tries again.
    Failed(String),
}
