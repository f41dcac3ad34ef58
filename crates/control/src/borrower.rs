//! What this host borrows: volumes, the leases under them, and Algorithm 3.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_page::{Bytes, Group, HostName, LeaseId, VolumeId};
use serde::Serialize;

use crate::fins::Fins;
use crate::placement::{in_whole_extents, whole_extents};
use crate::round::{Purpose, Round, Wait};
use crate::turn::Turn;
use crate::{
    Action, BorrowedLease, Candidates, Cause, LiveVolume, Message, Offer, Reason, Refusal, RequestId, What,
};

/// Where a volume is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeState {
    /// Being made.
    Activating,
    /// Swapped to.
    Active,
    /// Being swapped off and removed.
    Deactivating,
}

/// For the status: one volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VolumeStatus {
    /// Its id.
    pub volume: VolumeId,
    /// Its capacity.
    pub bytes: Bytes,
    /// Why it was made.
    pub cause: Cause,
    /// Where it is in its life.
    pub state: VolumeState,
}

/// For the status: one borrowed lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BorrowedStatus {
    /// The lease.
    #[serde(flatten)]
    pub lease: BorrowedLease,
    /// The volume that lies over it.
    pub volume: VolumeId,
    /// Its lender wants it back.
    pub leaving: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Volume {
    bytes: Bytes,
    pub(crate) group: Group,
    cause: Cause,
    pub(crate) state: VolumeState,
    /// The operator wants it back, but it was busy.
    returned: bool,
    /// After a failed deactivation: not before this.
    retry_at: Duration,
}

/// Whether a lease must be left because its lender wants it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    No,
    Wanted,
    Evacuating,
}

#[derive(Clone, Debug)]
pub(crate) struct Holding {
    pub(crate) borrowed: BorrowedLease,
    pub(crate) volume: VolumeId,
    pub(crate) leaving: Leaving,
    /// Lenders were asked for a replacement already.
    pub(crate) asked: bool,
}

/// The borrower's half of the controller.
#[derive(Clone, Debug, Default)]
pub(crate) struct Borrower {
    pub(crate) round: Option<Round>,
    pub(crate) volumes: BTreeMap<VolumeId, Volume>,
    pub(crate) holdings: BTreeMap<LeaseId, Holding>,
    pub(crate) fins: Fins,
    offers: Vec<Offer>,
    /// Lenders to leave alone, and until when.
    skipped: BTreeMap<HostName, Duration>,
    /// No round for overload before this.
    paused_until: Duration,
    /// Not said again before this that nobody has anything to spare.
    silent_until: Duration,
}

impl Borrower {
    pub(crate) fn restore(volumes: Vec<LiveVolume>) -> Self {
        let mut borrower = Self::default();
        for LiveVolume { volume, bytes, group, cause, leases } in volumes {
            borrower.add_volume(volume, bytes, group, cause, VolumeState::Active);
            leases.into_iter().for_each(|lease| borrower.hold(volume, lease));
        }
        borrower
    }

    /// Takes note of who lends; runs the timers of what is in flight.
    pub(crate) fn timers(&mut self, offers: Vec<Offer>, turn: &mut Turn<'_>) {
        self.offers = offers;
        self.skipped.retain(|_, until| *until > turn.now());
        self.fins.tick(turn);
        let overload_gone = !turn.memory().needs_borrowed(turn.config());
        if overload_gone && self.round.as_ref().is_some_and(|r| r.purpose == Purpose::Volume(Cause::Overload))
        {
            self.abandon(turn);
        }
        if let Some(round) = &mut self.round
            && let Wait::Over(lender) = round.tick(turn)
        {
            self.skip(&lender, turn);
            self.proceed(turn);
        }
    }

    /// Algorithm 3 for a monitoring period.
    pub(crate) fn tick(&mut self, turn: &mut Turn<'_>) {
        let needed = turn.memory().needs_borrowed(turn.config());
        let idle = |volume: &Volume| volume.state == VolumeState::Active && volume.retry_at <= turn.now();
        let goes = |volume: &Volume| volume.returned || (!needed && volume.cause == Cause::Overload);
        let going: Vec<_> =
            self.volumes.iter().filter(|(_, v)| idle(v) && goes(v)).map(|(id, _)| *id).collect();
        going.into_iter().for_each(|volume| self.deactivate(volume, turn));
        if turn.memory().overloaded(turn.config()) && self.nearly_full(turn) && self.may_start(turn) {
            let (group, bytes) = (turn.config().group.clone(), turn.config().request);
            if let Err(refusal) = self.borrow(Cause::Overload, bytes, group, turn) {
                self.pause(turn.config().cooldown, turn);
                turn.decide(What::BorrowRefused { bytes, refusal });
            }
        }
    }

    /// Whether more than three quarters of what is borrowed is in use, and no more is on its way.
    fn nearly_full(&self, turn: &Turn<'_>) -> bool {
        let all_active = self.volumes.values().all(|volume| volume.state == VolumeState::Active);
        let capacity: u64 = self.volumes.values().map(|volume| volume.bytes.0).sum();
        all_active && turn.memory().swap_used.0.saturating_mul(4) > capacity.saturating_mul(3)
    }

    /// Whether a round for overload may start now.
    pub(crate) fn may_start(&self, turn: &Turn<'_>) -> bool {
        self.round.is_none() && turn.now() >= self.paused_until
    }

    /// No round for overload for this long.
    pub(crate) fn pause(&mut self, wait: Duration, turn: &Turn<'_>) {
        self.paused_until = turn.now().saturating_add(wait);
    }

    /// Does not ask this lender for a cooldown, unless the operator wants to borrow.
    pub(crate) fn skip(&mut self, lender: &HostName, turn: &Turn<'_>) {
        self.skipped.insert(lender.clone(), turn.now().saturating_add(turn.config().cooldown));
    }

    pub(crate) fn candidates(&self, without_skipped: bool, turn: &Turn<'_>) -> Candidates {
        let asked = |offer: &&Offer| {
            offer.host != turn.facts.host && !(without_skipped && self.skipped.contains_key(&offer.host))
        };
        Candidates::new(self.offers.iter().filter(asked).cloned())
    }

    /// What may still be borrowed. Leases that are on their way out do not count, so that they can be replaced.
    pub(crate) fn room(&self, turn: &Turn<'_>) -> Bytes {
        whole_extents(turn.config().max_borrowed.saturating_sub(self.borrowed()))
    }

    fn borrowed(&self) -> Bytes {
        let staying = self.holdings.values().filter(|holding| holding.leaving == Leaving::No);
        staying.map(|holding| holding.borrowed.bytes).sum()
    }

    /// Starts a round for a new volume.
    ///
    /// For overload, what `max_borrowed` leaves is enough; the operator gets all that was asked for or a refusal.
    pub(crate) fn borrow(
        &mut self,
        cause: Cause,
        bytes: Bytes,
        group: Group,
        turn: &mut Turn<'_>,
    ) -> Result<(), Refusal> {
        if self.round.is_some() {
            return Err(Refusal::Asking);
        }
        if bytes == Bytes::ZERO {
            return Err(Refusal::Nothing);
        }
        let room = self.room(turn);
        let wanted = bytes.round_up_to_extents();
        if room == Bytes::ZERO || (cause == Cause::ByHand && wanted > room) {
            return Err(Refusal::OverMax { borrowed: self.borrowed(), max: turn.config().max_borrowed });
        }
        let wanted = wanted.min(room);
        let candidates = self.candidates(cause == Cause::Overload, turn);
        if candidates.is_empty() {
            self.tell_nobody_lends(wanted, cause, turn);
            return Ok(());
        }
        self.round = Some(Round::new(Purpose::Volume(cause), group, wanted, candidates));
        self.proceed(turn);
        Ok(())
    }

    /// Nobody has an extent to spare. The next reading may bring an offer, so there is no pause, only no word at each reading.
    fn tell_nobody_lends(&mut self, wanted: Bytes, cause: Cause, turn: &mut Turn<'_>) {
        if cause == Cause::ByHand || turn.now() >= self.silent_until {
            turn.decide(What::NobodyLends { wanted, cause, retry: None });
            self.silent_until = turn.now().saturating_add(turn.config().cooldown);
        }
    }

    /// Asks the next lender if no request is in flight, and ends the round when there is no next.
    pub(crate) fn proceed(&mut self, turn: &mut Turn<'_>) {
        let mut waits = |round: &mut Round| round.status().is_some() || round.ask_next(turn);
        let Some(round) = self.round.take_if(|round| !waits(round)) else { return };
        match round.purpose {
            Purpose::Volume(cause) => self.activate(cause, round, turn),
            Purpose::Replace { .. } => self.evacuate(round, turn),
        }
    }

    /// `mem_bor_ack` (Algorithm 2 lines 6-8): takes the lease if it is wanted. It may also be a repetition, or the lender's
    /// question whether the lease is still held: what is held needs no answer, what is not is finished.
    pub(crate) fn acknowledged(&mut self, request: RequestId, lease: BorrowedLease, turn: &mut Turn<'_>) {
        let in_volumes = self.holdings.get(&lease.lease).map(|holding| &holding.borrowed);
        let in_round = self.round.iter().flat_map(|round| &round.got).find(|got| got.lease == lease.lease);
        if let Some(held) = in_volumes.or(in_round) {
            if held.lender != lease.lender {
                turn.decide(What::Stranger { from: lease.lender, lease: lease.lease });
            }
            return;
        }
        match &mut self.round {
            Some(round) if round.awaits(&lease.lender, request) && in_whole_extents(lease.bytes) => {
                round.acknowledged(lease, turn);
                self.proceed(turn);
            }
            _ => {
                let BorrowedLease { lease, lender, .. } = lease;
                if !self.fins.contains(&lender, lease) {
                    turn.decide(What::Unwanted { lender: lender.clone(), lease });
                }
                self.fins.add(&lender, lease, turn);
            }
        }
    }

    /// `mem_bor_rej`: asks the next lender.
    pub(crate) fn rejected(
        &mut self,
        from: &HostName,
        request: RequestId,
        spare: Bytes,
        reason: Reason,
        turn: &mut Turn<'_>,
    ) {
        let Some(round) = self.round.as_mut().filter(|round| round.awaits(from, request)) else { return };
        if round.rejected(spare, reason, turn) {
            self.skip(from, turn);
        }
        self.proceed(turn);
    }

    /// The round is over: makes a volume of what it brought (Algorithm 2 line 7).
    fn activate(&mut self, cause: Cause, round: Round, turn: &mut Turn<'_>) {
        let (bytes, wanted) = (round.got_bytes(), round.wanted);
        if round.got.is_empty() {
            let retry = round.pause(turn.config().cooldown);
            turn.decide(What::NobodyLends { wanted, cause, retry: Some(retry) });
            return self.pause(retry, turn);
        }
        let volume = turn.ids.volume();
        self.add_volume(volume, bytes, round.group.clone(), cause, VolumeState::Activating);
        round.got.iter().for_each(|lease| self.hold(volume, lease.clone()));
        turn.decide(What::Activates { volume, leases: round.got.len(), bytes, wanted, cause });
        turn.act(Action::Activate(LiveVolume {
            volume,
            bytes,
            group: round.group,
            cause,
            leases: round.got,
        }));
    }

    fn add_volume(&mut self, id: VolumeId, bytes: Bytes, group: Group, cause: Cause, state: VolumeState) {
        let volume = Volume { bytes, group, cause, state, returned: false, retry_at: Duration::ZERO };
        self.volumes.insert(id, volume);
    }

    pub(crate) fn hold(&mut self, volume: VolumeId, borrowed: BorrowedLease) {
        let holding = Holding { borrowed, volume, leaving: Leaving::No, asked: false };
        self.holdings.insert(holding.borrowed.lease, holding);
    }

    /// The volume swaps; it goes back at once if the operator changed their mind meanwhile.
    pub(crate) fn activated(&mut self, id: VolumeId, turn: &mut Turn<'_>) {
        if let Some(volume) = self.volumes.get_mut(&id)
            && volume.state == VolumeState::Activating
        {
            volume.state = VolumeState::Active;
            if volume.returned {
                self.deactivate(id, turn);
            }
        }
    }

    pub(crate) fn activation_failed(&mut self, volume: VolumeId, why: String, turn: &mut Turn<'_>) {
        if self.volumes.contains_key(&volume) {
            turn.decide(What::ActivationFailed { volume, why });
            self.pause(turn.config().cooldown, turn);
            self.drop_volume(volume, turn);
        }
    }

    /// Algorithm 3 line 4. Waits while one of the volume's leases is being emptied.
    fn deactivate(&mut self, id: VolumeId, turn: &mut Turn<'_>) {
        if self.evacuating(id) {
            return;
        }
        self.abandon_replacement(id, turn);
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        volume.state = VolumeState::Deactivating;
        let what = What::Deactivates { volume: id, bytes: volume.bytes, by_hand: volume.returned };
        for holding in self.holdings.values_mut().filter(|holding| holding.volume == id) {
            holding.leaving = Leaving::No;
        }
        turn.decide(what);
        turn.act(Action::Deactivate { volume: id });
    }

    /// Algorithm 3 lines 5 and 6: nothing uses the volume's leases any more.
    pub(crate) fn deactivated(&mut self, volume: VolumeId, turn: &mut Turn<'_>) {
        if self.volumes.contains_key(&volume) {
            let leases = self.holdings.values().filter(|holding| holding.volume == volume).count();
            turn.decide(What::Deactivated { volume, leases });
            self.drop_volume(volume, turn);
        }
    }

    pub(crate) fn deactivation_failed(&mut self, id: VolumeId, why: String, turn: &mut Turn<'_>) {
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.state = VolumeState::Active;
            volume.returned = false;
            volume.retry_at = turn.now().saturating_add(turn.config().cooldown);
            turn.decide(What::DeactivationFailed { volume: id, why });
        }
    }

    /// The operator gives back one volume or all, and stops what is being asked for.
    pub(crate) fn give_back_by_hand(&mut self, which: Option<VolumeId>, turn: &mut Turn<'_>) {
        if which.is_none() {
            if self.round.as_ref().is_some_and(|round| matches!(round.purpose, Purpose::Volume(_))) {
                self.abandon(turn);
            }
            self.pause(turn.config().cooldown, turn);
        }
        let meant = |id: &VolumeId| which.is_none_or(|volume| volume == *id);
        let mut ready = Vec::new();
        for (id, volume) in self.volumes.iter_mut().filter(|(id, _)| meant(id)) {
            if volume.state != VolumeState::Deactivating {
                volume.returned = true;
            }
            if volume.state == VolumeState::Active {
                ready.push(*id);
            }
        }
        ready.into_iter().for_each(|volume| self.deactivate(volume, turn));
    }

    fn drop_volume(&mut self, volume: VolumeId, turn: &mut Turn<'_>) {
        self.abandon_replacement(volume, turn);
        self.volumes.remove(&volume);
        let over: Vec<_> =
            self.holdings.iter().filter(|(_, holding)| holding.volume == volume).map(|(id, _)| *id).collect();
        over.into_iter().for_each(|lease| self.finish(lease, turn));
    }

    /// Nothing uses the lease any more: its lender gets it back.
    pub(crate) fn finish(&mut self, lease: LeaseId, turn: &mut Turn<'_>) {
        if let Some(holding) = self.holdings.remove(&lease) {
            self.fins.add(&holding.borrowed.lender, lease, turn);
        }
    }

    /// Gives back what a round brought.
    pub(crate) fn give_back(&mut self, round: &Round, turn: &mut Turn<'_>) {
        for got in &round.got {
            self.fins.add(&got.lender, got.lease, turn);
        }
    }

    /// Ends the round without using what it brought. The answer to its request in flight will not be wanted.
    fn abandon(&mut self, turn: &mut Turn<'_>) {
        if let Some(round) = self.round.take() {
            turn.decide(What::Abandons { wanted: round.wanted, got: round.got_bytes() });
            self.give_back(&round, turn);
        }
    }

    /// Ends the round if it is for a recalled lease of this volume.
    fn abandon_replacement(&mut self, id: VolumeId, turn: &mut Turn<'_>) {
        let purpose = self.round.as_ref().map(|round| round.purpose);
        if matches!(purpose, Some(Purpose::Replace { volume, .. }) if volume == id) {
            self.abandon(turn);
        }
    }

    /// Whether a lease of this volume is being emptied.
    pub(crate) fn evacuating(&self, volume: VolumeId) -> bool {
        self.holdings.values().any(|h| h.volume == volume && h.leaving == Leaving::Evacuating)
    }

    /// The lender's agent has handled a message.
    pub(crate) fn delivered(&mut self, to: &HostName, message: &Message) {
        if let Message::MemBorFin { lease } = message {
            self.fins.delivered(to, *lease);
        }
    }

    pub(crate) fn volumes(&self) -> impl Iterator<Item = VolumeStatus> {
        self.volumes.iter().map(|(&volume, &Volume { bytes, cause, state, .. })| VolumeStatus {
            volume,
            bytes,
            cause,
            state,
        })
    }

    pub(crate) fn leases(&self) -> impl Iterator<Item = BorrowedStatus> {
        self.holdings.values().map(|holding| BorrowedStatus {
            lease: holding.borrowed.clone(),
            volume: holding.volume,
            leaving: holding.leaving != Leaving::No,
        })
    }
}
