//! The controller of a scanner's rate.

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use super::{Config, Rate, RateDecision, Variant, Why};

/// The figures of a group in one period (Algorithm 1, lines 1-3).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Activity {
    /// CPU used by its VMs and its scanner, in percent of all CPU that the group may use. NaN means
    /// unknown, and counts as scarce.
    pub cpu_percent: f64,
    /// Bytes swapped by its VMs, in and out.
    pub swapped: Bytes,
    /// The change of the savings in the period, in bytes; negative if more copies were broken (by
    /// copy-on-write) than pages merged.
    pub saved_bytes: i64,
    /// The number of its VMs.
    pub vms: u32,
}

/// Sets the rate of one group's scanner, period by period. The [module](super) describes the rules.
#[derive(Clone, Debug)]
pub struct Controller {
    config: Config,
    rate: Rate,
}

impl Controller {
    /// Returns a controller that starts at [`Config::min`], or at its static rate.
    pub fn new(config: Config) -> Self {
        let rate = match config.variant {
            Variant::Static(rate) => rate,
            Variant::C | Variant::Cs | Variant::Csd => config.within(config.min),
        };
        Self { config, rate }
    }

    /// Replaces the settings, from the next period on.
    pub fn set_config(&mut self, config: Config) {
        self.config = config;
    }

    /// Returns the present rate.
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// Runs one period. Returns the rate for the next one, and the reason.
    pub fn step(&mut self, activity: &Activity) -> RateDecision {
        let Config { unit, .. } = self.config;
        let (from, why) = (self.rate, self.why(activity));
        self.rate = match (self.config.variant, why) {
            (Variant::Static(rate), _) => rate,
            (_, Why::CpuFree { .. } | Why::Demand { .. } | Why::Productive { .. }) => {
                self.config.within(Rate(from.0.saturating_add(unit.0)))
            }
            // Line 13 prints MIN(scan-rate / 2, MIN-SCAN-RATE), which would drop to the least rate
            // at once, and below it. The text says "multiplicative-decrease" and has a minimum, as
            // line 8 does: so MAX.
            (_, Why::CpuScarce { .. } | Why::NoDemand { .. } | Why::Unproductive { .. }) => {
                self.config.within(Rate(from.0 / 2))
            }
            (_, Why::LittleSaved { .. } | Why::Static) => self.config.within(from),
        };
        RateDecision { from, to: self.rate, why }
    }

    fn why(&self, activity: &Activity) -> Why {
        let Activity { cpu_percent, swapped, saved_bytes, vms } = *activity;
        let Config { variant, cpu_percent: of, swap, dedup_per_vm, .. } = self.config;
        if matches!(variant, Variant::Static(_)) {
            return Why::Static;
        }
        if cpu_percent < of {
            return Why::CpuFree { cpu_percent, of };
        }
        if variant == Variant::C {
            return Why::CpuScarce { cpu_percent, of };
        }
        // Line 7 prints "swap-rate < SWAP-THRESHOLD", but no count is below the paper's threshold
        // of zero. The text says "negligible", and "the presence of swap operations is deemed
        // memory demands" (section 6.1): so not above it.
        if swapped <= swap {
            return Why::NoDemand { cpu_percent, swapped };
        }
        if variant == Variant::Cs {
            return Why::Demand { swapped };
        }
        let threshold = Bytes(dedup_per_vm.0.saturating_mul(vms.into()));
        if i128::from(saved_bytes) > i128::from(threshold.0) {
            Why::Productive { swapped, saved_bytes, threshold }
        } else if saved_bytes <= 0 {
            Why::Unproductive { swapped, saved_bytes }
        } else {
            Why::LittleSaved { swapped, saved_bytes, threshold }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUSY: Activity =
        Activity { cpu_percent: 100.0, swapped: Bytes::mib(8), saved_bytes: 5 << 20, vms: 4 };

    #[test]
    fn new_settings_apply_from_the_next_period() {
        let mut controller = Controller::new(Config::default());
        for _ in 0..20 {
            controller.step(&BUSY);
        }
        assert_eq!(controller.rate(), Rate(50));
        controller.set_config(Config { max: Rate(20), ..Config::default() });
        let nothing_to_do = Activity { saved_bytes: 1 << 20, ..BUSY };
        assert_eq!(controller.step(&nothing_to_do).to, Rate(20));
        controller.set_config(Config { variant: Variant::Static(Rate(200)), ..Config::default() });
        assert_eq!(controller.step(&nothing_to_do).to, Rate(200));
    }

    #[test]
    fn unknown_cpu_counts_as_scarce() {
        let mut controller = Controller::new(Config::default());
        let unknown = Activity { cpu_percent: f64::NAN, swapped: Bytes::ZERO, ..BUSY };
        assert!(matches!(controller.step(&unknown).why, Why::NoDemand { .. }));
    }

    #[test]
    fn zero_vms_and_huge_thresholds_do_no_harm() {
        let mut controller =
            Controller::new(Config { dedup_per_vm: Bytes(u64::MAX), ..Config::default() });
        let most = Activity { saved_bytes: i64::MAX, vms: u32::MAX, ..BUSY };
        assert!(matches!(controller.step(&most).why, Why::LittleSaved { .. }));
        assert!(matches!(
            controller.step(&Activity { vms: 0, ..most }).why,
            Why::Productive { .. }
        ));
    }
}
