use std::collections::VecDeque;

use aquifer_page::Bytes;

use super::{Config, Reading};

/// Less swapping than this in a period is the guest's housekeeping, no shortage.
const HOUSEKEEPING: u64 = 1 << 20;

/// Use that has risen for so many readings in a row rises.
const RISES: usize = 3;

/// What is remembered of a VM, all of it read.
#[derive(Clone, Debug, Default)]
pub(super) struct Past {
    size: Option<Bytes>,
    /// Periods since its size rose, whoever did it.
    grew: Option<u32>,
    answer: Option<Answer>,
    /// What the guest's kernel keeps from its own count. The smallest difference that was seen: what a guest has counted
    /// once, it can count again; memory that was added and not counted yet must not look like more need.
    kept: Option<Bytes>,
    /// What it needed in the last periods, the present one last.
    window: VecDeque<Demand>,
    /// What it used, as it said the last times, the present one last.
    uses: VecDeque<Bytes>,
}

/// The guest's last own figures.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Answer {
    size: Bytes,
    total: Bytes,
    swap_in: u64,
    swap_out: u64,
    pressure: Option<f64>,
}

/// What a VM needed in one period, as sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Demand {
    /// With all its slack.
    pub(super) need: Bytes,
    /// What is not taken from it: what it uses and the least slack.
    pub(super) floor: Bytes,
}

/// What says that a guest is short, beside its use.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Signs {
    /// Written to swap since the guest answered before.
    pub(super) swapped_out: Bytes,
    /// Read from swap since then.
    pub(super) swapped_in: Bytes,
    /// PSI `some avg10` in percent, if it counts.
    pub(super) pressure: Option<f64>,
}

impl Past {
    /// Takes in a reading. Returns what the guest's figures say beside its use, if there are any.
    pub(super) fn read(&mut self, reading: &Reading, config: &Config) -> Option<Signs> {
        let rose = self.size.is_some_and(|before| reading.size > before);
        self.grew = if rose { Some(0) } else { self.grew.map(|periods| periods.saturating_add(1)) };
        self.size = Some(reading.size);
        if !reading.tells() {
            // A surplus of which nobody knows whether it lasted. The counters stay: a guest that swaps hard may be silent.
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
        // A counter below what it was: the guest was booted again.
        let counted = |now: u64, then: u64| match now.saturating_sub(then) {
            moved if config.swap_is_need && moved >= HOUSEKEEPING => Bytes(moved),
            _ => Bytes::ZERO,
        };
        // The average lags: while it falls after growth, it tells of the time before.
        let relieved = self.hold(config) > 0 && answer.pressure < before.pressure;
        Signs {
            swapped_out: counted(answer.swap_out, before.swap_out),
            swapped_in: counted(answer.swap_in, before.swap_in),
            pressure: if relieved { None } else { above(answer.pressure, config) },
        }
    }

    /// Takes in what this period's figures come to.
    pub(super) fn remember(&mut self, demand: Demand, config: &Config) {
        self.window.push_back(demand);
        while self.window.len() > periods(config) {
            self.window.pop_front();
        }
    }

    /// Takes in what it uses, and says by how much that rises a period, if it does.
    pub(super) fn rise(&mut self, used: Bytes) -> Bytes {
        // Figures that are those of before were read twice.
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

    /// The most of what it needed in all of the last periods, if there were enough of them to tell.
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

    /// For how many of the last periods it would have done with `size`.
    pub(super) fn lasted(&self, size: Bytes) -> u32 {
        let lasted = self.window.iter().rev().take_while(|demand| demand.need <= size).count();
        u32::try_from(lasted).unwrap_or(u32::MAX)
    }

    /// For how many more periods nothing is taken from it, because it grew.
    pub(super) fn hold(&self, config: &Config) -> u32 {
        self.grew.map_or(0, |periods| config.hold_after_grow.saturating_sub(periods))
    }

    /// What the guest's kernel keeps from its own count.
    pub(super) fn kept(&self) -> Bytes {
        self.kept.unwrap_or_default()
    }
}

/// The readings that a surplus must be in: the present one in any case.
fn periods(config: &Config) -> usize {
    usize::try_from(config.surplus_periods.max(1)).unwrap_or(usize::MAX)
}

fn above(pressure: Option<f64>, config: &Config) -> Option<f64> {
    pressure.filter(|percent| percent.is_finite() && *percent > config.pressure_percent)
}
