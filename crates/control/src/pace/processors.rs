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
/// How much the rate grows to find out whether the lender can give more.
const GROWTH: f64 = 1.25;
/// Periods with idle processors before the rate grows or ends. With the rate, requests wait for
/// their turn, so processors are idle at times although the lender gives all that it can.
const CALM: u32 = 5;
/// The part of the rate that borrowers must use for it to stay.
const USED: f64 = 0.8;

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
/// While it is set, it falls back only from a growth that was too much: other programs that take
/// the processors must not slow lending further with each period.
#[derive(Clone, Debug, Default)]
pub struct FairRate {
    rate: Option<Bytes>,
    /// What the lender can give for certain.
    base: Bytes,
    /// Periods with idle processors, one after the other.
    calm: u32,
}

impl FairRate {
    /// Returns the bytes a second that all borrowers share after a period with this load.
    pub fn step(&mut self, load: &ProcessorLoad) -> Option<Bytes> {
        let saturated = load.is_saturated() && load.hosts > 1;
        self.calm = if saturated { 0 } else { self.calm + 1 };
        self.rate = match self.rate {
            _ if saturated => {
                self.base = self.base.max(load.lent.scaled(PART));
                Some(self.base)
            }
            Some(rate) if load.hosts > 1 => match self.calm.is_multiple_of(CALM) {
                false => Some(rate),
                true => (load.lent >= rate.scaled(USED)).then(|| rate.scaled(GROWTH)),
            },
            _ => None,
        };
        if self.rate.is_none() {
            *self = Self::default();
        }
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
    fn the_rate_ends_when_borrowers_do_not_use_it() {
        let idle = ProcessorLoad { busy: 0.5, lent: Bytes::mib(100), ..FULL };
        let rates = rates(&[FULL, idle, idle, idle, idle, idle, idle]);
        assert_eq!(rates[..5], [Some(900); 5]);
        assert_eq!(rates[5..], [None, None]);
    }

    #[test]
    fn a_growth_that_is_too_much_falls_back() {
        // The rate itself keeps processors idle now and then.
        let held = ProcessorLoad { busy: 0.9, lent: Bytes::mib(890), ..FULL };
        let loads = [FULL, held, held, held, held, held, FULL, held, FULL, held];
        let rates = rates(&loads);
        assert_eq!(rates[..5], [Some(900); 5]);
        assert_eq!(rates[5], Some(1125), "one period in six finds out");
        assert_eq!(rates[6..], [Some(900); 4]);
    }

    #[test]
    fn a_lender_that_can_give_more_does() {
        let more = |lent| ProcessorLoad { busy: 0.9, lent: Bytes::mib(lent), ..FULL };
        let mut loads = vec![FULL];
        loads.extend([more(890); 5]);
        loads.extend([more(1120); 5]);
        let rates = rates(&loads);
        assert_eq!((rates[5], rates[10]), (Some(1125), Some(1406)));
    }
}
