//! Memory for regions. Their requests wait for their turn, and get at least what is of use, or
//! nothing. A region keeps its leases, through recalls, until it is gone or does not need them.

use aquifer_page::{Bytes, LeaseId, VolumeId};

use crate::borrower::{Borrower, Leaving, Volume, VolumeState};
use crate::round::{Purpose, Round};
use crate::step_context::StepContext;
use crate::{Action, Cause, LiveVolume, Owner, Refusal, RegionRequest, What};

impl Borrower {
    /// Takes a region's request, unless it is a copy of one.
    pub(crate) fn borrow_for(&mut self, request: RegionRequest) {
        let of = |round: &Round| match round.purpose {
            Purpose::Region { volume, .. } => Some(volume),
            _ => None,
        };
        let is_known = self.round.as_ref().and_then(of) == Some(request.volume)
            || self.requests.iter().any(|waiting| waiting.volume == request.volume);
        if !is_known {
            self.requests.push_back(request);
        }
    }

    /// Starts a round for the next request. One round runs at a time.
    pub(crate) fn serve_requests(&mut self, ctx: &mut StepContext<'_>) {
        while self.round.is_none()
            && let Some(request) = self.requests.pop_front()
        {
            let wanted = request.bytes.round_up_to_extents();
            let room = self.room(ctx);
            if let Some(refusal) = self.refusal(&request, room, ctx) {
                let RegionRequest { region, volume, .. } = request;
                let (got, refusal) = (Bytes::ZERO, Some(refusal));
                ctx.decide(What::Lacks { region, volume, wanted, got, refusal });
                continue;
            }
            let (owner, wanted) = (Owner::Region(request.region), wanted.min(room));
            let candidates = self.candidates(&owner, false, ctx);
            let purpose = Purpose::Region { volume: request.volume, least: request.least };
            self.round = Some(Round::new(purpose, owner, request.group, wanted, candidates));
            self.proceed(ctx);
        }
    }

    fn refusal(
        &self,
        request: &RegionRequest,
        room: Bytes,
        ctx: &StepContext<'_>,
    ) -> Option<Refusal> {
        let over =
            || Refusal::OverMax { borrowed: self.counted(ctx), max: ctx.config().max_borrowed };
        let nothing = (request.bytes == Bytes::ZERO).then_some(Refusal::Nothing);
        nothing.or_else(|| (request.least > room).then(over))
    }

    /// Ends the round, and hands its leases to the region. If they are of no use, they go back: a
    /// region with less memory than it needs would stop its programs later.
    pub(crate) fn provide(&mut self, round: Round, ctx: &mut StepContext<'_>) {
        let Purpose::Region { volume, least } = round.purpose else { return };
        let Owner::Region(region) = round.owner.clone() else { return };
        let (got, wanted) = (round.got_bytes(), round.wanted);
        let has_leases = self.holdings.values().any(|holding| holding.volume == volume);
        let is_active = |volume: &Volume| volume.state == VolumeState::Active;
        let grows = has_leases && self.volumes.get(&volume).is_some_and(is_active);
        if got < least || (has_leases && !grows) {
            ctx.decide(What::Lacks { region, volume, wanted, got, refusal: None });
            return self.give_back(&round, ctx);
        }
        let leases = round.got.len();
        ctx.decide(What::Provides { region, volume, leases, bytes: got });
        let live = LiveVolume {
            volume,
            bytes: got,
            owner: round.owner,
            group: round.group,
            cause: Cause::ByHand,
            leases: round.got,
            copies: Vec::new(),
        };
        if grows {
            live.leases.iter().for_each(|lease| self.hold(volume, lease.clone()));
            return ctx.act(Action::Extend(live));
        }
        self.add_volume(&live, VolumeState::Activating);
        ctx.act(Action::Activate(live));
    }

    /// Gives back the leases that a region could not take.
    pub(crate) fn extended(
        &mut self,
        volume: VolumeId,
        unused: Vec<LeaseId>,
        ctx: &mut StepContext<'_>,
    ) {
        let Some(Owner::Region(region)) = self.volumes.get(&volume).map(|it| it.owner.clone())
        else {
            return;
        };
        if !unused.is_empty() {
            let why = format!("{} lease(s) cannot be added", unused.len());
            ctx.decide(What::Unclaimed { region, volume, why });
        }
        unused.into_iter().for_each(|lease| self.finish(lease, ctx));
    }

    /// Moves the pages of a lease elsewhere, and gives the lease back. The region does not need it,
    /// so nothing replaces it.
    pub(crate) fn give_back_lease(&mut self, lease: LeaseId, ctx: &mut StepContext<'_>) {
        let Some(holding) = self.holdings.get_mut(&lease) else { return };
        if holding.leaving == Leaving::No {
            (holding.leaving, holding.surplus, holding.rotates) = (Leaving::Wanted, true, false);
            let (volume, mut left) = (holding.volume, holding.borrowed.bytes);
            if holding.copy_of.is_none() {
                // It may have come in place of another one, which stays.
                for other in self.holdings.values_mut().filter(|other| other.volume == volume) {
                    let part = other.replaced.min(left);
                    (other.replaced, left) = (other.replaced - part, left - part);
                }
            }
            self.evacuate_waiting(ctx);
        }
    }

    /// Returns the bytes that the requests still wait for.
    pub(crate) fn requested(&self) -> Bytes {
        let waiting = self.requests.iter().map(|request| request.bytes.round_up_to_extents());
        waiting.fold(Bytes::ZERO, Bytes::saturating_add)
    }
}
