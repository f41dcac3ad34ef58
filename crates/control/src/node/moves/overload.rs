//! The choice of the VM that relieves an overloaded host.
//!
//! A VM moves only from sustained overload: a move is too costly for the far more frequent short
//! one (\[Ge23\], "Introduction"). Of the VMs that bring M_u down to T_upper M_t, the one with the
//! least to copy moves, since a move copies the dirty pages of the cache (\[Jo20\], section 3.3).

use std::cmp::Reverse;
use std::time::Duration;

use aquifer_page::{Bytes, RegionName};

use super::{Node, Obstacle, VmReading, with_others};
use crate::Memory;

/// How long a VM stays on a host before overload may move it.
const STAY: Duration = Duration::from_secs(600);

/// A VM that could move.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate<'a> {
    vm: &'a RegionName,
    /// The RAM that this host gets back.
    frees: Bytes,
    /// What a move copies at least.
    copies: Bytes,
}

impl Candidate<'_> {
    fn text(&self) -> String {
        format!("{} frees {} and has {} to copy", self.vm, self.frees, self.copies)
    }
}

/// Chooses the VM that frees `excess` with the least to copy. If none frees as much, chooses the
/// one that frees most.
fn choose<'a, 'b>(candidates: &'b [Candidate<'a>], excess: Bytes) -> Option<&'b Candidate<'a>> {
    let enough = candidates.iter().filter(|one| one.frees >= excess);
    let most = || candidates.iter().min_by_key(|one| (Reverse(one.frees), one.copies, one.vm));
    enough.min_by_key(|one| (one.copies, one.frees, one.vm)).or_else(most)
}

impl Node {
    /// Chooses a VM to move from a host that has been overloaded for this long; returns it and the
    /// reason. No VM moves while another moves from or to this host.
    ///
    /// # Errors
    /// The reason why no VM moves.
    pub(super) fn relief(
        &self,
        vms: &[VmReading],
        lasted: Duration,
    ) -> Result<(RegionName, String), String> {
        let (candidates, stay) = self.candidates(vms);
        let Memory { used, .. } = self.own.memory;
        let excess = used.saturating_sub(self.own.memory.upper(&self.controller.facts().config));
        let is = self.sustained(lasted, excess);
        let is_moving = |vm: &VmReading| vm.obstacle.as_ref().is_some_and(Obstacle::is_move);
        let chosen = choose(&candidates, excess).filter(|_| !vms.iter().any(is_moving));
        let Some(chosen) = chosen else {
            return Err(match stay.is_empty() {
                true => format!("moves no VM, because it has none: {is}"),
                false => format!("moves no VM: {is}. {}", stay.join("; ")),
            });
        };
        let beaten = candidates.iter().filter(|one| *one != chosen).map(Candidate::text);
        let others: Vec<_> = beaten.chain(stay).collect();
        let why = format!("{is}; {}", chosen.text());
        Ok((chosen.vm.clone(), with_others(why, &others)))
    }

    /// Returns the VMs that could move, and the reasons why the others stay.
    fn candidates<'a>(&self, vms: &'a [VmReading]) -> (Vec<Candidate<'a>>, Vec<String>) {
        let (mut candidates, mut stay) = (Vec::new(), Vec::new());
        for VmReading { vm, obstacle, dirty, arrived } in vms {
            let frees = self.frees(vm);
            let why = match (obstacle, arrived) {
                (Some(obstacle), _) => obstacle.to_string(),
                (None, Some(arrived)) if *arrived < STAY => {
                    format!("it arrived {} s ago", arrived.as_secs())
                }
                _ if self.moves.backs_off(vm, self.now) => "its last move failed".to_owned(),
                _ if frees == Bytes::ZERO => "it would free nothing here".to_owned(),
                _ => {
                    candidates.push(Candidate { vm, frees, copies: *dirty });
                    continue;
                }
            };
            stay.push(format!("{vm} stays: {why}"));
        }
        (candidates, stay)
    }

    /// Describes the overload, and what was tried against it.
    fn sustained(&self, lasted: Duration, excess: Bytes) -> String {
        let config = &self.controller.facts().config;
        let Memory { used, total, .. } = self.own.memory;
        let (lasted, upper) =
            (Duration::from_secs(lasted.as_secs()), self.own.memory.upper(config));
        let is = match excess {
            Bytes::ZERO => format!("programs wait for memory at used {used} of {total}"),
            over => format!("used {used} of {total} is {over} above {upper}"),
        };
        let borrowed: Bytes = self.controller.volumes().iter().map(|volume| volume.bytes).sum();
        let tried = match (borrowed, config.borrows) {
            (Bytes::ZERO, true) => "no host lent enough".to_owned(),
            (Bytes::ZERO, false) => "this host may not borrow".to_owned(),
            (borrowed, _) => format!("it has borrowed {borrowed}"),
        };
        format!("overloaded for {lasted:?}, {is}, and {tried}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheapest_vm_that_frees_enough_moves_or_the_largest() {
        let names = ["a", "b", "c", "d"].map(|name| name.parse::<RegionName>().expect("a name"));
        let figures = [(100, 9), (300, 5), (200, 5), (400, 30)];
        let candidates: Vec<_> = names
            .iter()
            .zip(figures)
            .map(|(vm, (frees, copies))| {
                let (frees, copies) = (Bytes::mib(frees), Bytes::mib(copies));
                Candidate { vm, frees, copies }
            })
            .collect();
        let chosen =
            |excess| choose(&candidates, Bytes::mib(excess)).map(|chosen| chosen.vm.to_string());
        let cases = [(0, "c"), (150, "c"), (250, "b"), (350, "d"), (500, "d")];
        for (excess, vm) in cases {
            assert_eq!(chosen(excess).as_deref(), Some(vm), "{excess}");
        }
        assert_eq!(choose(&[], Bytes::ZERO), None);
    }
}
