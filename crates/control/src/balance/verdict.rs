use std::fmt;

use aquifer_page::{Bytes, RegionName};
use serde::{Deserialize, Serialize};

use super::{Give, Want};

/// What was found and decided of one VM in a period. `Display` says it in a sentence with the numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Which VM.
    pub vm: RegionName,
    /// What it has.
    pub size: Bytes,
    /// What the guest uses, 0 if it does not say.
    pub used: Bytes,
    /// What of it is in swap beside that, and wants to come back.
    pub swapped: Bytes,
    /// What the guest's kernel keeps from its own count.
    pub kept: Bytes,
    /// What it shall have free on top.
    pub slack: Bytes,
    /// What its applications have asked for.
    pub wish: Bytes,
    /// The sum of these, or a section more than it has if it swaps or waits for memory. 0 if it does not say.
    pub need: Bytes,
    /// The need within min and max, in whole sections from `size`: what it would have if memory cost nothing to move.
    pub target: Bytes,
    /// What it is to have after the plan.
    pub to: Bytes,
    /// Why.
    pub why: Why,
}

/// Why a VM is moved or left.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Why {
    /// It has given no fresh figures, or none that can be.
    Silent,
    /// A resize is running.
    Busy,
    /// The host names no size of a section.
    NoSection,
    /// It grows.
    Grows {
        /// What for.
        #[serde(flatten)]
        want: Want,
        /// Not before others have shrunk.
        waits: bool,
        /// What it would grow by, were there enough.
        wanted: Bytes,
    },
    /// It would grow, and there is nothing to grow by.
    Lacks {
        /// What for.
        #[serde(flatten)]
        want: Want,
        /// What it would grow by.
        wanted: Bytes,
        /// What it still has promised for when it is out of memory.
        reserve: Bytes,
    },
    /// It would grow, and the host is short of memory itself.
    HostShort {
        /// What for.
        #[serde(flatten)]
        want: Want,
        /// What it would grow by.
        wanted: Bytes,
    },
    /// It needs more than it may have.
    AtMax {
        /// Its max.
        max: Bytes,
    },
    /// It shrinks.
    Shrinks {
        /// What for.
        give: Give,
    },
    /// It has a surplus, which is not taken as it grew lately.
    Holds {
        /// In whole sections.
        surplus: Bytes,
        /// For so many more periods.
        periods: u32,
    },
    /// It has a surplus, which has not lasted yet.
    Lasts {
        /// In whole sections.
        surplus: Bytes,
        /// For so many periods so far.
        periods: u32,
        /// Of so many.
        of: u32,
    },
    /// It has a surplus that lasted, and nobody needs it.
    Keeps {
        /// In whole sections.
        surplus: Bytes,
    },
    /// It has what it needs, give or take half a section.
    Fits,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vm, size, .. } = self;
        match self.why {
            Why::Silent => {
                return write!(f, "{vm} keeps its {size}: its guest has given no fresh figures");
            }
            Why::Busy => return write!(f, "{vm} keeps its {size}: it is being resized"),
            Why::NoSection => {
                return write!(f, "{vm} keeps its {size}: the host names no size of a section");
            }
            _ => {}
        }
        self.figures(f)?;
        f.write_str(": ")?;
        self.decision(f)
    }
}

impl Verdict {
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
                    write!(f, ", not by the {wanted} it wants, as no more is to be had")?;
                }
                write!(f, "{}: {want}", if waits { ", when others have given" } else { "" })
            }
            Why::Lacks { want, wanted, reserve } => {
                write!(
                    f,
                    "does not grow by {wanted} though {want}: nothing is free or may be taken"
                )?;
                if reserve > Bytes::ZERO {
                    write!(f, "; {reserve} are promised to it for when it is out of memory")?;
                }
                Ok(())
            }
            Why::HostShort { want, wanted } => {
                write!(
                    f,
                    "does not grow by {wanted} though {want}: the host itself is short of memory"
                )
            }
            Why::AtMax { max } => write!(f, "does not grow: its max is {max}"),
            Why::Shrinks { give } => write!(f, "shrinks to {to}: {give}"),
            Why::Holds { surplus, periods } => {
                write!(
                    f,
                    "keeps a surplus of {surplus} for {periods} more period(s), as it grew lately"
                )
            }
            Why::Lasts { surplus, periods, of } => {
                write!(
                    f,
                    "keeps a surplus of {surplus}, which has lasted {periods} of {of} periods"
                )
            }
            Why::Keeps { surplus } => write!(f, "keeps a surplus of {surplus}, which nobody needs"),
            Why::Fits => f.write_str("stays, it has what it needs"),
            Why::Silent | Why::Busy | Why::NoSection => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(why: Why) -> Verdict {
        Verdict {
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
    fn a_verdict_says_its_numbers() {
        let want = Want::Swaps { swapped: Bytes::mib(96) };
        let why = Why::Grows { want, waits: true, wanted: Bytes::mib(640) };
        assert_eq!(
            verdict(why).to_string(),
            "db has 2GiB, uses 1.8GiB + 256MiB in swap + 64MiB kept by its kernel, needs 2.6GiB with 512MiB free, \
             target 2.6GiB: grows to 2.2GiB, not by the 640MiB it wants, as no more is to be had, when others have \
             given: it swapped 96MiB"
        );
        assert_eq!(
            verdict(Why::Silent).to_string(),
            "db keeps its 2GiB: its guest has given no fresh figures"
        );
    }

    #[test]
    fn a_verdict_goes_through_json_and_back() {
        let want = Want::Pressure { percent: 12.5 };
        let whys = [
            Why::Grows { want, waits: false, wanted: Bytes::mib(128) },
            Why::Lacks { want: Want::Slack, wanted: Bytes::mib(128), reserve: Bytes::ZERO },
            Why::Shrinks { give: Give::Share },
            Why::Lasts { surplus: Bytes::mib(128), periods: 2, of: 5 },
            Why::Fits,
        ];
        for why in whys {
            let json = serde_json::to_string(&verdict(why)).unwrap();
            assert_eq!(serde_json::from_str::<Verdict>(&json).unwrap(), verdict(why), "{json}");
        }
    }
}
