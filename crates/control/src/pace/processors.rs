//! Fairness between hosts whose requests take all processors of their lender.

use aquifer_page::Bytes;

/// The part of all processor time that is in use if requests wait for a processor.
const BUSY: f64 = 0.95;
/// The part of all processor time that the server itself must use: else its rate is no remedy.
const SERVING: f64 = 0.25;
/// Bytes a second below which it is not the pages that take the processors: one serves far more.
const LEAST: Bytes = Bytes::mib(64);
/// The rate as a part of what the lender gave while it was saturated. Below 1, so that requests
/// wait for their turn and not for a processor.
const PART: f64 = 0.9;
/// How much the rate grows in a period in which processors are idle.
const GROWTH: f64 = 1.25;
/// Growths after which the rate is lifted: the lender could give far more.
const GROWTHS: u32 = 5;

/// What lending did in the last period.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ProcessorLoad {
    /// Bytes a second that borrowers read and wrote.
    pub lent: Bytes,
    /// Hosts that read or wrote.
    pub hosts: usize,
    /// The part of all processors' time that was in use, from 0.0 to 1.0.
    pub busy: f64,
    /// The part of all processors' time that the server used.
    pub server: f64,
}

impl ProcessorLoad {
    fn is_saturated(&self) -> bool {
        self.busy >= BUSY && self.server >= SERVING && self.lent >= LEAST
    }
}

/// The rate at which several hosts take turns.
///
/// It never falls while it is set: other programs that take the processors must not slow lending
/// further with each period.
#[derive(Clone, Debug, Default)]
pub struct FairRate {
    rate: Option<Bytes>,
    growths: u32,
}

impl FairRate {
    /// Returns the bytes a second that all borrowers share after a period with this load.
    pub fn step(&mut self, load: &ProcessorLoad) -> Option<Bytes> {
        let saturated = load.is_saturated() && load.hosts > 1;
        self.rate = match (self.rate, saturated) {
            (None, false) => None,
            (rate, true) => {
                self.growths = 0;
                Some(rate.unwrap_or_default().max(load.lent.scaled(PART)))
            }
            (Some(_), false) if self.growths >= GROWTHS || load.hosts < 2 => None,
            (Some(rate), false) => {
                self.growths += 1;
                Some(rate.scaled(GROWTH))
            }
        };
        self.rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: ProcessorLoad =
        ProcessorLoad { lent: Bytes::mib(1000), hosts: 2, busy: 1.0, server: 0.6 };

    fn rates(loads: &[ProcessorLoad]) -> Vec<Option<u64>> {
        let mut policy = FairRate::default();
        loads.iter().map(|load| policy.step(load).map(|rate| rate.0 >> 20)).collect()
    }

    #[test]
    fn hosts_that_saturate_a_lender_share_a_rate() {
        assert_eq!(rates(&[FULL, FULL]), [Some(900), Some(900)]);
    }

    #[test]
    fn a_single_host_needs_no_turns() {
        assert_eq!(rates(&[ProcessorLoad { hosts: 1, ..FULL }]), [None]);
        let alone = ProcessorLoad { hosts: 1, busy: 0.5, ..FULL };
        assert_eq!(rates(&[FULL, alone]), [Some(900), None]);
    }

    #[test]
    fn processors_that_others_take_slow_no_borrower() {
        assert_eq!(rates(&[ProcessorLoad { server: 0.1, ..FULL }]), [None]);
    }

    #[test]
    fn a_server_that_is_busy_otherwise_limits_nothing() {
        assert_eq!(rates(&[ProcessorLoad { lent: Bytes::mib(1), ..FULL }]), [None]);
    }

    #[test]
    fn the_rate_never_falls_while_it_is_set() {
        let less = ProcessorLoad { lent: Bytes::mib(100), ..FULL };
        let more = ProcessorLoad { lent: Bytes::mib(2000), ..FULL };
        assert_eq!(rates(&[FULL, less, more]), [Some(900), Some(900), Some(1800)]);
    }

    #[test]
    fn the_rate_grows_and_ends_when_processors_are_idle() {
        let idle = ProcessorLoad { busy: 0.5, ..FULL };
        let rates = rates(&[FULL, idle, idle, idle, idle, idle, idle]);
        assert_eq!(rates[..3], [Some(900), Some(1125), Some(1406)]);
        assert!(rates[..6].is_sorted_by(|earlier, later| earlier < later), "{rates:?}");
        assert_eq!(rates[6], None);
    }
}
