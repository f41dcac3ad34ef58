//! Each VM's part by the policy, in whole steps.

use std::cmp::Reverse;

use aquifer_page::Bytes;

use super::holding::Holding;
use super::{Config, Policy};

/// Between what and what each VM's steps may stay.
#[derive(Debug)]
pub(super) struct Parts {
    /// Below it, the VM gets.
    pub up: Vec<u64>,
    /// Above it, the VM gives though there is no deficit.
    pub down: Vec<u64>,
}

/// What each policy goes by, over all VMs of a period.
pub(super) struct Division<'a> {
    pub config: &'a Config,
    pub all: &'a [Holding<'a>],
}

impl Division<'_> {
    /// Parts of a surplus of which `able` may stay handed out, and no more than `free` of it be given now. `awaits`: some of
    /// the surplus has still to come, which is no reason to take anything from anybody.
    ///
    /// Parts are those of `able` less what the cache is to keep, but who stands within those of all of `able` stays
    /// there, so that a surplus that goes up and down by less than that moves nobody.
    pub fn parts(&self, able: Bytes, awaited: Bytes, free: Bytes) -> Parts {
        let steps = || self.all.iter().map(|one| one.steps);
        if self.config.policy == Policy::Demand {
            let up = self
                .all
                .iter()
                .map(|one| if one.hungry { (one.steps + 1).min(one.room) } else { one.steps });
            return Parts { up: up.collect(), down: steps().collect() };
        }
        let up = self.of(able.saturating_sub(awaited).saturating_sub(self.config.keep));
        let lacks = steps().zip(&up).any(|(steps, &up)| steps < up);
        let tight = lacks && free < self.config.whole_step().saturating_add(self.config.keep);
        let high = self.of(able);
        let mut down: Vec<u64> = match self.config.policy {
            // A step more than its part is within a step of it.
            Policy::Entitlement => high.iter().map(|high| high + 1).collect(),
            _ => high,
        };
        let uneven = self.config.policy == Policy::Fair && !self.even();
        if tight || (uneven && awaited == Bytes::ZERO) {
            down.clone_from(&up);
        }
        Parts { up, down }
    }

    /// The parts of `surplus`, together no more than it. By demand nobody has one.
    pub fn of(&self, surplus: Bytes) -> Vec<u64> {
        let step = self.config.whole_step();
        match self.config.policy {
            Policy::Demand => vec![0; self.all.len()],
            Policy::Fair => {
                let level = self.level(surplus.0 / step.0);
                self.all.iter().map(|one| one.room.min(level)).collect()
            }
            Policy::Entitlement => {
                let all: u128 = self.all.iter().map(|one| u128::from(one.vm.contributed.0)).sum();
                let part = |one: &Holding<'_>| {
                    let part = u128::from(surplus.0) * u128::from(one.vm.contributed.0);
                    // No more than the surplus, so it fits.
                    let part = u64::try_from(part / all.max(1)).unwrap_or(surplus.0);
                    (part / step.0).min(one.room)
                };
                self.all.iter().map(part).collect()
            }
        }
    }

    /// The most steps that each VM with room for them can have, when there are so many for all.
    fn level(&self, mut steps: u64) -> u64 {
        let mut rooms: Vec<u64> = self.all.iter().map(|one| one.room).collect();
        rooms.sort_unstable();
        let mut level = 0;
        for (done, &room) in rooms.iter().enumerate() {
            let with_room = (rooms.len() - done) as u64;
            let each = (steps / with_room).min(room - level);
            level += each;
            steps -= each * with_room;
            if level < room {
                break;
            }
        }
        level
    }

    /// Whether all have the same, as far as they have room.
    fn even(&self) -> bool {
        let most = self.all.iter().map(|one| one.steps).max().unwrap_or(0);
        self.all.iter().all(|one| one.steps == one.room.min(most))
    }

    /// Who is given first: the least.
    pub fn first_to_get(&self, which: usize, up: u64) -> impl Ord + use<> {
        let one = &self.all[which];
        (Reverse(self.swapped(one)), Reverse(up.saturating_sub(one.steps)), one.steps)
    }

    /// Of whom is taken first to cover a deficit: the least. Who does not give anyway comes last.
    pub fn first_to_give(&self, which: usize, part: u64) -> impl Ord + use<> {
        let one = &self.all[which];
        (
            one.stuck,
            one.untaken() == Bytes::ZERO,
            self.swapped(one),
            Reverse(one.steps.saturating_sub(part)),
        )
    }

    /// What it swapped, if that matters.
    fn swapped(&self, one: &Holding<'_>) -> Bytes {
        if self.config.policy == Policy::Demand { one.vm.swapped } else { Bytes::ZERO }
    }

    /// What the surplus lacks for the next steps of VMs that swap, with `free` of it left and those that `lack` unserved.
    ///
    /// Nothing by entitlement: what is borrowed no VM has contributed.
    pub fn short(&self, lack: usize, free: Bytes) -> Bytes {
        let steps = match self.config.policy {
            Policy::Demand => lack,
            Policy::Fair if lack > 0 => self.all.iter().filter(|one| one.steps < one.room).count(),
            Policy::Fair | Policy::Entitlement => 0,
        };
        if steps == 0 {
            return Bytes::ZERO;
        }
        let all = Bytes(self.config.whole_step().0.saturating_mul(steps as u64));
        all.saturating_add(self.config.keep).saturating_sub(free)
    }
}
