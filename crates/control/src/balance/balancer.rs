//! The balancer itself: turns the readings of one period into a plan of resizes.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_page::{Bytes, RegionName};

use super::deal::{Dealt, deal};
use super::past::Past;
use super::section::Section;
use super::standing::Standing;
use super::{Because, Config, Host, Move, Plan, Reading, Verdict, Want, Why};

/// Decides each period how large each VM of a host becomes. The [module](super) describes the
/// rules.
#[derive(Clone, Debug)]
pub struct Balancer {
    config: Config,
    /// The history of each VM of the last period.
    pasts: BTreeMap<RegionName, Past>,
}

impl Balancer {
    /// Returns a balancer without history. A balancer shrinks a VM only after it has read that VM
    /// for [`Config::surplus_periods`] periods. Sizes above a VM's max and urgent needs of other
    /// VMs are exceptions.
    pub fn new(config: Config) -> Self {
        Self { config, pasts: BTreeMap::new() }
    }

    /// Replaces the settings, from the next period on.
    pub fn set_config(&mut self, config: Config) {
        self.config = config;
    }

    /// Plans one period.
    ///
    /// Call it once a period with all VMs of the host, including VMs that do not answer. The
    /// balancer forgets a VM that is missing from `readings`; of two readings of one VM the first
    /// counts. The plan assumes that nothing else resizes VMs meanwhile. After the plan, the sum of
    /// all sizes is at most the present sum plus [`Host::sections_free`].
    pub fn step(&mut self, host: &Host, readings: &[Reading]) -> Plan {
        let mut names = BTreeSet::new();
        let readings = readings.iter().filter(|reading| names.insert(&reading.vm));
        let Some(section) = Section::new(host.section) else {
            let verdicts = readings.map(|reading| untouched(reading, Why::NoSection)).collect();
            return Plan { moves: Vec::new(), verdicts };
        };
        let mut pasts = BTreeMap::new();
        let mut standings = Vec::new();
        for reading in readings {
            let mut past = self.pasts.remove(&reading.vm).unwrap_or_default();
            standings.push(Standing::read(reading, &mut past, host, section, &self.config));
            pasts.insert(reading.vm.clone(), past);
        }
        self.pasts = pasts;
        let dealt = deal(host, section, &standings, &self.config);
        self.plan(host, section, &standings, &dealt)
    }

    fn plan(
        &self,
        host: &Host,
        section: Section,
        standings: &[Standing<'_>],
        dealt: &[Dealt],
    ) -> Plan {
        let waits = who_waits(section.down(host.sections_free), standings, dealt);
        let each = || standings.iter().zip(dealt).zip(&waits);
        let mut moves: Vec<(u8, Move)> = each()
            .filter_map(|((standing, dealt), &waits)| {
                let because = because(standing, dealt, waits)?;
                let (vm, from) = (standing.reading.vm.clone(), standing.reading.size);
                let to = to(standing, dealt, section);
                Some((place(&because), Move { vm, from, to, because }))
            })
            .collect();
        moves.sort_by_key(|&(place, _)| place);
        let verdicts =
            each().map(|((standing, dealt), &waits)| self.verdict(standing, dealt, waits, section));
        Plan {
            moves: moves.into_iter().map(|(_, one)| one).collect(),
            verdicts: verdicts.collect(),
        }
    }

    fn verdict(
        &self,
        standing: &Standing<'_>,
        dealt: &Dealt,
        waits: bool,
        section: Section,
    ) -> Verdict {
        let why = self.why(standing, dealt, waits, section);
        let Some(figures) = standing.figures else { return untouched(standing.reading, why) };
        let Reading { size, swap_used, wish, limits, .. } = *standing.reading;
        Verdict {
            used: figures.used,
            swapped: swap_used,
            kept: figures.kept,
            slack: figures.slack,
            wish,
            need: figures.demand.need,
            target: target(
                size,
                figures.demand.need.max(limits.least()).min(limits.max),
                limits.max,
                section,
            ),
            to: to(standing, dealt, section),
            ..untouched(standing.reading, why)
        }
    }

    fn why(&self, standing: &Standing<'_>, dealt: &Dealt, waits: bool, section: Section) -> Why {
        let Reading { size, limits, .. } = *standing.reading;
        let Some(figures) = standing.figures else { return Why::Silent };
        if standing.reading.busy {
            return Why::Busy;
        }
        match because(standing, dealt, waits) {
            Some(Because::Shrinks { give }) => return Why::Shrinks { give },
            Some(Because::Grows { want, waits }) => {
                return Why::Grows { want, waits, wanted: section.bytes(standing.wants) };
            }
            None => {}
        }
        let surplus = section.bytes(standing.spare);
        match standing.want {
            Some(want) if standing.wants > 0 => {
                Why::Lacks { want, wanted: section.bytes(standing.wants), reserve: limits.reserve }
            }
            Some(want) if standing.withheld > 0 => {
                Why::HostShort { want, wanted: section.bytes(standing.withheld) }
            }
            Some(_) if figures.demand.need > size => Why::AtMax { max: limits.max },
            _ if surplus == Bytes::ZERO => Why::Fits,
            _ if standing.hold > 0 => Why::Holds { surplus, periods: standing.hold },
            _ if standing.lasting > 0 => Why::Keeps { surplus: section.bytes(standing.lasting) },
            _ => Why::Lasts {
                surplus,
                periods: standing.lasted,
                of: self.config.surplus_periods.max(1),
            },
        }
    }
}

/// Returns a verdict on a VM without usable figures of its guest.
fn untouched(reading: &Reading, why: Why) -> Verdict {
    let (vm, size) = (reading.vm.clone(), reading.size);
    let none = Bytes::ZERO;
    Verdict {
        vm,
        size,
        used: none,
        swapped: none,
        kept: none,
        slack: none,
        wish: reading.wish,
        need: none,
        target: size,
        to: size,
        why,
    }
}

/// Returns the size nearest to `goal` that is whole sections away from `size`. When growing, the
/// result is at least `goal` if max allows; when shrinking, it is no less than `goal`.
fn target(size: Bytes, goal: Bytes, max: Bytes, section: Section) -> Bytes {
    if goal > size {
        let sections =
            section.up(goal.saturating_sub(size)).min(section.down(max.saturating_sub(size)));
        size.saturating_add(section.bytes(sections))
    } else {
        size.saturating_sub(section.bytes(section.down(size.saturating_sub(goal))))
    }
}

fn to(standing: &Standing<'_>, dealt: &Dealt, section: Section) -> Bytes {
    let grown = standing.reading.size.saturating_add(section.bytes(dealt.gets));
    grown.saturating_sub(section.bytes(dealt.gives))
}

fn because(standing: &Standing<'_>, dealt: &Dealt, waits: bool) -> Option<Because> {
    if let (Some(give), 1..) = (dealt.give, dealt.gives) {
        return Some(Because::Shrinks { give });
    }
    standing.want.filter(|_| dealt.gets > 0).map(|want| Because::Grows { want, waits })
}

/// Returns for each VM whether it must wait for others to shrink before it can grow. Free sections
/// go to urgent needs first, then in the order of the readings.
fn who_waits(mut free: u64, standings: &[Standing<'_>], dealt: &[Dealt]) -> Vec<bool> {
    let mut waits = vec![false; dealt.len()];
    for urgent in [true, false] {
        for i in (0..dealt.len()).filter(|&i| standings[i].urgent() == urgent) {
            match free.checked_sub(dealt[i].gets) {
                Some(left) => free = left,
                None => waits[i] = true,
            }
        }
    }
    waits
}

/// Returns a move's rank in the plan, 0 first.
fn place(because: &Because) -> u8 {
    let urgent = |want: &Want| want.is_urgent();
    match because {
        Because::Grows { want, waits: false } if urgent(want) => 0,
        Because::Grows { waits: false, .. } => 1,
        Because::Shrinks { .. } => 2,
        Because::Grows { want, .. } if urgent(want) => 3,
        Because::Grows { .. } => 4,
    }
}
