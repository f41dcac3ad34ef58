//! The history of one VM: the figures that its surplus, growth and shortage are judged by.

use std::collections::VecDeque;

use aquifer_page::Bytes;

use super::{Config, Reading};

/// The least swap traffic of a period, in bytes, that counts as a shortage. Less is the guest's
/// housekeeping.
const HOUSEKEEPING: u64 = 1 << 20;

/// The number of rises in a row after which use counts as rising.
const RISES: usize = 3;

/// The history of one VM, all of it from readings.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    size: Option<Bytes>,
    /// Periods since the VM's size rose, by whatever cause.
    grew: Option<u32>,
    answer: Option<Answer>,
    /// The memory that the guest's kernel reserves: the smallest difference seen between size and
    /// `MemTotal`. The smallest, because the guest can count again all memory that it once counted.
    /// Added memory that the guest has not counted yet must not look like more need.
    kept: Option<Bytes>,
    /// The demands of the last periods, the present one last.
    window: VecDeque<Demand>,
    /// The last distinct figures of use, the present one last.
    uses: VecDeque<Bytes>,
}

/// The figures of the guest's last answer.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Answer {
    size: Bytes,
    total: Bytes,
    swap_in: u64,
    swap_out: u64,
    pressure: Option<f64>,
}

/// A VM's need in one period, as sizes of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Demand {
    /// The size with all slack.
    pub(super) need: Bytes,
    /// The size that the balancer never goes below: the use and the least slack.
    pub(super) floor: Bytes,
}

/// The signs of a shortage beside the use.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Signs {
    /// Bytes written to swap since the guest's previous answer.
    pub(super) swapped_out: Bytes,
    /// Bytes read from swap since then.
    pub(super) swapped_in: Bytes,
    /// PSI `some avg10` in percent, if it is above the limit.
    pub(super) pressure: Option<f64>,
}

impl History {
    /// Records a reading. Returns the signs of a shortage, or `None` if the guest's figures are not
    /// usable.
    pub(super) fn read(&mut self, reading: &Reading, config: &Config) -> Option<Signs> {
        let rose = self.size.is_some_and(|before| reading.size > before);
        self.grew = if rose { Some(0) } else { self.grew.map(|periods| periods.saturating_add(1)) };
        self.size = Some(reading.size);
        if !reading.tells() {
            // A surplus may not have lasted meanwhile. The counters stay, because a guest that
            // swaps hard may be silent.
            self.window.clear();
            self.uses.clear();
            return None;
        }
        let answer = Answer {
            size: reading.size,
            total: reading.total,
            swap_in: reading.swap_in,
            swap_out: reading.swap_out,
            pressure: reading.pressure,
        };
        let before = self.answer.replace(answer);
        self.learn_kept(answer, before, reading.busy);
        Some(self.signs(answer, before, config))
    }

    fn learn_kept(&mut self, answer: Answer, before: Option<Answer>, busy: bool) {
        let settled = |before: Answer| before.size == answer.size && before.total == answer.total;
        let difference = answer.size.saturating_sub(answer.total);
        match self.kept {
            None => self.kept = Some(difference),
            // A total above the size is from before a shrink.
            Some(kept) if !busy && before.is_some_and(settled) && answer.total <= answer.size => {
                self.kept = Some(kept.min(difference));
            }
            Some(_) => {}
        }
    }

    fn signs(&self, answer: Answer, before: Option<Answer>, config: &Config) -> Signs {
        let Some(before) = before else {
            return Signs { pressure: above(answer.pressure, config), ..Signs::default() };
        };
        // A counter that went down means that the guest rebooted.
        let counted = |now: u64, then: u64| match now.saturating_sub(then) {
            moved if config.swap_is_need && moved >= HOUSEKEEPING => Bytes(moved),
            _ => Bytes::ZERO,
        };
        // The average lags: while it falls after growth, it reflects the time before the growth.
        let relieved = self.hold(config) > 0 && answer.pressure < before.pressure;
        Signs {
            swapped_out: counted(answer.swap_out, before.swap_out),
            swapped_in: counted(answer.swap_in, before.swap_in),
            pressure: if relieved { None } else { above(answer.pressure, config) },
        }
    }

    /// Records the demand of this period.
    pub(super) fn remember(&mut self, demand: Demand, config: &Config) {
        self.window.push_back(demand);
        while self.window.len() > periods(config) {
            self.window.pop_front();
        }
    }

    /// Records the guest's use, and returns the average rise in a period, or zero if use does not
    /// rise.
    pub(super) fn rise(&mut self, used: Bytes) -> Bytes {
        // Equal figures are the same answer, read twice.
        if self.uses.back() != Some(&used) {
            self.uses.push_back(used);
        }
        while self.uses.len() > RISES + 1 {
            self.uses.pop_front();
        }
        let rises = self.uses.len() > RISES && self.uses.iter().is_sorted();
        let (first, last) = (self.uses.front(), self.uses.back());
        match (first, last) {
            (Some(first), Some(last)) if rises => Bytes((last.0 - first.0) / RISES as u64),
            _ => Bytes::ZERO,
        }
    }

    /// Returns the highest demand of the last periods, or `None` while there are too few of them.
    pub(super) fn peak(&self, config: &Config) -> Option<Demand> {
        if self.window.len() < periods(config) {
            return None;
        }
        let most = |one: Demand, other: &Demand| Demand {
            need: one.need.max(other.need),
            floor: one.floor.max(other.floor),
        };
        self.window.iter().copied().reduce(|one, other| most(one, &other))
    }

    /// Returns for how many of the last periods `size` would have been enough.
    pub(super) fn lasted(&self, size: Bytes) -> u32 {
        let lasted = self.window.iter().rev().take_while(|demand| demand.need <= size).count();
        u32::try_from(lasted).unwrap_or(u32::MAX)
    }

    /// Returns for how many more periods the VM gives nothing, because it grew.
    pub(super) fn hold(&self, config: &Config) -> u32 {
        self.grew.map_or(0, |periods| config.hold_after_grow.saturating_sub(periods))
    }

    /// Returns the memory that the guest's kernel reserves.
    pub(super) fn kept(&self) -> Bytes {
        self.kept.unwrap_or_default()
    }
}

/// Returns the number of readings that a surplus must be in, at least 1.
fn periods(config: &Config) -> usize {
    usize::try_from(config.surplus_periods.max(1)).unwrap_or(usize::MAX)
}

fn above(pressure: Option<f64>, config: &Config) -> Option<f64> {
    pressure.filter(|percent| percent.is_finite() && *percent > config.pressure_percent)
}
