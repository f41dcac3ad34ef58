//! Leases that others replace so that their pages get another key: nobody asks for them, and they
//! stay if lenders have no room for all of their pages.

use aquifer_page::{Bytes, LeaseId};

use crate::borrower::{Borrower, Leaving};
use crate::placement::whole_extents;
use crate::step_context::StepContext;

impl Borrower {
    /// Leaves a lease for others. The volume has got `room` for its pages already.
    pub(crate) fn replace(&mut self, lease: LeaseId, room: Bytes) {
        let Some(holding) = self.holdings.get_mut(&lease) else { return };
        if holding.leaving == Leaving::No && holding.copy_of.is_none() {
            (holding.leaving, holding.rotates) = (Leaving::Wanted, true);
            (holding.surplus, holding.is_abandoned) = (false, false);
            holding.replaced = holding.replaced.max(room);
        }
    }

    /// Returns whether a lease is left so that its pages get another key.
    pub(crate) fn rotates(&self, lease: LeaseId) -> bool {
        self.holdings.get(&lease).is_some_and(|holding| holding.rotates)
    }

    /// Returns how much of a lease nothing can replace now: neither room that the volume got for
    /// its pages, nor what lenders offer within `max_borrowed`.
    pub(crate) fn irreplaceable(&self, lease: LeaseId, ctx: &StepContext<'_>) -> Bytes {
        let Some(holding) = self.holdings.get(&lease) else { return Bytes::ZERO };
        let owner = &self.volumes[&holding.volume].owner;
        let offers = self.offers_to(owner, true, ctx);
        let offered =
            offers.map(|offer| whole_extents(offer.spare)).fold(Bytes::ZERO, Bytes::saturating_add);
        let (bytes, replaced) = (holding.borrowed.bytes, holding.replaced);
        // The lease itself does not count once it is left.
        let room = self.room(ctx).saturating_add(bytes);
        bytes.saturating_sub(replaced).saturating_sub(offered.min(room))
    }
}
