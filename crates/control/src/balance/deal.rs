//! The division of one period's sections: which VMs give, and which VMs get.

use std::cmp::Ordering;

use super::section::Section;
use super::shares::{Claim, Grower, divide, fair};
use super::standing::Standing;
use super::{Config, Give, Host};

/// One VM's result of the division, in sections. A VM gives or gets, never both.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Dealt {
    pub(super) gives: u64,
    pub(super) give: Option<Give>,
    pub(super) gets: u64,
}

/// Divides the free and the given sections, by the four steps of the module's documentation.
pub(super) fn deal(
    host: &Host,
    section: Section,
    standings: &[Standing<'_>],
    config: &Config,
) -> Vec<Dealt> {
    let free = section.down(host.sections_free);
    let mut deal = Deal {
        standings,
        section,
        free,
        pot: free,
        dealt: vec![Dealt::default(); standings.len()],
    };
    deal.take(u64::MAX, Give::OverMax, &deal.each(|standing| standing.over_max));
    let lasting = deal.each(|standing| standing.surplus(false));
    if !config.keep_surplus || host.short {
        deal.take(u64::MAX, Give::Return, &lasting);
    }
    deal.take(deal.missing(), Give::Surplus, &lasting);
    let now = deal.each(|standing| standing.surplus(true));
    deal.take(deal.missing().min(deal.urgent()), Give::Surplus, &now);
    if deal.missing() > 0 {
        deal.even_out();
    }
    deal.hand_out();
    if deal.pot == 0 && standings.iter().all(|standing| standing.wants == 0) {
        deal.take(1, Give::Ahead, &lasting);
    }
    deal.dealt
}

/// One period's division. All numbers are of sections.
struct Deal<'a> {
    standings: &'a [Standing<'a>],
    section: Section,
    free: u64,
    /// The free sections and those given so far.
    pot: u64,
    dealt: Vec<Dealt>,
}

impl Deal<'_> {
    fn each(&self, of: impl Fn(&Standing<'_>) -> u64) -> Vec<u64> {
        self.standings.iter().map(of).collect()
    }

    /// Returns the sections that the pot lacks to meet all wants.
    fn missing(&self) -> u64 {
        total(self.standings.iter().map(|standing| standing.wants)).saturating_sub(self.pot)
    }

    /// Returns the sections that VMs with urgent needs want.
    fn urgent(&self) -> u64 {
        total(
            self.standings
                .iter()
                .filter(|standing| standing.urgent())
                .map(|standing| standing.wants),
        )
    }

    /// Takes up to `most` sections from VMs, each of which may give up to its entry in `has` in
    /// total. The VM with the largest surplus by weight gives first, so that few VMs are disturbed.
    fn take(&mut self, mut most: u64, give: Give, has: &[u64]) {
        let left = has.iter().zip(&self.dealt).map(|(has, dealt)| has.saturating_sub(dealt.gives));
        let mut order: Vec<(usize, u64)> = left.enumerate().filter(|&(_, left)| left > 0).collect();
        order.sort_by(|&one, &other| self.precedence(one, other));
        for (i, left) in order {
            let gives = left.min(most);
            if gives > 0 {
                self.dealt[i].gives += gives;
                self.dealt[i].give = Some(give);
                self.pot = self.pot.saturating_add(gives);
                most -= gives;
            }
        }
    }

    /// Orders two VMs, each with its sections to give: the one to give first comes first. Any
    /// surplus of a VM of weight 0 counts as infinite.
    fn precedence(&self, (one, has): (usize, u64), (other, other_has): (usize, u64)) -> Ordering {
        let [a, b] = [one, other].map(|i| self.standings[i].reading);
        let crossed = (u128::from(other_has) * u128::from(a.limits.weight))
            .cmp(&(u128::from(has) * u128::from(b.limits.weight)));
        crossed.then(other_has.cmp(&has)).then_with(|| a.vm.cmp(&b.vm))
    }

    /// Takes sections from VMs above their fair share, down to that share, as far as other VMs are
    /// below theirs by whole sections.
    fn even_out(&mut self) {
        let (standings, at_once) = (self.standings, self.urgent() > 0);
        let (places, claims): (Vec<usize>, Vec<Claim>) = standings
            .iter()
            .enumerate()
            .filter_map(|(i, standing)| Some((i, self.claim(standing, at_once)?)))
            .unzip();
        let sizes: u128 = places.iter().map(|&i| u128::from(standings[i].reading.size.0)).sum();
        let shares = fair(sizes + u128::from(self.section.bytes(self.free).0), &claims);
        let (mut below, mut above) = (0u64, vec![0; standings.len()]);
        for (&i, &share) in places.iter().zip(&shares) {
            let standing = &standings[i];
            let size = standing.reading.size;
            below = below
                .saturating_add(self.section.down(share.saturating_sub(size)).min(standing.wants));
            if let (0, Some(keeps)) = (standing.hold, standing.keeps(at_once, self.section)) {
                above[i] = self.section.down(size.saturating_sub(keeps.max(share)));
            }
        }
        self.take(below.saturating_sub(self.pot), Give::Share, &above);
    }

    /// Returns a VM's claim for the division of all memory, or `None` if the VM takes no part.
    fn claim(&self, standing: &Standing<'_>, at_once: bool) -> Option<Claim> {
        let floor = standing.figures.filter(|_| !standing.reading.busy)?.demand.floor;
        let limits = standing.reading.limits;
        let most = standing.reading.size.saturating_add(self.section.bytes(standing.wants));
        let most = most.saturating_sub(self.section.bytes(standing.surplus(at_once)));
        Some(Claim { least: floor.max(limits.least()).min(most), most, weight: limits.weight })
    }

    /// Gives the pot to the VMs that want sections: up to their mins first, then the rest.
    fn hand_out(&mut self) {
        for to_min in [true, false] {
            let growers: Vec<Grower> =
                (0..self.standings.len()).map(|i| self.grower(i, to_min)).collect();
            for (dealt, gets) in self.dealt.iter_mut().zip(divide(self.pot, &growers, self.section))
            {
                dealt.gets += gets;
                self.pot -= gets;
            }
        }
    }

    fn grower(&self, i: usize, to_min: bool) -> Grower {
        let (standing, dealt) = (&self.standings[i], self.dealt[i]);
        let limits = standing.reading.limits;
        let size = standing.reading.size.saturating_add(self.section.bytes(dealt.gets));
        let wants = if dealt.gives > 0 { 0 } else { standing.wants - dealt.gets };
        let most =
            if to_min { self.section.up(limits.least().saturating_sub(size)) } else { u64::MAX };
        Grower { size, wants: wants.min(most), weight: limits.weight }
    }
}

fn total(sections: impl Iterator<Item = u64>) -> u64 {
    sections.fold(0, u64::saturating_add)
}
