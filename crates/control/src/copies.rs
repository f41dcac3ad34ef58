//! Second copies of the pages in leases, on leases of other lenders.
//!
//! The pages of a region, or of swap, first go to leases with one copy of each. Then this host asks
//! for a second lease for each of these, and the process of the volume copies the pages. A lease
//! that holds a copy goes back at once if its lender asks for it: another one takes its place
//! later.

use std::collections::BTreeSet;

use aquifer_page::{HostName, LeaseId, VolumeId};

use crate::borrower::{Borrower, Holding, Leaving, VolumeState};
use crate::round::{Purpose, Round};
use crate::step_context::StepContext;
use crate::{Action, Candidates, Offer, Protection, What};

impl Borrower {
    /// Asks for a second copy of a lease, unless it has one. Prefers lenders that are not in
    /// `near`: those may fail together with the lease's lender.
    pub(crate) fn protect(
        &mut self,
        lease: LeaseId,
        near: &BTreeSet<HostName>,
        ctx: &mut StepContext<'_>,
    ) {
        let Some(holding) = self.holdings.get(&lease) else { return };
        if self.round.is_some() || !self.may_have_copy(lease, holding) {
            return;
        }
        let (volume, bytes) = (holding.volume, holding.borrowed.bytes);
        let lender = holding.borrowed.lender.clone();
        let (owner, group) =
            (self.volumes[&volume].owner.clone(), self.volumes[&volume].group.clone());
        let goes_first = ctx.config().protection.of(&owner, &group) == Protection::Opportunistic;
        let fits = |offer: &Offer| offer.spare >= bytes && offer.host != lender;
        let offers = self.offers(true, ctx).map(|offer| offer.to_copies(&owner, goes_first));
        let offers: Vec<_> = offers.filter(fits).collect();
        let is_apart = |offer: &&Offer| !near.contains(&offer.host);
        let apart: Vec<_> = offers.iter().filter(is_apart).cloned().collect();
        let candidates = if apart.is_empty() { offers } else { apart };
        if candidates.is_empty() || bytes > self.room_for_copies(ctx) {
            return self.tell_no_copy(lease, ctx);
        }
        let purpose = Purpose::Copy { volume, of: lease, goes_first };
        self.round = Some(Round::new(purpose, owner, group, bytes, Candidates::new(candidates)));
        self.proceed(ctx);
    }

    fn may_have_copy(&self, lease: LeaseId, holding: &Holding) -> bool {
        let volume = &self.volumes[&holding.volume];
        holding.leaving == Leaving::No
            && holding.copy_of.is_none()
            && volume.state == VolumeState::Active
            && !self.holdings.values().any(|other| other.copy_of == Some(lease))
    }

    /// Says once that no host has room for a second copy of the lease.
    fn tell_no_copy(&mut self, lease: LeaseId, ctx: &mut StepContext<'_>) {
        let Some(holding) = self.holdings.get_mut(&lease) else { return };
        if !std::mem::replace(&mut holding.has_told_lack, true) {
            let (lender, bytes) = (holding.borrowed.lender.clone(), holding.borrowed.bytes);
            ctx.decide(What::LacksCopy { lease, lender, bytes });
        }
    }

    /// Ends the round, and orders the second copy on its lease. A copy is on one lease, so less
    /// than that goes back.
    pub(crate) fn copy_to(&mut self, round: Round, ctx: &mut StepContext<'_>) {
        let Purpose::Copy { volume, of, .. } = round.purpose else { return };
        let is_wanted =
            self.holdings.get(&of).is_some_and(|holding| self.may_have_copy(of, holding));
        if !is_wanted {
            return self.give_back(&round, ctx);
        }
        let onto = match &round.got[..] {
            [onto] if onto.bytes >= round.wanted => onto,
            _ => {
                self.give_back(&round, ctx);
                return self.tell_no_copy(of, ctx);
            }
        };
        self.hold(volume, onto.clone());
        if let Some(holding) = self.holdings.get_mut(&onto.lease) {
            (holding.copy_of, holding.is_beginning) = (Some(of), true);
        }
        let (lease, lender) = (onto.lease, onto.lender.clone());
        ctx.decide(What::Copies { of, lease, lender, bytes: onto.bytes });
        ctx.act(Action::Copy { volume, of, onto: onto.clone() });
    }

    /// Notes the end of [`Action::Copy`]: a lease that cannot hold the copy goes back.
    pub(crate) fn copied(
        &mut self,
        lease: LeaseId,
        failed: Option<String>,
        ctx: &mut StepContext<'_>,
    ) {
        let Some(holding) = self.holdings.get_mut(&lease) else { return };
        holding.is_beginning = false;
        let (of, lender) = (holding.copy_of, holding.borrowed.lender.clone());
        match (failed, of) {
            (Some(why), _) => {
                self.skip(&lender, ctx);
                ctx.decide(What::CopyFailed { lease, lender, why });
                self.finish(lease, ctx);
            }
            (None, Some(of)) => {
                let of = self.holdings.get_mut(&of);
                of.into_iter().for_each(|holding| holding.has_told_lack = false);
            }
            (None, None) => {}
        }
    }

    /// Moves the pages of a lease elsewhere, as its lender is gone and a second copy has them.
    pub(crate) fn abandon_lease(&mut self, lease: LeaseId, ctx: &mut StepContext<'_>) {
        let Some(holding) = self.holdings.get_mut(&lease) else { return };
        if holding.leaving != Leaving::No {
            return;
        }
        (holding.leaving, holding.surplus, holding.is_abandoned) = (Leaving::Wanted, false, true);
        holding.rotates = false;
        let lender = holding.borrowed.lender.clone();
        // It tries again and again while no other host has room.
        let is_new = !holding.is_stuck(ctx.now());
        self.skip(&lender, ctx);
        if is_new {
            ctx.decide(What::Abandoned { lease, lender });
        }
    }

    /// Returns whether this host holds leases with second copies.
    pub(crate) fn has_copies(&self) -> bool {
        self.holdings.values().any(|holding| holding.copy_of.is_some())
    }

    /// Gives back the second copies of a region that has left this host.
    pub(crate) fn give_back_copies(&mut self, volume: VolumeId, ctx: &mut StepContext<'_>) {
        let is_copy = |holding: &Holding| holding.volume == volume && holding.copy_of.is_some();
        let copies: Vec<_> = self
            .holdings
            .iter()
            .filter(|(_, holding)| is_copy(holding))
            .map(|(lease, _)| *lease)
            .collect();
        copies.into_iter().for_each(|lease| self.finish(lease, ctx));
    }
}
