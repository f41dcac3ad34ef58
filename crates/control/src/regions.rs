//! Memory for regions. Their requests wait for their turn, and get all that they ask for or
//! nothing. A region keeps its leases, through recalls, until it is gone or all its pages are home.

use aquifer_page::{Bytes, VolumeId};

use crate::borrower::{Borrower, VolumeState};
use crate::round::{Purpose, Round};
use crate::step_context::StepContext;
use crate::{Action, Cause, LiveVolume, Owner, Refusal, RegionRequest, What};

impl Borrower {
    /// Takes a region's request, unless it is a copy of one.
    pub(crate) fn borrow_for(&mut self, request: RegionRequest) {
        let of = Purpose::Region(request.volume);
        // A region without leases, whose pages are all home, may borrow again.
        let is_known = self.holdings.values().any(|holding| holding.volume == request.volume)
            || self.round.as_ref().is_some_and(|round| round.purpose == of)
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
            if let Some(refusal) = self.refusal(wanted, ctx) {
                let RegionRequest { region, volume, .. } = request;
                let (got, refusal) = (Bytes::ZERO, Some(refusal));
                ctx.decide(What::Lacks { region, volume, wanted, got, refusal });
                continue;
            }
            let owner = Owner::Region(request.region);
            let candidates = self.candidates(&owner, false, ctx);
            let purpose = Purpose::Region(request.volume);
            self.round = Some(Round::new(purpose, owner, request.group, wanted, candidates));
            self.proceed(ctx);
        }
    }

    fn refusal(&self, wanted: Bytes, ctx: &StepContext<'_>) -> Option<Refusal> {
        let over =
            || Refusal::OverMax { borrowed: self.borrowed(), max: ctx.config().max_borrowed };
        let nothing = (wanted == Bytes::ZERO).then_some(Refusal::Nothing);
        nothing.or_else(|| (wanted > self.room(ctx)).then(over))
    }

    /// Ends the round, and hands its leases to the region. If they do not suffice, they go back: a
    /// region with less memory than it needs would stop its programs later.
    pub(crate) fn provide(&mut self, volume: VolumeId, round: Round, ctx: &mut StepContext<'_>) {
        let Owner::Region(region) = round.owner.clone() else { return };
        let (got, wanted) = (round.got_bytes(), round.wanted);
        if got < wanted {
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
        };
        self.add_volume(&live, VolumeState::Activating);
        ctx.act(Action::Activate(live));
    }

    /// Returns the bytes that the requests still wait for.
    pub(crate) fn requested(&self) -> Bytes {
        let waiting = self.requests.iter().map(|request| request.bytes.round_up_to_extents());
        waiting.fold(Bytes::ZERO, Bytes::saturating_add)
    }
}
