//! The borrower's way to memory: rounds of requests, their answers, and the new volume at the end
//! (Algorithm 2 lines 4-8).

use aquifer_page::{Bytes, Group, HostName, VolumeId};

use crate::borrower::{Borrower, VolumeState};
use crate::round::{Purpose, Round};
use crate::step_context::StepContext;
use crate::{Action, BorrowedLease, Cause, LiveVolume, Owner, Reason, Refusal, RequestId, What};

impl Borrower {
    /// Starts a round for a new volume.
    ///
    /// For overload, a smaller volume within `max_borrowed` will do. For the operator, the full
    /// size must fit, or this function refuses.
    pub(crate) fn borrow(
        &mut self,
        cause: Cause,
        bytes: Bytes,
        group: Group,
        ctx: &mut StepContext<'_>,
    ) -> Result<(), Refusal> {
        if self.round.is_some() {
            return Err(Refusal::Asking);
        }
        if bytes == Bytes::ZERO {
            return Err(Refusal::Nothing);
        }
        let room = self.room(ctx);
        if room == Bytes::ZERO || (cause == Cause::ByHand && bytes > room) {
            return Err(Refusal::OverMax {
                borrowed: self.counted(ctx),
                max: ctx.config().max_borrowed,
            });
        }
        let wanted = bytes.min(room).round_up_to_extents();
        let candidates = self.candidates(&Owner::Swap, cause == Cause::Overload, ctx);
        if candidates.is_empty() {
            self.tell_nobody_lends(wanted, cause, ctx);
            return Ok(());
        }
        let purpose = Purpose::Volume(cause);
        self.round = Some(Round::new(purpose, Owner::Swap, group, wanted, candidates));
        self.proceed(ctx);
        Ok(())
    }

    /// Reports that no lender has an extent to spare. The next reading may bring an offer, so this
    /// sets no pause; it only limits the report to one a cooldown.
    fn tell_nobody_lends(&mut self, wanted: Bytes, cause: Cause, ctx: &mut StepContext<'_>) {
        if cause == Cause::ByHand || ctx.now() >= self.silent_until {
            ctx.decide(What::NobodyLends { wanted, cause, retry: None });
            self.silent_until = ctx.now().saturating_add(ctx.config().cooldown);
        }
    }

    /// Asks the next lender if no request is in flight, and ends the round when no lender is left.
    pub(crate) fn proceed(&mut self, ctx: &mut StepContext<'_>) {
        let mut waits = |round: &mut Round| round.status().is_some() || round.ask_next(ctx);
        let Some(round) = self.round.take_if(|round| !waits(round)) else { return };
        match round.purpose {
            Purpose::Volume(cause) => self.activate(cause, round, ctx),
            Purpose::Region { .. } => self.provide(round, ctx),
            Purpose::Replace { .. } => self.evacuate(round, ctx),
            Purpose::Copy { .. } => self.copy_to(round, ctx),
        }
    }

    /// Handles `mem_bor_ack` (Algorithm 2 lines 6-8), and takes the lease if this host wants it.
    /// The ack may also be a repetition, or the lender's question whether this host still holds the
    /// lease. A held lease needs no answer; for any other, this host sends `mem_bor_fin`.
    pub(crate) fn acknowledged(
        &mut self,
        request: RequestId,
        lease: BorrowedLease,
        ctx: &mut StepContext<'_>,
    ) {
        let in_volumes = self.holdings.get(&lease.lease).map(|holding| &holding.borrowed);
        let in_round =
            self.round.iter().flat_map(|round| &round.got).find(|got| got.lease == lease.lease);
        if let Some(held) = in_volumes.or(in_round) {
            if held.lender != lease.lender {
                ctx.decide(What::Stranger { from: lease.lender, lease: lease.lease });
            }
            return;
        }
        if self.expects(lease.lease) {
            return;
        }
        match &mut self.round {
            Some(round) if round.awaits(&lease.lender, request) && round.fits(lease.bytes) => {
                round.acknowledged(lease, ctx);
                self.proceed(ctx);
            }
            _ => {
                let BorrowedLease { lease, lender, generation, .. } = lease;
                if !self.pending_releases.contains(&lender, lease) {
                    ctx.decide(What::Unwanted { lender: lender.clone(), lease });
                }
                self.pending_releases.add(&lender, lease, generation, ctx);
            }
        }
    }

    /// Handles `mem_bor_rej`: asks the next lender.
    pub(crate) fn rejected(
        &mut self,
        from: &HostName,
        request: RequestId,
        spare: Bytes,
        reason: Reason,
        ctx: &mut StepContext<'_>,
    ) {
        let Some(round) = self.round.as_mut().filter(|round| round.awaits(from, request)) else {
            return;
        };
        if round.rejected(spare, reason, ctx) {
            self.skip(from, ctx);
        }
        self.proceed(ctx);
    }

    /// Handles a lender's refusal to accept `mem_bor_req`: asks the next lender.
    pub(crate) fn refused(
        &mut self,
        by: &HostName,
        request: RequestId,
        why: String,
        ctx: &mut StepContext<'_>,
    ) {
        let Some(round) = self.round.as_mut().filter(|round| round.awaits(by, request)) else {
            return;
        };
        round.refused(why, ctx);
        self.skip(by, ctx);
        self.proceed(ctx);
    }

    /// Ends the round, and makes a volume of its leases (Algorithm 2 line 7).
    fn activate(&mut self, cause: Cause, round: Round, ctx: &mut StepContext<'_>) {
        let (bytes, wanted) = (round.got_bytes(), round.wanted);
        if round.got.is_empty() {
            let retry = round.pause(ctx.config().cooldown);
            ctx.decide(What::NobodyLends { wanted, cause, retry: Some(retry) });
            return self.pause(retry, ctx);
        }
        let volume = ctx.ids.volume();
        ctx.decide(What::Activates { volume, leases: round.got.len(), bytes, wanted, cause });
        let Round { owner, group, got: leases, .. } = round;
        let live = LiveVolume { volume, bytes, owner, group, cause, leases, copies: Vec::new() };
        self.add_volume(&live, VolumeState::Activating);
        ctx.act(Action::Activate(live));
    }

    /// Gives back the round's leases.
    pub(crate) fn give_back(&mut self, round: &Round, ctx: &mut StepContext<'_>) {
        for got in &round.got {
            self.pending_releases.add(&got.lender, got.lease, got.generation, ctx);
        }
    }

    /// Ends the round without using its leases. This host will decline a late answer to the request
    /// in flight.
    pub(crate) fn abandon(&mut self, ctx: &mut StepContext<'_>) {
        if let Some(round) = self.round.take() {
            let cause = round.purpose.cause();
            ctx.decide(What::Abandons { wanted: round.wanted, got: round.got_bytes(), cause });
            self.give_back(&round, ctx);
        }
    }

    /// Ends the round if it is for a recalled lease of this volume, or for a second copy.
    pub(crate) fn abandon_replacement(&mut self, id: VolumeId, ctx: &mut StepContext<'_>) {
        let purpose = self.round.as_ref().map(|round| round.purpose);
        let is_it = matches!(
            purpose,
            Some(Purpose::Replace { volume, .. } | Purpose::Copy { volume, .. }) if volume == id
        );
        if is_it {
            self.abandon(ctx);
        }
    }
}
