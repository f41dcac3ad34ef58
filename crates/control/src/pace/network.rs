//! The part of a link that lending leaves to the host's own programs.

use aquifer_page::Bytes;

/// Own traffic below this part of the link's speed does not count: every host has some.
const IDLE: f64 = 0.01;
/// Traffic above this part of the link's speed may make its users wait for each other.
const CROWDED: f64 = 0.6;
/// Room that own traffic gets above its present rate, so that it can grow.
const GROWTH: f64 = 1.25;
/// The part of its share that lending keeps, however much the host itself sends: borrowers whose
/// pages do not come at all would take the host for dead.
const LEAST: f64 = 0.25;
/// Bytes on the link for each byte of a page: the headers of NBD, TLS, TCP, IP and Ethernet.
const OVERHEAD: f64 = 1.08;
/// Bytes in the other direction for each byte of a page: requests and acknowledgements.
const ANSWERS: f64 = 0.04;
/// Periods in which the link is not crowded before lending is free again.
const QUIET_PERIODS: u32 = 5;

/// Bytes a second in each direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// Bytes a second that this host receives.
    pub received: Bytes,
    /// Bytes a second that this host sends.
    pub sent: Bytes,
}

/// What a link carried in the last period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkLoad {
    /// The link's speed in each direction, in bytes a second.
    pub speed: Bytes,
    /// All traffic.
    pub all: Flow,
    /// The pages of borrowers among it.
    pub lent: Flow,
}

impl LinkLoad {
    /// Returns own traffic and all traffic of each direction, as parts of the speed.
    fn parts(&self) -> [(f64, f64); 2] {
        let part = |all: Bytes, lent: Bytes, back: Bytes| {
            let (all, speed) = (all.0 as f64, self.speed.0.max(1) as f64);
            let of_pages = lent.0 as f64 * OVERHEAD + back.0 as f64 * ANSWERS;
            ((all - of_pages).max(0.0) / speed, all / speed)
        };
        let Flow { received, sent } = self.lent;
        [part(self.all.received, received, sent), part(self.all.sent, sent, received)]
    }
}

/// The rate of lending beside the host's own traffic.
///
/// While nothing else uses the link, lending may use all of it. Once own traffic makes the link
/// crowded, lending gets at most its share, and less if own traffic needs more than the rest. Own
/// traffic can grow by a quarter a period, so it gets what it needs in a few periods.
#[derive(Clone, Debug)]
pub struct NetworkShare {
    share: f64,
    /// Periods without a need since the rate was set; `None` without a rate.
    quiet: Option<u32>,
}

impl NetworkShare {
    /// Makes the policy for a lender that may use `share` (above 0.0, up to 1.0) of its link; 1.0
    /// sets no rate.
    pub fn new(share: f64) -> Self {
        Self { share, quiet: None }
    }

    /// Returns the bytes a second that lending may use after a period with this load. Without a
    /// known speed, there is no limit.
    pub fn step(&mut self, load: Option<&LinkLoad>) -> Option<Bytes> {
        let Some(load) = load.filter(|_| self.share < 1.0) else {
            self.quiet = None;
            return None;
        };
        let crowded = load.parts().into_iter().filter(|(own, all)| *own >= IDLE && *all >= CROWDED);
        let own = crowded.map(|(own, _)| own).reduce(f64::max);
        self.quiet = match (own.is_some(), self.quiet) {
            (true, _) => Some(0),
            (false, Some(periods)) if periods + 1 < QUIET_PERIODS => Some(periods + 1),
            (false, _) => None,
        };
        self.quiet?;
        // In a quiet period, what the host itself sends now is no measure.
        let own =
            own.unwrap_or_else(|| load.parts().map(|(own, _)| own).into_iter().fold(0.0, f64::max));
        let part = (1.0 - own * GROWTH).clamp(self.share * LEAST, self.share);
        Some(load.speed.scaled(part / OVERHEAD))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEED: u64 = 1_000_000;

    /// Returns a load of which lending sends `lent` and the host itself `own`, in percent of the
    /// link.
    fn load(lent: u64, own: u64) -> LinkLoad {
        let lent_bytes = SPEED * lent / 100;
        let sent = Bytes((lent_bytes as f64 * OVERHEAD) as u64 + SPEED * own / 100);
        LinkLoad {
            speed: Bytes(SPEED),
            all: Flow { received: Bytes(1000), sent },
            lent: Flow { received: Bytes(1000), sent: Bytes(lent_bytes) },
        }
    }

    /// Returns the rates, in percent of the link, after each of these loads.
    fn rates(share: f64, loads: &[(u64, u64)]) -> Vec<Option<u64>> {
        let mut policy = NetworkShare::new(share);
        let step = |&(lent, own): &(u64, u64)| {
            let rate = policy.step(Some(&load(lent, own)));
            rate.map(|rate| (rate.0 as f64 * OVERHEAD * 100.0 / SPEED as f64).round() as u64)
        };
        loads.iter().map(step).collect()
    }

    #[test]
    fn lending_alone_may_use_the_whole_link() {
        assert_eq!(rates(0.8, &[(10, 0), (60, 0), (92, 0), (92, 0)]), [None; 4]);
    }

    #[test]
    fn own_traffic_on_a_quiet_link_limits_nothing() {
        assert_eq!(rates(0.8, &[(0, 50), (20, 30), (5, 40)]), [None; 3]);
    }

    #[test]
    fn lending_makes_room_as_own_traffic_grows() {
        let loads = [(90, 0), (85, 5), (74, 20), (69, 25), (64, 31), (56, 39), (47, 49), (36, 60)];
        let rates = rates(0.8, &loads);
        assert_eq!(rates[..3], [None, Some(80), Some(75)]);
        assert!(rates[2..].is_sorted_by(|earlier, later| earlier > later), "{rates:?}");
        assert_eq!(rates.last(), Some(&Some(25)));
    }

    #[test]
    fn lending_keeps_a_part_however_busy_the_host_is() {
        assert_eq!(rates(0.8, &[(1, 98), (20, 80)]), [Some(20), Some(20)]);
    }

    #[test]
    fn the_limit_ends_after_some_quiet_periods() {
        let loads = [(80, 10), (30, 0), (30, 0), (30, 0), (30, 0), (30, 0), (90, 0)];
        let rates = rates(0.8, &loads);
        assert_eq!(rates[..5], [Some(80); 5]);
        assert_eq!(rates[5..], [None, None]);
    }

    #[test]
    fn a_busy_period_restarts_the_quiet_ones() {
        let loads = [(80, 10), (30, 0), (30, 0), (30, 0), (80, 10), (30, 0), (30, 0)];
        assert_eq!(rates(0.8, &loads), [Some(80); 7]);
    }

    #[test]
    fn a_link_of_unknown_speed_has_no_limit() {
        let mut policy = NetworkShare::new(0.8);
        assert!(policy.step(Some(&load(80, 15))).is_some());
        assert_eq!(policy.step(None), None);
    }

    #[test]
    fn a_share_of_all_has_no_limit() {
        assert_eq!(rates(1.0, &[(50, 50)]), [None]);
    }

    #[test]
    fn traffic_of_one_direction_does_not_limit_the_other() {
        let sending = load(92, 0);
        let all = |received| Flow { received: Bytes(received), ..sending.all };
        let rate = |load| NetworkShare::new(0.8).step(Some(&load));
        let requests = LinkLoad { all: all(SPEED * 3 / 100), ..sending };
        assert_eq!(rate(requests), None, "pages cause requests and acknowledgements");
        let download = LinkLoad { all: all(SPEED * 10 / 100), ..sending };
        assert_eq!(rate(download), None, "the host itself receives");
    }

    #[test]
    fn received_traffic_counts_as_sent_traffic_does() {
        let sent = load(70, 20);
        let swap = |flow: Flow| Flow { received: flow.sent, sent: flow.received };
        let received = LinkLoad { all: swap(sent.all), lent: swap(sent.lent), ..sent };
        let rate = |load| NetworkShare::new(0.8).step(Some(&load));
        assert_eq!(rate(received), rate(sent));
    }
}
