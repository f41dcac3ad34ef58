use std::fmt;

use aquifer_page::{Bytes, RegionName};
use serde::{Deserialize, Serialize};

use super::Verdict;

/// What is to be done in a period, and why.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// In the order in which to begin them: growth that free sections cover, urgent needs before others; then
    /// what shrinks; then what grows by what the shrinks set free. At most one for each VM.
    pub moves: Vec<Move>,
    /// One for each VM, in the order of the readings.
    pub verdicts: Vec<Verdict>,
}

/// One resize, by whole sections.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Move {
    /// Whose.
    pub vm: RegionName,
    /// What it has.
    pub from: Bytes,
    /// What it is to have. A guest that does not give as much as it was asked for has others grow by less.
    pub to: Bytes,
    /// Why.
    pub because: Because,
}

/// Which way a VM goes, and why.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "move", rename_all = "snake_case")]
pub enum Because {
    /// It gets memory.
    Grows {
        /// What for.
        want: Want,
        /// Not before the plan's shrinks are done: what is free does not cover it.
        waits: bool,
    },
    /// It gives memory.
    Shrinks {
        /// What for.
        give: Give,
    },
}

/// Why a VM is to grow. All but `min` and `slack` are urgent: others give for them at once what they do not need now.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "want", rename_all = "snake_case")]
pub enum Want {
    /// It has less than its min.
    Min,
    /// It swaps.
    Swaps {
        /// How much since it answered before.
        swapped: Bytes,
    },
    /// Its programs wait for memory.
    Pressure {
        /// PSI `some avg10`.
        percent: f64,
    },
    /// Its applications have asked for memory.
    Wish {
        /// How much.
        wish: Bytes,
    },
    /// It has less than half of the least slack free.
    Tight {
        /// How much.
        free: Bytes,
    },
    /// What it uses rises so fast that it would soon have too little.
    Rises {
        /// By how much a period.
        rise: Bytes,
    },
    /// It has less slack than it shall have.
    Slack,
}

/// Why a VM is to shrink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Give {
    /// It is above its max.
    OverMax,
    /// Others need what it does not.
    Surplus,
    /// It has more than its fair share while others are short.
    Share,
    /// What it does not need goes back to the host.
    Return,
    /// No section is free: one of what it does not need is made so for whoever needs it next.
    Ahead,
}

impl Want {
    /// Whether others give for it at once what they do not need now, though they may soon.
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
                write!(f, "{vm} grows from {from} to {to} when others have given: {want}")
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
            Self::Rises { rise } => write!(f, "what it uses rises by {rise} a period"),
            Self::Slack => f.write_str("it has less free than it should have"),
        }
    }
}

impl fmt::Display for Give {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OverMax => "it is above its max",
            Self::Surplus => "others need what it does not",
            Self::Share => "it has more than its fair share and others are short",
            Self::Return => "what it does not need goes back to the host",
            Self::Ahead => "no section is free for who needs the next one",
        })
    }
}
