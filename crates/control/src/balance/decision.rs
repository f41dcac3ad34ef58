//! The decision on the size of each VM: the figures, the new size and the reason.

use std::fmt;

use aquifer_page::{Bytes, RegionName};
use serde::{Deserialize, Serialize};

use super::{Give, Want};

/// The figures of one VM in a period, and the decision. `Display` writes them as one sentence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SizeDecision {
    /// The VM.
    pub vm: RegionName,
    /// The VM's present size.
    pub size: Bytes,
    /// The guest's use, 0 if its figures are unknown.
    pub used: Bytes,
    /// The memory in swap, not part of `used`, which the guest will want back.
    pub swapped: Bytes,
    /// The memory that the guest's kernel reserves.
    pub kept: Bytes,
    /// The free memory that the guest gets on top.
    pub slack: Bytes,
    /// The memory that the guest's applications have asked for.
    pub wish: Bytes,
    /// The sum of the figures above. The need is at least a section above `size` if the guest swaps
    /// or waits for memory, and 0 if the guest's figures are unknown.
    pub need: Bytes,
    /// The need within min and max, whole sections away from `size`: the size if moves were free.
    pub target: Bytes,
    /// The planned size.
    pub to: Bytes,
    /// The reason.
    pub why: Why,
}

/// The reason why a VM moves or stays.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Why {
    /// The guest gave no fresh or no plausible figures.
    Silent,
    /// A resize is running.
    Busy,
    /// The host's section size is zero.
    NoSection,
    /// The VM grows.
    Grows {
        /// The reason to grow.
        #[serde(flatten)]
        want: Want,
        /// Whether the growth must wait for other VMs to shrink.
        waits: bool,
        /// The bytes that the VM would grow by if there were enough memory.
        wanted: Bytes,
    },
    /// The VM would grow, but there is no memory to grow by.
    Lacks {
        /// The reason to grow.
        #[serde(flatten)]
        want: Want,
        /// The bytes that it would grow by.
        wanted: Bytes,
        /// The reserve that remains promised to it for when it is out of memory.
        reserve: Bytes,
    },
    /// The VM would grow, but the host itself is short of memory.
    HostShort {
        /// The reason to grow.
        #[serde(flatten)]
        want: Want,
        /// The bytes that it would grow by.
        wanted: Bytes,
    },
    /// The VM needs more than its max.
    AtMax {
        /// The VM's max.
        max: Bytes,
    },
    /// The VM shrinks.
    Shrinks {
        /// The reason to shrink.
        give: Give,
    },
    /// The VM keeps its surplus, because it grew lately.
    Holds {
        /// The surplus, in whole sections.
        surplus: Bytes,
        /// The number of further periods.
        periods: u32,
    },
    /// The VM keeps its surplus, because it has not lasted yet.
    Lasts {
        /// The surplus, in whole sections.
        surplus: Bytes,
        /// The periods for which it has lasted.
        periods: u32,
        /// The periods for which it must last.
        of: u32,
    },
    /// The VM keeps a lasting surplus that no other VM needs.
    Keeps {
        /// The surplus, in whole sections.
        surplus: Bytes,
    },
    /// The VM has its need, within half a section.
    Fits,
}

impl fmt::Display for SizeDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vm, size, .. } = self;
        match self.why {
            Why::Silent => {
                return write!(f, "{vm} keeps its {size}: its guest gave no fresh figures");
            }
            Why::Busy => return write!(f, "{vm} keeps its {size}: a resize is running"),
            Why::NoSection => {
                return write!(f, "{vm} keeps its {size}: the size of a section is zero");
            }
            _ => {}
        }
        self.figures(f)?;
        f.write_str(": ")?;
        self.decision(f)
    }
}

impl SizeDecision {
    fn figures(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vm, size, used, swapped, kept, slack, wish, need, target, .. } = self;
        write!(f, "{vm} has {size}, uses {used}")?;
        let parts = [(swapped, "in swap"), (kept, "kept by its kernel"), (wish, "asked for")];
        for (bytes, what) in parts.into_iter().filter(|(bytes, _)| **bytes > Bytes::ZERO) {
            write!(f, " + {bytes} {what}")?;
        }
        write!(f, ", needs {need} with {slack} free, target {target}")
    }

    fn decision(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { size, to, .. } = self;
        match self.why {
            Why::Grows { want, waits, wanted } => {
                write!(f, "grows to {to}")?;
                if size.saturating_add(wanted) > *to {
                    write!(f, ", not by the {wanted} it wants, because no more is free")?;
                }
                write!(f, "{}: {want}", if waits { ", once there is memory" } else { "" })
            }
            Why::Lacks { want, wanted, reserve } => {
                write!(
                    f,
                    "does not grow by {wanted} although {want}: no memory is free, no VM gives any"
                )?;
                if reserve > Bytes::ZERO {
                    write!(f, "; its reserve for when it is out of memory is {reserve}")?;
                }
                Ok(())
            }
            Why::HostShort { want, wanted } => {
                write!(
                    f,
                    "does not grow by {wanted} although {want}: the host itself is short of memory"
                )
            }
            Why::AtMax { max } => write!(f, "does not grow: its max is {max}"),
            Why::Shrinks { give } => write!(f, "shrinks to {to}: {give}"),
            Why::Holds { surplus, periods } => {
                write!(
                    f,
                    "keeps a surplus of {surplus} for {periods} more period(s): it grew recently"
                )
            }
            Why::Lasts { surplus, periods, of } => {
                write!(
                    f,
                    "keeps a surplus of {surplus}, which has lasted {periods} of {of} periods"
                )
            }
            Why::Keeps { surplus } => {
                write!(f, "keeps a surplus of {surplus}, which no other VM needs")
            }
            Why::Fits => f.write_str("keeps its size, which fits its need"),
            Why::Silent | Why::Busy | Why::NoSection => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(why: Why) -> SizeDecision {
        SizeDecision {
            vm: "db".parse().unwrap(),
            size: Bytes::gib(2),
            used: Bytes::mib(1792),
            swapped: Bytes::mib(256),
            kept: Bytes::mib(64),
            slack: Bytes::mib(512),
            wish: Bytes::ZERO,
            need: Bytes::mib(2624),
            target: Bytes::mib(2688),
            to: Bytes::mib(2304),
            why,
        }
    }

    #[test]
    fn a_decision_says_its_numbers() {
        let want = Want::Swaps { swapped: Bytes::mib(96) };
        let why = Why::Grows { want, waits: true, wanted: Bytes::mib(640) };
        assert_eq!(
            decision(why).to_string(),
            "db has 2GiB, uses 1.8GiB + 256MiB in swap + 64MiB kept by its kernel, needs 2.6GiB \
             with 512MiB free, target 2.6GiB: grows to 2.2GiB, not by the 640MiB it wants, \
             because no more is free, once there is memory: it swapped 96MiB"
        );
        assert_eq!(
            decision(Why::Silent).to_string(),
            "db keeps its 2GiB: its guest gave no fresh figures"
        );
    }

    #[test]
    fn a_decision_goes_through_json_and_back() {
        let want = Want::Pressure { percent: 12.5 };
        let whys = [
            Why::Grows { want, waits: false, wanted: Bytes::mib(128) },
            Why::Lacks { want: Want::Slack, wanted: Bytes::mib(128), reserve: Bytes::ZERO },
            Why::Shrinks { give: Give::Share },
            Why::Lasts { surplus: Bytes::mib(128), periods: 2, of: 5 },
            Why::Fits,
        ];
        for why in whys {
            let json = serde_json::to_string(&decision(why)).unwrap();
            let read: SizeDecision = serde_json::from_str(&json).unwrap();
            assert_eq!(read, decision(why), "{json}");
        }
    }
}
