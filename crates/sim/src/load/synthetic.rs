//! Synthetic demand: a base, a swing over the day, a swing over minutes, and bursts.

use std::f64::consts::TAU;
use std::time::Duration;

use aquifer_page::{Bytes, HostName, NameError, PAGE_SIZE};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::Load;

const DAY_S: f64 = 86_400.0;

/// The mean time between two bursts of a host.
const BURST_INTERVAL_S: f64 = 1200.0;

/// The mean length of a burst.
const BURST_LENGTH_S: f64 = 180.0;

/// The time in which a burst rises, and in which it falls.
const BURST_RAMP_S: f64 = 20.0;

/// The demand of one host's programs. Amounts are shares of the host's RAM.
#[derive(Clone, Debug)]
pub struct Synthetic {
    memory: Bytes,
    base: f64,
    daily: Swing,
    minutes: Swing,
    /// The present burst, or the next one.
    burst: Burst,
    rng: SmallRng,
}

#[derive(Clone, Copy, Debug)]
struct Swing {
    amplitude: f64,
    period_s: f64,
    phase: f64,
}

#[derive(Clone, Copy, Debug)]
struct Burst {
    begin_s: f64,
    end_s: f64,
    height: f64,
}

/// Returns hosts with synthetic load, named `h0`, `h1` and so on. The same seed gives the same
/// load, whatever else happens in the simulation.
///
/// # Errors
/// If a number of this size does not fit into a name.
pub fn synthetic_hosts(
    hosts: usize,
    memory: Bytes,
    seed: u64,
) -> Result<Vec<(HostName, Load)>, NameError> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let width = hosts.saturating_sub(1).to_string().len();
    let host = |number| {
        let name = format!("h{number:0width$}").parse()?;
        Ok((name, Load::Synthetic(Box::new(Synthetic::new(memory, rng.random())))))
    };
    (0..hosts).map(host).collect()
}

impl Synthetic {
    /// Returns the load of one host with this RAM.
    pub fn new(memory: Bytes, seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let base = rng.random_range(0.25..0.75);
        let swing = |rng: &mut SmallRng, amplitude, period_s| Swing {
            amplitude: rng.random_range(0.0..amplitude),
            period_s,
            phase: rng.random_range(0.0..TAU),
        };
        let daily = swing(&mut rng, 0.2, DAY_S);
        let period_s = rng.random_range(120.0..900.0);
        let minutes = swing(&mut rng, 0.1, period_s);
        let burst = Burst::after(0.0, &mut rng);
        Self { memory, base, daily, minutes, burst, rng }
    }

    pub(super) fn demand(&mut self, now: Duration) -> Bytes {
        let now_s = now.as_secs_f64();
        while self.burst.end_s < now_s {
            self.burst = Burst::after(self.burst.end_s, &mut self.rng);
        }
        let share =
            self.base + self.daily.at(now_s) + self.minutes.at(now_s) + self.burst.at(now_s);
        let pages = self.memory.scaled(share.clamp(0.02, 1.6)).0 / PAGE_SIZE as u64;
        Bytes(pages * PAGE_SIZE as u64)
    }
}

impl Swing {
    fn at(self, now_s: f64) -> f64 {
        self.amplitude * (TAU * now_s / self.period_s + self.phase).sin()
    }
}

impl Burst {
    fn after(then_s: f64, rng: &mut SmallRng) -> Self {
        let mut exponential = |mean: f64| -mean * (1.0 - rng.random::<f64>()).ln();
        let begin_s = then_s + exponential(BURST_INTERVAL_S);
        let end_s = begin_s + 2.0 * BURST_RAMP_S + exponential(BURST_LENGTH_S);
        Self { begin_s, end_s, height: rng.random_range(0.1..0.6) }
    }

    fn at(self, now_s: f64) -> f64 {
        let nearest_end_s = (now_s - self.begin_s).min(self.end_s - now_s);
        self.height * (nearest_end_s / BURST_RAMP_S).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demand_swings_and_bursts_within_bounds() {
        let memory = Bytes::gib(64);
        let mut all = Vec::new();
        for seed in 0..20 {
            let mut load = Synthetic::new(memory, seed);
            all.extend((0..3600).map(|second| load.demand(Duration::from_secs(second))));
        }
        assert!(all.iter().all(|demand| *demand >= memory.scaled(0.01)));
        assert!(all.iter().all(|demand| *demand <= memory.scaled(1.6)));
        assert!(all.iter().any(|demand| *demand > memory), "some host must need more than its RAM");
        assert!(all.iter().any(|demand| *demand < memory.scaled(0.5)), "some host must have spare");
    }

    #[test]
    fn a_seed_gives_the_same_demand_at_any_sampling() {
        let (mut often, mut seldom) =
            (Synthetic::new(Bytes::gib(1), 7), Synthetic::new(Bytes::gib(1), 7));
        (0..3000).for_each(|second| _ = often.demand(Duration::from_secs(second)));
        let end = Duration::from_secs(3000);
        assert_eq!(often.demand(end), seldom.demand(end));
    }
}
