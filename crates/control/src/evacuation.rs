//! The borrower's side of `mem_len_fin`: pages in the lease move elsewhere while I/O goes on (Fig.
//! 5b).

use std::time::Duration;

use aquifer_page::{Bytes, HostName, LeaseId};

use crate::borrower::{Borrower, Holding, Leaving, Stuck, Volume, VolumeState};
use crate::round::{Purpose, Round};
use crate::step_context::StepContext;
use crate::{Action, BorrowedLease, Message, What};

impl Borrower {
    /// Handles `mem_len_fin`: the lender wants its lease back (Algorithm 3 line 1, "feasible").
    pub(crate) fn recalled(
        &mut self,
        from: &HostName,
        lease: LeaseId,
        generation: u32,
        ctx: &mut StepContext<'_>,
    ) {
        self.skip(from, ctx);
        if self.expects(lease) {
            return;
        }
        if let Some(holding) = self.holdings.get_mut(&lease) {
            if holding.borrowed.lender != *from {
                return ctx.decide(What::Stranger { from: from.clone(), lease });
            }
            (holding.surplus, holding.is_abandoned, holding.rotates) = (false, false, false);
            let deactivating = self.volumes[&holding.volume].state == VolumeState::Deactivating;
            if holding.leaving == Leaving::No && !deactivating {
                holding.leaving = Leaving::Wanted;
                let bytes = holding.borrowed.bytes;
                // Until it can be vacated, the lender asks again and again.
                if !holding.is_stuck(ctx.now()) {
                    ctx.decide(What::Recalled { lender: from.clone(), lease, bytes });
                }
            }
            return;
        }
        if let Some(round) = &mut self.round {
            if round.got.iter().any(|got| got.lease == lease && got.lender != *from) {
                return ctx.decide(What::Stranger { from: from.clone(), lease });
            }
            let before = round.got.len();
            round.got.retain(|got| got.lease != lease);
            // An unknown lease may answer the request in flight, if the recall overtook the ack.
            // This host tells the lender that the lease is free, so a late ack must not match the
            // request.
            let is_new = round.got.len() == before && round.asks(from);
            if is_new && !self.pending_releases.contains(from, lease) {
                round.forget();
            }
        }
        if self.pending_releases.contains(from, lease) {
            self.pending_releases.add(from, lease, generation, ctx);
        } else {
            ctx.decide(What::Unwanted { lender: from.clone(), lease });
            ctx.send(from, Message::MemBorFin { lease, generation });
        }
        self.proceed(ctx);
    }

    /// Vacates all leases of `lender`, which is no longer a peer, as if it had recalled them.
    pub(crate) fn part(&mut self, lender: &HostName, ctx: &mut StepContext<'_>) {
        let of_it = |holding: &&Holding| {
            holding.borrowed.lender == *lender && holding.leaving == Leaving::No
        };
        let lease = |holding: &Holding| (holding.borrowed.lease, holding.borrowed.generation);
        let leases: Vec<_> = self.holdings.values().filter(of_it).map(lease).collect();
        for (lease, generation) in leases {
            self.recalled(lender, lease, generation, ctx);
        }
    }

    /// Starts the next step for recalled leases: first a round for a replacement, then the move.
    /// One round runs at a time, and one move at a time in a volume.
    pub(crate) fn evacuate_waiting(&mut self, ctx: &mut StepContext<'_>) {
        while self.round.is_none() {
            let next = self.holdings.iter().find(|(_, holding)| {
                holding.leaving == Leaving::Wanted
                    && !holding.is_beginning
                    && self.volumes[&holding.volume].state == VolumeState::Active
                    && !self.evacuating(holding.volume)
            });
            let Some((&lease, holding)) = next else { return };
            let volume = holding.volume;
            let missing = match holding.surplus || holding.copy_of.is_some() {
                true => Bytes::ZERO,
                false => holding.borrowed.bytes.saturating_sub(holding.replaced),
            };
            let wanted = missing.min(self.room(ctx));
            let purpose = Purpose::Replace { volume, lease };
            let Volume { owner, group, .. } = self.volumes[&volume].clone();
            let candidates = self.candidates(&owner, true, ctx);
            self.round = Some(Round::new(purpose, owner, group, wanted, candidates));
            self.proceed(ctx);
        }
    }

    /// Ends the round for a replacement, and moves the pages of the lease onto the round's leases.
    pub(crate) fn evacuate(&mut self, round: Round, ctx: &mut StepContext<'_>) {
        let Purpose::Replace { volume, lease } = round.purpose else { return };
        let is_swap = self.volumes[&volume].owner.is_swap();
        let is_needed = self.has_stuck_copy(lease, ctx.now());
        let Some(holding) = self.holdings.get_mut(&lease) else {
            return self.give_back(&round, ctx);
        };
        let BorrowedLease { lender, bytes, .. } = holding.borrowed.clone();
        let replaced = holding.replaced.saturating_add(round.got_bytes());
        if holding.rotates && replaced < bytes {
            (holding.leaving, holding.rotates) = (Leaving::No, false);
            let got = round.got_bytes();
            ctx.decide(What::KeepsKey { lease, lender, bytes, got });
            return self.give_back(&round, ctx);
        }
        (holding.leaving, holding.replaced) = (Leaving::Evacuating, replaced);
        let spills = match is_swap {
            // No key is worth a disk.
            _ if holding.rotates => false,
            // Its second copies serve its pages, unless their lender wants the memory.
            true => !holding.is_abandoned || is_needed,
            false => holding.may_spill(ctx.now()),
        };
        let is_new = !holding.is_stuck(ctx.now()) || !round.got.is_empty();
        for got in &round.got {
            self.hold(volume, got.clone());
        }
        if is_new {
            ctx.decide(What::Evacuates { lease, lender, bytes, onto: round.got_bytes() });
        }
        ctx.act(Action::Evacuate { volume, lease, onto: round.got, spills });
    }

    /// Returns whether the lease with the second copies of this one cannot leave, although its
    /// lender asks for it.
    fn has_stuck_copy(&self, of: LeaseId, now: Duration) -> bool {
        let is_it = |holding: &Holding| holding.copy_of == Some(of) && holding.is_stuck(now);
        self.holdings.values().any(is_it)
    }

    /// Gives the lease back: it is empty, and its volume no longer uses it.
    pub(crate) fn evacuated(
        &mut self,
        lease: LeaseId,
        unused: Vec<LeaseId>,
        ctx: &mut StepContext<'_>,
    ) {
        let Some(holding) = self.holdings.get(&lease) else { return };
        ctx.decide(What::Evacuated { lease, lender: holding.borrowed.lender.clone() });
        self.finish(lease, ctx);
        unused.into_iter().for_each(|lease| self.finish(lease, ctx));
    }

    /// Keeps the lease, which is still in use. The lender's next `mem_len_fin` starts another
    /// attempt.
    pub(crate) fn evacuation_failed(
        &mut self,
        lease: LeaseId,
        unused: Vec<LeaseId>,
        why: String,
        ctx: &mut StepContext<'_>,
    ) {
        let useless = unused.iter().filter_map(|id| Some(self.holdings.get(id)?.borrowed.clone()));
        let useless: Vec<_> = useless.collect();
        // Another lease of the same lender would be no better so soon.
        useless.iter().for_each(|lease| self.skip(&lease.lender, ctx));
        let lost: Bytes = useless.iter().map(|lease| lease.bytes).sum();
        let Some(holding) = self.holdings.get_mut(&lease) else { return };
        holding.leaving = Leaving::No;
        // The next attempt asks for the bytes that this one did not get or could not use.
        holding.replaced = holding.replaced.saturating_sub(lost);
        let at = ctx.now();
        let before = holding.stuck.clone().filter(|stuck| stuck.lasts(at));
        let is_new = before.as_ref().is_none_or(|before| before.why != why);
        let is_free = std::mem::take(&mut holding.rotates);
        // No host waits for a lease that this host leaves of its own accord.
        if !std::mem::take(&mut holding.surplus) && !is_free {
            let since = before.map_or(at, |before| before.since);
            holding.stuck = Some(Stuck { why: why.clone(), at, since });
        }
        if is_new {
            let lender = holding.borrowed.lender.clone();
            ctx.decide(What::EvacuationFailed { lease, lender, why });
        }
        unused.into_iter().for_each(|lease| self.finish(lease, ctx));
    }
}
