//! The decision on the rate in one period, and the reason.

use std::fmt;

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use super::Rate;

/// The decision of one period. `Display` writes it as a sentence with the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RateDecision {
    /// The rate until this period.
    pub from: Rate,
    /// The rate after it.
    pub to: Rate,
    /// The reason.
    pub why: Why,
}

/// The reason for the rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Why {
    /// The rate is constant.
    Static,
    /// Up: CPU is left (lines 4-5).
    CpuFree {
        /// CPU used, in percent.
        cpu_percent: f64,
        /// The threshold in percent from which CPU is scarce.
        of: f64,
    },
    /// Down: CPU is scarce, and the variant follows nothing else (Adaptive-C).
    CpuScarce {
        /// CPU used, in percent.
        cpu_percent: f64,
        /// The threshold in percent from which CPU is scarce.
        of: f64,
    },
    /// Down: CPU is scarce, and no VM is short of memory (lines 7-8).
    NoDemand {
        /// CPU used, in percent.
        cpu_percent: f64,
        /// Bytes swapped in the period.
        swapped: Bytes,
    },
    /// Up: VMs are short of memory, and the variant follows nothing else (Adaptive-CS).
    Demand {
        /// Bytes swapped in the period.
        swapped: Bytes,
    },
    /// Up: VMs are short of memory, and scanning saves enough (lines 10-11).
    Productive {
        /// Bytes swapped in the period.
        swapped: Bytes,
        /// Bytes saved in the period.
        saved_bytes: i64,
        /// The savings above which scanning is worth the CPU.
        threshold: Bytes,
    },
    /// Down: scanning saves nothing, or copies are broken (lines 12-13).
    Unproductive {
        /// Bytes swapped in the period.
        swapped: Bytes,
        /// Bytes saved in the period.
        saved_bytes: i64,
    },
    /// Unchanged: scanning saves something, but not enough (line 14).
    LittleSaved {
        /// Bytes swapped in the period.
        swapped: Bytes,
        /// Bytes saved in the period.
        saved_bytes: i64,
        /// The savings above which scanning is worth the CPU.
        threshold: Bytes,
    },
}

/// Bytes with a sign, for `Display`.
struct Signed(i64);

impl fmt::Display for Signed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.0 < 0 { "-" } else { "" }, Bytes(self.0.unsigned_abs()))
    }
}

impl fmt::Display for RateDecision {
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
                "the group uses {cpu_percent:.1} % of its CPU, and with {swapped} swapped it is \
                 not short of memory"
            ),
            Self::Demand { swapped } => write!(f, "CPU is scarce, but the group swapped {swapped}"),
            Self::Productive { swapped, saved_bytes, threshold } => write!(
                f,
                "CPU is scarce, but the group swapped {swapped}, and sharing saved {} more, \
                 above {threshold}",
                Signed(saved_bytes)
            ),
            Self::Unproductive { swapped, saved_bytes } => write!(
                f,
                "CPU is scarce, the group swapped {swapped}, but sharing saved {} more: \
                 scanning does not help",
                Signed(saved_bytes)
            ),
            Self::LittleSaved { swapped, saved_bytes, threshold } => write!(
                f,
                "CPU is scarce, the group swapped {swapped}, and sharing saved {} more, \
                 not above {threshold}",
                Signed(saved_bytes)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_says_its_numbers_and_goes_through_json_and_back() {
        let (swapped, threshold) = (Bytes::mib(96), Bytes::mib(4));
        let cases = [
            (
                Why::CpuFree { cpu_percent: 41.25, of: 90.0 },
                "scans 25 pages/ms instead of 20 pages/ms: the group uses 41.2 % of its CPU, \
                 less than 90 %",
            ),
            (
                Why::Unproductive { swapped, saved_bytes: -(3 << 20) },
                "scans 25 pages/ms instead of 20 pages/ms: CPU is scarce, the group swapped 96MiB, \
                 but sharing saved -3MiB more: scanning does not help",
            ),
            (
                Why::Productive { swapped, saved_bytes: 9 << 20, threshold },
                "scans 25 pages/ms instead of 20 pages/ms: CPU is scarce, but the group swapped \
                 96MiB, and sharing saved 9MiB more, above 4MiB",
            ),
        ];
        for (why, said) in cases {
            let decision = RateDecision { from: Rate(20), to: Rate(25), why };
            assert_eq!(decision.to_string(), said);
            let json = serde_json::to_string(&decision).unwrap();
            assert_eq!(serde_json::from_str::<RateDecision>(&json).unwrap(), decision, "{json}");
        }
        let same = RateDecision { from: Rate(5), to: Rate(5), why: Why::Static };
        assert_eq!(same.to_string(), "scans 5 pages/ms as before: the rate is fixed");
    }
}
