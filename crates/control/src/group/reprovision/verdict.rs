use std::fmt;

use aquifer_page::{Bytes, RegionName};
use serde::{Deserialize, Serialize};

/// What was decided of one VM in a period. `Display` says it in a sentence with the numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// Which VM.
    pub vm: RegionName,
    /// Its size without extra.
    pub base: Bytes,
    /// What it was told to have.
    pub from: Bytes,
    /// What it is to have: the balloon's new target. To be told again also if it is the old one.
    pub to: Bytes,
    /// Why.
    pub why: Why,
}

/// Why a VM is given or taken memory, or left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Why {
    /// It gets a step: it swaps.
    Swaps {
        /// How much in the period.
        swapped: Bytes,
    },
    /// It gets or gives a step toward its part of the surplus.
    Part {
        /// Its part, in whole steps.
        part: Bytes,
    },
    /// It gives: VMs hold more than the surplus.
    Deficit {
        /// By how much.
        deficit: Bytes,
    },
    /// What it was told to have was beyond its limits, or between two steps.
    Limits {
        /// Its max.
        max: Bytes,
    },
    /// It has not given back all that it was told to, and is told again.
    Owes {
        /// How much.
        owes: Bytes,
        /// For how many periods without a step of progress.
        periods: u32,
        /// Whether the others have to cover it.
        covered: bool,
    },
    /// It would get more, but has not taken all it was given.
    Untaken {
        /// How much it has not.
        untaken: Bytes,
    },
    /// It swaps, and is at its max.
    AtMax {
        /// Its max.
        max: Bytes,
    },
    /// It swaps, or has less than its part, and there is nothing to give.
    Short {
        /// What of the surplus is left.
        free: Bytes,
        /// What the cache keeps of it.
        keep: Bytes,
    },
    /// It keeps what it has.
    Stays,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vm, base, from, to, why } = self;
        let extra = to.saturating_sub(*base);
        write!(f, "{vm} ")?;
        match to.cmp(from) {
            std::cmp::Ordering::Greater => write!(f, "grows from {from} to {to}")?,
            std::cmp::Ordering::Less => write!(f, "shrinks from {from} to {to}")?,
            std::cmp::Ordering::Equal => write!(f, "stays at {to}")?,
        }
        write!(f, ", {extra} of the group's surplus: {why}")
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Swaps { swapped } => write!(f, "it swapped {swapped}"),
            Self::Part { part } => write!(f, "its part is {part}"),
            Self::Deficit { deficit } => write!(f, "VMs hold {deficit} more than sharing saves"),
            Self::Limits { max } => {
                write!(f, "that is within its max of {max} and a whole number of steps")
            }
            Self::Owes { owes, periods, covered } => {
                write!(f, "it has not given back {owes}")?;
                if *periods > 0 {
                    write!(f, " for {periods} period(s)")?;
                }
                f.write_str(if *covered { ", which the others cover" } else { "" })
            }
            Self::Untaken { untaken } => write!(f, "it has still to take {untaken} of it"),
            Self::AtMax { max } => write!(f, "it swaps, but its max is {max}"),
            Self::Short { free, keep } => {
                write!(f, "it would get more, but {free} are left, of which the cache keeps {keep}")
            }
            Self::Stays => f.write_str("it needs no other"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_says_its_numbers_and_goes_through_json_and_back() {
        let (from, to) = (Bytes::mib(532), Bytes::mib(542));
        let cases = [
            (
                from,
                to,
                Why::Swaps { swapped: Bytes::mib(7) },
                "a grows from 532MiB to 542MiB, 30MiB of the group's surplus: it swapped 7MiB",
            ),
            (
                to,
                from,
                Why::Deficit { deficit: Bytes::mib(3) },
                "a shrinks from 542MiB to 532MiB, 20MiB of the group's surplus: VMs hold 3MiB more than sharing saves",
            ),
            (
                to,
                to,
                Why::Owes { owes: Bytes::mib(10), periods: 6, covered: true },
                "a stays at 542MiB, 30MiB of the group's surplus: it has not given back 10MiB for 6 period(s), which \
                 the others cover",
            ),
        ];
        for (from, to, why, said) in cases {
            let verdict =
                Verdict { vm: "a".parse().unwrap(), base: Bytes::mib(512), from, to, why };
            assert_eq!(verdict.to_string(), said);
            let json = serde_json::to_string(&verdict).unwrap();
            assert_eq!(serde_json::from_str::<Verdict>(&json).unwrap(), verdict, "{json}");
        }
    }
}
