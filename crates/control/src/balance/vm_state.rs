//! The state of one VM before the division: its wants, and the surplus that it can give.

use aquifer_page::Bytes;

use super::history::{Demand, History, Signs};
use super::section::Section;
use super::{Config, Host, Reading, Want};

/// The figures derived from a guest's reading, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    /// The guest's use.
    pub(super) used: Bytes,
    /// The memory that the guest's kernel reserves.
    pub(super) kept: Bytes,
    /// The free memory that the guest gets on top.
    pub(super) slack: Bytes,
    pub(super) demand: Demand,
}

/// One VM's wants and surplus in this period. Numbers of sections are `u64`s.
#[derive(Clone, Debug)]
pub(super) struct VmState<'a> {
    pub(super) reading: &'a Reading,
    /// `None` if the guest gave no usable figures.
    pub(super) figures: Option<Figures>,
    /// Sections that the VM wants to grow by.
    pub(super) wants: u64,
    /// The reason to grow, also where a short host prevents the growth.
    pub(super) want: Option<Want>,
    /// Further sections that the VM would want if the host were not short.
    pub(super) withheld: u64,
    /// Sections above the VM's max that the guest does not use.
    pub(super) over_max: u64,
    /// Sections of surplus that have lasted.
    pub(super) lasting: u64,
    /// Sections of present surplus, lasting or not.
    pub(super) spare: u64,
    /// The highest demand of the last periods, if there are enough of them.
    pub(super) peak: Option<Demand>,
    /// Periods for which the VM still gives nothing, because it grew.
    pub(super) hold: u32,
    /// Periods for which the VM has had a surplus.
    pub(super) lasted: u32,
}

impl<'a> VmState<'a> {
    /// Reads one VM's state, and records the reading in `history`.
    pub(super) fn read(
        reading: &'a Reading,
        history: &mut History,
        host: &Host,
        section: Section,
        config: &Config,
    ) -> Self {
        let signs = history.read(reading, config);
        let mut vm_state = Self {
            reading,
            figures: None,
            wants: 0,
            want: None,
            withheld: 0,
            over_max: 0,
            lasting: 0,
            spare: 0,
            peak: None,
            hold: history.hold(config),
            lasted: 0,
        };
        let Some(signs) = signs else { return vm_state };
        let (figures, want) = figures(reading, history, signs, section, config);
        history.remember(figures.demand, config);
        vm_state.figures = Some(figures);
        if reading.busy {
            return vm_state;
        }
        vm_state.peak = history.peak(config);
        vm_state.hungers(want, figures, host, section, config);
        vm_state.spares(figures, history, section, config);
        vm_state
    }

    /// Whether other VMs give surplus at once for this VM.
    pub(super) fn urgent(&self) -> bool {
        self.wants > 0 && self.want.is_some_and(Want::is_urgent)
    }

    /// Returns the sections that the balancer may take: the lasting surplus, or with `at_once` the
    /// present one.
    pub(super) fn surplus(&self, at_once: bool) -> u64 {
        match (self.hold, at_once) {
            (0, true) => self.spare,
            (0, false) => self.lasting,
            _ => 0,
        }
    }

    /// Returns the size that a VM keeps when the balancer takes sections for a fair share: its use,
    /// with half a section for noise, or its min.
    pub(super) fn keeps(&self, at_once: bool, section: Section) -> Option<Bytes> {
        let demand = if at_once { self.figures.map(|figures| figures.demand) } else { self.peak }?;
        Some(demand.floor.saturating_add(section.half()).max(self.reading.limits.least()))
    }

    /// Sets the sections to grow by, and the reason.
    fn hungers(
        &mut self,
        want: Option<Want>,
        figures: Figures,
        host: &Host,
        section: Section,
        config: &Config,
    ) {
        let Reading { size, limits, wish, .. } = *self.reading;
        let room = section.down(limits.max.saturating_sub(size));
        let to_min = section.up(limits.least().saturating_sub(size)).min(room);
        let missing = figures.demand.need.saturating_sub(size);
        let want = want.or((missing > section.band(config)).then_some(Want::Slack));
        let to_need = if want.is_some() { section.up(missing).min(room) } else { 0 };
        self.wants = to_need.max(to_min);
        let urgent = want.is_some_and(Want::is_urgent);
        self.want = if to_min > 0 && to_min >= to_need && !urgent { Some(Want::Min) } else { want };
        if host.short {
            let wanted = self.wants;
            self.wants = to_min.max(to_need.min(section.up(wish)));
            self.withheld = wanted - self.wants;
        }
    }

    /// Sets the sections that the VM can give.
    fn spares(&mut self, figures: Figures, history: &History, section: Section, config: &Config) {
        let Reading { size, limits, .. } = *self.reading;
        if self.wants > 0 {
            return;
        }
        let band = section.band(config);
        self.spare = self.beyond(figures.demand, band, section);
        self.lasted = history.lasted(size.saturating_sub(band.saturating_add(section.bytes(1))));
        if self.hold == 0 {
            self.lasting = self.peak.map_or(0, |peak| self.beyond(peak, band, section));
            self.over_max = section.down(size.saturating_sub(limits.max.max(figures.demand.floor)));
        }
    }

    /// Returns the sections beyond the need and the band, within the VM's limits.
    fn beyond(&self, demand: Demand, band: Bytes, section: Section) -> u64 {
        let Reading { size, limits, .. } = *self.reading;
        let comfort = demand.need.saturating_add(band).min(limits.max);
        section.down(size.saturating_sub(comfort.max(demand.floor).max(limits.least())))
    }
}

/// Derives the guest's figures, and a reason to grow even within the band, if there is one.
fn figures(
    reading: &Reading,
    history: &mut History,
    signs: Signs,
    section: Section,
    config: &Config,
) -> (Figures, Option<Want>) {
    let Reading { size, wish, swap_used, .. } = *reading;
    let used = reading.total.saturating_sub(reading.available);
    let kept = history.kept();
    let whole = used.saturating_add(swap_used);
    let rise = history.rise(whole);
    let ahead = Bytes(rise.0.saturating_mul(config.ahead_periods.into()));
    let slack = config.slack_on(whole).max(ahead);
    let need = kept.saturating_add(whole).saturating_add(slack).saturating_add(wish);
    let floor = kept.saturating_add(used).saturating_add(config.least_slack);
    let free = size.saturating_sub(kept.saturating_add(used));
    // Swap-in into free room is no shortage.
    let returns = if need > size { signs.swapped_in } else { Bytes::ZERO };
    let swapped = signs.swapped_out.saturating_add(returns);
    let want = if swapped > Bytes::ZERO {
        Some(Want::Swaps { swapped })
    } else if let Some(percent) = signs.pressure {
        Some(Want::Pressure { percent })
    } else if wish > Bytes::ZERO && need > size {
        Some(Want::Wish { wish })
    } else if free < Bytes(config.least_slack.0 / 2) {
        Some(Want::Tight { free })
    } else if ahead == slack && need > size.saturating_add(section.band(config)) {
        Some(Want::Rises { rise })
    } else {
        None
    };
    let need = match want {
        Some(Want::Swaps { .. } | Want::Pressure { .. }) => {
            need.max(size.saturating_add(section.bytes(1)))
        }
        _ => need,
    };
    (Figures { used, kept, slack, demand: Demand { need, floor } }, want)
}
