//! What this host borrows: volumes, the leases under them, and Algorithm 3.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_page::{Bytes, Group, HostName, LeaseId, VolumeId};
use serde::Serialize;

use crate::fins::Fins;
use crate::placement::whole_extents;
use crate::round::{Purpose, Round, Wait};
use crate::turn::Turn;
use crate::{Action, BorrowedLease, Candidates, Cause, LiveVolume, Message, Offer, What};

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
    /// What was borrowed to replace it, and is in the volume or on its way there.
    pub(crate) replaced: Bytes,
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
    pub(crate) silent_until: Duration,
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
        if overload_gone
            && self.round.as_ref().is_some_and(|r| r.purpose == Purpose::Volume(Cause::Overload))
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
        let idle =
            |volume: &Volume| volume.state == VolumeState::Active && volume.retry_at <= turn.now();
        let goes =
            |volume: &Volume| volume.returned || (!needed && volume.cause == Cause::Overload);
        let going: Vec<_> =
            self.volumes.iter().filter(|(_, v)| idle(v) && goes(v)).map(|(id, _)| *id).collect();
        going.into_iter().for_each(|volume| self.deactivate(volume, turn));
        if turn.memory().overloaded(turn.config()) && self.nearly_full(turn) && self.may_start(turn)
        {
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
        turn.config().borrows && self.round.is_none() && turn.now() >= self.paused_until
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
            offer.host != turn.facts.host
                && !(without_skipped && self.skipped.contains_key(&offer.host))
        };
        Candidates::new(self.offers.iter().filter(asked).cloned())
    }

    /// What may still be borrowed. Leases that are on their way out do not count, so that they can be replaced.
    pub(crate) fn room(&self, turn: &Turn<'_>) -> Bytes {
        whole_extents(turn.config().max_borrowed.saturating_sub(self.borrowed()))
    }

    pub(crate) fn borrowed(&self) -> Bytes {
        let staying = self.holdings.values().filter(|holding| holding.leaving == Leaving::No);
        staying.map(|holding| holding.borrowed.bytes).sum()
    }

    pub(crate) fn add_volume(
        &mut self,
        id: VolumeId,
        bytes: Bytes,
        group: Group,
        cause: Cause,
        state: VolumeState,
    ) {
        let volume =
            Volume { bytes, group, cause, state, returned: false, retry_at: Duration::ZERO };
        self.volumes.insert(id, volume);
    }

    pub(crate) fn hold(&mut self, volume: VolumeId, borrowed: BorrowedLease) {
        let holding = Holding { borrowed, volume, leaving: Leaving::No, replaced: Bytes::ZERO };
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
            if self.round.as_ref().is_some_and(|round| matches!(round.purpose, Purpose::Volume(_)))
            {
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
        let over: Vec<_> = self
            .holdings
            .iter()
            .filter(|(_, holding)| holding.volume == volume)
            .map(|(id, _)| *id)
            .collect();
        over.into_iter().for_each(|lease| self.finish(lease, turn));
    }

    /// Nothing uses the lease any more: its lender gets it back.
    pub(crate) fn finish(&mut self, lease: LeaseId, turn: &mut Turn<'_>) {
        if let Some(holding) = self.holdings.remove(&lease) {
            self.fins.add(&holding.borrowed.lender, lease, turn);
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
