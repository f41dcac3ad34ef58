//! The plan of one period: the resizes, and the reason for each.

use std::fmt;

use aquifer_page::{Bytes, RegionName};
use serde::{Deserialize, Serialize};

use super::SizeDecision;

/// The resizes and the decisions of one period.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The moves, at most one for each VM, in the order in which to begin them. First growth that
    /// free sections cover, urgent needs before others; then the shrinks; then growth that the
    /// shrinks cover.
    pub moves: Vec<Move>,
    /// One decision for each VM, in the order of the readings.
    pub decisions: Vec<SizeDecision>,
    /// The lent memory to recall, because VMs are to grow by it.
    #[serde(default)]
    pub recall: Bytes,
}

/// One resize, by whole sections.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Move {
    /// The VM.
    pub vm: RegionName,
    /// The present size.
    pub from: Bytes,
    /// The planned size. If a guest gives less than the plan asks for, other VMs grow by less.
    pub to: Bytes,
    /// The reason.
    pub because: Because,
}

/// The direction of a move, and its reason.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "move", rename_all = "snake_case")]
pub enum Because {
    /// The VM gets memory.
    Grows {
        /// The reason to grow.
        want: Want,
        /// True if the free sections do not cover the growth, so that it must wait for recalls or
        /// for the plan's shrinks.
        waits: bool,
    },
    /// The VM gives memory.
    Shrinks {
        /// The reason to shrink.
        give: Give,
    },
}

/// The reason why a VM grows. All but `min` and `slack` are urgent: for these, other VMs also give
/// surplus that has not lasted yet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "want", rename_all = "snake_case")]
pub enum Want {
    /// The VM is below its min.
    Min,
    /// The guest swaps.
    Swaps {
        /// Bytes swapped since the guest's previous answer.
        swapped: Bytes,
    },
    /// The guest's programs stall on memory.
    Pressure {
        /// PSI `some avg10`, in percent.
        percent: f64,
    },
    /// The guest's applications have asked for memory.
    Wish {
        /// The bytes that they asked for.
        wish: Bytes,
    },
    /// The guest's free memory is below half of the least slack.
    Tight {
        /// The free memory.
        free: Bytes,
    },
    /// The guest's use rises so fast that it would soon be short.
    Rises {
        /// The rise in a period.
        rise: Bytes,
    },
    /// The guest has less free memory than its slack.
    Slack,
}

/// The reason why a VM shrinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Give {
    /// The VM is above its max.
    OverMax,
    /// Other VMs need the VM's surplus.
    Surplus,
    /// The VM is above its fair share while others are short.
    Share,
    /// The VM's lasting surplus returns to the host.
    Return,
    /// No section is free, so the VM gives one ahead of the next growth.
    Ahead,
}

impl Want {
    /// Whether other VMs give for it at once, even surplus that has not lasted.
    pub(super) fn is_urgent(self) -> bool {
        !matches!(self, Self::Min | Self::Slack)
    }
}

impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vm, from, to, because } = self;
        match because {
            Because::Grows { want, waits: false } => {
                write!(f, "{vm} grows from {from} to {to}: {want}")
            }
            Because::Grows { want, waits: true } => {
                write!(f, "{vm} grows from {from} to {to} once there is memory: {want}")
            }
            Because::Shrinks { give } => write!(f, "{vm} shrinks from {from} to {to}: {give}"),
        }
    }
}

impl fmt::Display for Want {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Min => f.write_str("it has less than its min"),
            Self::Swaps { swapped } => write!(f, "it swapped {swapped}"),
            Self::Pressure { percent } => {
                write!(f, "its programs wait for memory {percent:.1} % of the time")
            }
            Self::Wish { wish } => write!(f, "its applications have asked for {wish}"),
            Self::Tight { free } => write!(f, "it has only {free} free"),
            Self::Rises { rise } => write!(f, "its use rises by {rise} a period"),
            Self::Slack => f.write_str("it has less free memory than its slack"),
        }
    }
}

impl fmt::Display for Give {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OverMax => "it is above its max",
            Self::Surplus => "other VMs need its surplus",
            Self::Share => "it has more than its fair share and other VMs are short",
            Self::Return => "its surplus goes back to the host",
            Self::Ahead => "no section is free for the next VM that grows",
        })
    }
}
