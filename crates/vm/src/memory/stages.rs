//! How long the stages of resizes took (\[Bielski18\], section IV-C, Table I).

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// The time of one stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Took {
    /// Name of the stage. The host's are `backend_reservation`, `request_reply`, `confirmation`,
    /// `backend_release` and `total`; others are the guest's.
    pub stage: String,
    /// Time, in microseconds.
    pub us: f64,
}

/// The direction of a resize.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// The VM gets memory.
    Add,
    /// The VM gives memory back.
    Remove,
}

/// The distribution of a stage's times, in microseconds, accurate to 1 in 1,000.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Number of times.
    pub count: u64,
    /// Minimum.
    pub min_us: u64,
    /// Maximum.
    pub max_us: u64,
    /// Median.
    pub median_us: u64,
}

/// A VM's times of all stages of all resizes, each as a histogram of (time, count) pairs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Times(BTreeMap<Direction, BTreeMap<String, Vec<(u64, u64)>>>);

impl Times {
    /// Adds the stages of a resize.
    pub(super) fn record(&mut self, direction: Direction, stages: &[Took]) {
        let known = self.0.entry(direction).or_default();
        for Took { stage, us } in stages {
            let counts = known.entry(stage.clone()).or_default();
            let mut histogram = histogram(counts);
            histogram.saturating_record((us.round() as u64).max(1));
            *counts = histogram
                .iter_recorded()
                .map(|step| (step.value_iterated_to(), step.count_at_value()))
                .collect();
        }
    }

    /// Returns the distributions of all stages in this direction.
    pub fn spreads(&self, direction: Direction) -> BTreeMap<String, Spread> {
        let of = |counts: &Vec<(u64, u64)>| {
            let histogram = histogram(counts);
            Spread {
                count: histogram.len(),
                min_us: histogram.min(),
                max_us: histogram.max(),
                median_us: histogram.value_at_quantile(0.5),
            }
        };
        let known = self.0.get(&direction).into_iter().flatten();
        known.map(|(stage, counts)| (stage.clone(), of(counts))).collect()
    }
}

fn histogram(counts: &[(u64, u64)]) -> Histogram<u64> {
    // From a microsecond to an hour.
    let mut histogram =
        Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("the bounds are in order");
    for (value, count) in counts {
        histogram.saturating_record_n(*value, *count);
    }
    histogram
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_times_are_accurate_to_one_in_a_thousand() {
        let mut times = Times::default();
        for us in [313_403.0, 254_541.0, 353_043.0, 0.2] {
            times.record(Direction::Add, &[Took { stage: "total".to_owned(), us }]);
        }
        let text = serde_json::to_string(&times).expect("it can be written");
        let times: Times = serde_json::from_str(&text).expect("it can be read");
        let total = times.spreads(Direction::Add)["total"];
        assert_eq!((total.count, total.min_us), (4, 1));
        assert!(
            total.max_us.abs_diff(353_043) < 354 && total.median_us.abs_diff(254_541) < 255,
            "{total:?}"
        );
        assert!(times.spreads(Direction::Remove).is_empty());
    }
}
