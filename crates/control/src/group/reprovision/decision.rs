//! The decision on each VM: its target, and the reason.

use std::fmt;

use aquifer_page::{Bytes, RegionName};
use serde::{Deserialize, Serialize};

/// The decision on one VM in a period. `Display` writes it as a sentence with the numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetDecision {
    /// The VM.
    pub vm: RegionName,
    /// The VM's size without any surplus.
    pub base: Bytes,
    /// The VM's target until this period.
    pub from: Bytes,
    /// The balloon's new target. The caller sets it even if it is equal to the old one.
    pub to: Bytes,
    /// The reason.
    pub why: Why,
}

/// The reason why a VM gets memory, gives memory or stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Why {
    /// The VM gets a step, because it swaps.
    Swaps {
        /// Bytes swapped in the period.
        swapped: Bytes,
    },
    /// The VM gets or gives a step toward its part of the surplus.
    Part {
        /// The VM's part, in whole steps.
        part: Bytes,
    },
    /// The VM gives, because VMs hold more than the surplus.
    Deficit {
        /// The deficit.
        deficit: Bytes,
    },
    /// The VM's target was beyond its limits, or between two steps.
    Limits {
        /// The VM's max.
        max: Bytes,
    },
    /// The VM has not given back all memory above its target, and gets the same target again.
    Owes {
        /// The bytes that the VM owes.
        owes: Bytes,
        /// The number of periods without a step of progress.
        periods: u32,
        /// Whether the others cover the debt.
        covered: bool,
    },
    /// The VM would get more, but has not taken all of its target yet.
    Untaken {
        /// The bytes that the guest has not taken.
        untaken: Bytes,
    },
    /// The VM swaps, and is at its max.
    AtMax {
        /// The VM's max.
        max: Bytes,
    },
    /// The VM swaps, or is below its part, and there is nothing to give.
    Short {
        /// The surplus that is left.
        free: Bytes,
        /// The part of the rest that is the cache's reserve.
        keep: Bytes,
    },
    /// The VM keeps its steps.
    Stays,
}

impl fmt::Display for TargetDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vm, base, from, to, why } = self;
        let extra = to.saturating_sub(*base);
        write!(f, "{vm} ")?;
        match to.cmp(from) {
            std::cmp::Ordering::Greater => write!(f, "grows from {from} to {to}")?,
            std::cmp::Ordering::Less => write!(f, "shrinks from {from} to {to}")?,
            std::cmp::Ordering::Equal => write!(f, "stays at {to}")?,
        }
        write!(f, ", {extra} of it from the group's surplus: {why}")
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Swaps { swapped } => write!(f, "it swapped {swapped}"),
            Self::Part { part } => write!(f, "its part is {part}"),
            Self::Deficit { deficit } => write!(f, "VMs hold {deficit} more than sharing saves"),
            Self::Limits { max } => {
                write!(f, "this is within its max of {max} and a whole number of steps")
            }
            Self::Owes { owes, periods, covered } => {
                write!(f, "it has not given back {owes}")?;
                if *periods > 0 {
                    write!(f, " for {periods} period(s)")?;
                }
                f.write_str(if *covered { ", which the other VMs cover" } else { "" })
            }
            Self::Untaken { untaken } => write!(f, "its guest has not yet taken {untaken} of it"),
            Self::AtMax { max } => write!(f, "it swaps, but its max is {max}"),
            Self::Short { free, keep } => {
                write!(f, "it would get more, but {free} is left, of which the cache keeps {keep}")
            }
            Self::Stays => f.write_str("no reason to change it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_says_its_numbers_and_goes_through_json_and_back() {
        let (from, to) = (Bytes::mib(532), Bytes::mib(542));
        let cases = [
            (
                from,
                to,
                Why::Swaps { swapped: Bytes::mib(7) },
                "a grows from 532MiB to 542MiB, 30MiB of it from the group's surplus: \
                 it swapped 7MiB",
            ),
            (
                to,
                from,
                Why::Deficit { deficit: Bytes::mib(3) },
                "a shrinks from 542MiB to 532MiB, 20MiB of it from the group's surplus: \
                 VMs hold 3MiB more than sharing saves",
            ),
            (
                to,
                to,
                Why::Owes { owes: Bytes::mib(10), periods: 6, covered: true },
                "a stays at 542MiB, 30MiB of it from the group's surplus: \
                 it has not given back 10MiB for 6 period(s), which the other VMs cover",
            ),
        ];
        for (from, to, why, said) in cases {
            let decision =
                TargetDecision { vm: "a".parse().unwrap(), base: Bytes::mib(512), from, to, why };
            assert_eq!(decision.to_string(), said);
            let json = serde_json::to_string(&decision).unwrap();
            assert_eq!(serde_json::from_str::<TargetDecision>(&json).unwrap(), decision, "{json}");
        }
    }
}
