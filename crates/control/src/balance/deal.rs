use std::cmp::Ordering;

use super::section::Section;
use super::shares::{Claim, Grower, divide, fair};
use super::standing::Standing;
use super::{Config, Give, Host};

/// What the deal comes to for one VM, in sections: it gives or gets, never both.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Dealt {
    pub(super) gives: u64,
    pub(super) give: Option<Give>,
    pub(super) gets: u64,
}

/// Deals out what is free and what is given, by the four steps of the module's documentation.
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

/// One period's deal: from whom, to whom. All numbers are of sections.
struct Deal<'a> {
    standings: &'a [Standing<'a>],
    section: Section,
    free: u64,
    /// What is free and what has been given so far.
    pot: u64,
    dealt: Vec<Dealt>,
}

impl Deal<'_> {
    fn each(&self, of: impl Fn(&Standing<'_>) -> u64) -> Vec<u64> {
        self.standings.iter().map(of).collect()
    }

    /// What the pot lacks to give all what they want.
    fn missing(&self) -> u64 {
        total(self.standings.iter().map(|standing| standing.wants)).saturating_sub(self.pot)
    }

    /// What is wanted by those for whom others give at once.
    fn urgent(&self) -> u64 {
        total(
            self.standings
                .iter()
                .filter(|standing| standing.urgent())
                .map(|standing| standing.wants),
        )
    }

    /// Takes up to `most` of what each VM `has` to give, counted with what it has given so far; from the VM with most by
    /// weight first: better few VMs are disturbed than all.
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

    /// Which of two VMs, with what they have to give, gives first. Weight 0 makes anything endlessly much.
    fn precedence(&self, (one, has): (usize, u64), (other, other_has): (usize, u64)) -> Ordering {
        let [a, b] = [one, other].map(|i| self.standings[i].reading);
        let crossed = (u128::from(other_has) * u128::from(a.limits.weight))
            .cmp(&(u128::from(has) * u128::from(b.limits.weight)));
        crossed.then(other_has.cmp(&has)).then_with(|| a.vm.cmp(&b.vm))
    }

    /// Has those who are above their fair share give down to it, as far as somebody is below theirs by a whole section.
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

    /// What a VM may claim when all that there is is divided, if it takes part.
    fn claim(&self, standing: &Standing<'_>, at_once: bool) -> Option<Claim> {
        let floor = standing.figures.filter(|_| !standing.reading.busy)?.demand.floor;
        let limits = standing.reading.limits;
        let most = standing.reading.size.saturating_add(self.section.bytes(standing.wants));
        let most = most.saturating_sub(self.section.bytes(standing.surplus(at_once)));
        Some(Claim { least: floor.max(limits.least()).min(most), most, weight: limits.weight })
    }

    /// Gives what is in the pot to those who want it: up to their mins first, then the rest.
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
