use std::fmt;

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use super::Rate;

/// What was decided in a period. `Display` says it in a sentence with the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The rate so far.
    pub from: Rate,
    /// The rate from now on.
    pub to: Rate,
    /// Why.
    pub why: Why,
}

/// Why the rate is what it is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Why {
    /// It follows nothing.
    Static,
    /// Up: CPU is left (lines 4-5).
    CpuFree {
        /// Used, in percent.
        cpu_percent: f64,
        /// From where on it is scarce.
        of: f64,
    },
    /// Down: CPU is scarce, and nothing else is asked (Adaptive-C).
    CpuScarce {
        /// Used, in percent.
        cpu_percent: f64,
        /// From where on it is scarce.
        of: f64,
    },
    /// Down: CPU is scarce, and no VM is short of memory (lines 7-8).
    NoDemand {
        /// Used, in percent.
        cpu_percent: f64,
        /// Swapped in the period.
        swapped: Bytes,
    },
    /// Up: VMs are short of memory, and nothing else is asked (Adaptive-CS).
    Demand {
        /// Swapped in the period.
        swapped: Bytes,
    },
    /// Up: VMs are short of memory, and scanning finds some (lines 10-11).
    Productive {
        /// Swapped in the period.
        swapped: Bytes,
        /// Saved in the period.
        saved_bytes: i64,
        /// Above which it is worth the CPU.
        threshold: Bytes,
    },
    /// Down: scanning finds nothing, or copies are broken (lines 12-13).
    Unproductive {
        /// Swapped in the period.
        swapped: Bytes,
        /// Saved in the period.
        saved_bytes: i64,
    },
    /// As before: scanning finds something, but not much (line 14).
    LittleSaved {
        /// Swapped in the period.
        swapped: Bytes,
        /// Saved in the period.
        saved_bytes: i64,
        /// Above which it is worth the CPU.
        threshold: Bytes,
    },
}

/// Bytes with a sign, as people write them.
struct Signed(i64);

impl fmt::Display for Signed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.0 < 0 { "-" } else { "" }, Bytes(self.0.unsigned_abs()))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, why } = self;
        if from == to {
            write!(f, "scans {to} as before: {why}")
        } else {
            write!(f, "scans {to} instead of {from}: {why}")
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Static => f.write_str("the rate is fixed"),
            Self::CpuFree { cpu_percent, of } => {
                write!(f, "the group uses {cpu_percent:.1} % of its CPU, less than {of} %")
            }
            Self::CpuScarce { cpu_percent, of } => {
                write!(f, "the group uses {cpu_percent:.1} % of its CPU, not less than {of} %")
            }
            Self::NoDemand { cpu_percent, swapped } => write!(
                f,
                "the group uses {cpu_percent:.1} % of its CPU, and with {swapped} swapped it is not short of memory"
            ),
            Self::Demand { swapped } => write!(f, "CPU is scarce, but the group swapped {swapped}"),
            Self::Productive { swapped, saved_bytes, threshold } => write!(
                f,
                "CPU is scarce, but the group swapped {swapped}, and sharing saved {} more, above {threshold}",
                Signed(saved_bytes)
            ),
            Self::Unproductive { swapped, saved_bytes } => write!(
                f,
                "CPU is scarce, the group swapped {swapped}, but sharing saved {} more: scanning does not help",
                Signed(saved_bytes)
            ),
            Self::LittleSaved { swapped, saved_bytes, threshold } => write!(
                f,
                "CPU is scarce, the group swapped {swapped}, and sharing saved {} more, not above {threshold}",
                Signed(saved_bytes)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_says_its_numbers_and_goes_through_json_and_back() {
        let (swapped, threshold) = (Bytes::mib(96), Bytes::mib(4));
        let cases = [
            (
                Why::CpuFree { cpu_percent: 41.25, of: 90.0 },
                "scans 25 pages/ms instead of 20 pages/ms: the group uses 41.2 % of its CPU, less than 90 %",
            ),
            (
                Why::Unproductive { swapped, saved_bytes: -(3 << 20) },
                "scans 25 pages/ms instead of 20 pages/ms: CPU is scarce, the group swapped 96MiB, but sharing saved \
                 -3MiB more: scanning does not help",
            ),
            (
                Why::Productive { swapped, saved_bytes: 9 << 20, threshold },
                "scans 25 pages/ms instead of 20 pages/ms: CPU is scarce, but the group swapped 96MiB, and sharing saved \
                 9MiB more, above 4MiB",
            ),
        ];
        for (why, said) in cases {
            let verdict = Verdict { from: Rate(20), to: Rate(25), why };
            assert_eq!(verdict.to_string(), said);
            let json = serde_json::to_string(&verdict).unwrap();
            assert_eq!(serde_json::from_str::<Verdict>(&json).unwrap(), verdict, "{json}");
        }
        let same = Verdict { from: Rate(5), to: Rate(5), why: Why::Static };
        assert_eq!(same.to_string(), "scans 5 pages/ms as before: the rate is fixed");
    }
}
