//! The borrower's half of the controller: volumes, the leases under them, and Algorithm 3.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use aquifer_page::{Bytes, Group, HostName, LeaseId, VolumeId};
use serde::Serialize;

use crate::pending_release::PendingReleases;
use crate::placement::whole_extents;
use crate::round::{Purpose, Round, Wait};
use crate::step_context::StepContext;
use crate::{
    Action, BorrowedLease, Candidates, Cause, LiveVolume, Message, Offer, Owner, Protection,
    RegionRequest, What,
};

/// The state of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeState {
    /// The agent is making it.
    Activating,
    /// The kernel swaps to it, or its region uses it.
    Active,
    /// The agent is swapping it off and removing it.
    Deactivating,
}

/// One volume, for the status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VolumeStatus {
    /// The volume's id.
    pub volume: VolumeId,
    /// The volume's capacity.
    pub bytes: Bytes,
    /// The owner of its pages.
    #[serde(rename = "region")]
    pub owner: Owner,
    /// The tenant for which this host borrowed it.
    pub group: Group,
    /// The reason for which this host borrowed it.
    pub cause: Cause,
    /// The volume's state.
    pub state: VolumeState,
}

/// One borrowed lease, for the status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BorrowedStatus {
    /// The lease.
    #[serde(flatten)]
    pub lease: BorrowedLease,
    /// The volume that uses it.
    pub volume: VolumeId,
    /// Whether the lender wants the lease back.
    pub leaving: bool,
    /// The lease of whose pages it holds the second copies, if it holds copies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copy_of: Option<LeaseId>,
}

#[derive(Clone, Debug)]
pub(crate) struct Volume {
    bytes: Bytes,
    pub(crate) owner: Owner,
    pub(crate) group: Group,
    cause: Cause,
    pub(crate) state: VolumeState,
    /// The operator has asked to give the volume back, possibly while it was busy.
    returned: bool,
    /// After a failed deactivation: the earliest time of the next attempt.
    retry_at: Duration,
}

/// Whether the volume must vacate a lease because the lender wants it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    No,
    Wanted,
    Evacuating,
}

/// How long a failure to vacate a lease counts. Its lender asks again within seconds.
const STUCK_LIFE: Duration = Duration::from_secs(60);

/// The time from the first failure to vacate a region's lease until its pages may go to the spill
/// file. Meanwhile its cache may grow, and other hosts may get room.
const SPILL_AFTER: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub(crate) struct Holding {
    pub(crate) borrowed: BorrowedLease,
    pub(crate) volume: VolumeId,
    pub(crate) leaving: Leaving,
    /// Bytes borrowed to replace this lease, in the volume or on their way there.
    pub(crate) replaced: Bytes,
    /// The region does not need it: no lender asks, and nothing replaces it.
    pub(crate) surplus: bool,
    pub(crate) stuck: Option<Stuck>,
    /// The lease of whose pages it holds the second copies, if it holds copies.
    pub(crate) copy_of: Option<LeaseId>,
    /// Whether the engine is about to begin the copy.
    pub(crate) is_beginning: bool,
    /// Whether this host has said that no host has room for a second copy.
    pub(crate) has_told_lack: bool,
    /// Whether it is left because its lender is gone, and not because that lender asks for it.
    pub(crate) is_abandoned: bool,
    /// Whether it is left so that its pages get another key: it stays if other leases cannot take
    /// all of it.
    pub(crate) rotates: bool,
}

/// A lease that could not be vacated.
#[derive(Clone, Debug)]
pub(crate) struct Stuck {
    /// Why, last time.
    pub(crate) why: String,
    /// When it failed last.
    pub(crate) at: Duration,
    /// Since when it fails.
    pub(crate) since: Duration,
}

impl Stuck {
    /// Returns whether this still counts.
    pub(crate) fn lasts(&self, now: Duration) -> bool {
        now.saturating_sub(self.at) < STUCK_LIFE
    }
}

impl Holding {
    /// Returns whether its lender asks for it, and it cannot be vacated. A lender that asks no more
    /// does not tell.
    pub(crate) fn is_stuck(&self, now: Duration) -> bool {
        self.stuck.as_ref().is_some_and(|stuck| stuck.lasts(now))
    }

    /// Returns whether another host wants the memory of this lease, and has to wait for it.
    fn keeps_others_waiting(&self, now: Duration) -> bool {
        self.is_stuck(now) && self.copy_of.is_none() && !self.is_abandoned
    }

    /// Returns whether its pages may go to the region's spill file, as it has been stuck for long.
    pub(crate) fn may_spill(&self, now: Duration) -> bool {
        if !self.keeps_others_waiting(now) {
            return false;
        }
        let is_late = |stuck: &Stuck| now.saturating_sub(stuck.since) >= SPILL_AFTER;
        self.stuck.as_ref().is_some_and(|stuck| stuck.lasts(now) && is_late(stuck))
    }
}

/// The borrower's half of the controller.
#[derive(Clone, Debug, Default)]
pub(crate) struct Borrower {
    pub(crate) round: Option<Round>,
    pub(crate) volumes: BTreeMap<VolumeId, Volume>,
    pub(crate) holdings: BTreeMap<LeaseId, Holding>,
    pub(crate) pending_releases: PendingReleases,
    /// The requests of regions that wait for their round.
    pub(crate) requests: VecDeque<RegionRequest>,
    /// The leases of regions that may come from other hosts, by volume.
    pub(crate) expected: BTreeMap<VolumeId, BTreeSet<LeaseId>>,
    offers: Vec<Offer>,
    /// Lenders that this host does not ask, each with the time at which that ends.
    skipped: BTreeMap<HostName, Duration>,
    /// No round for overload starts before this time.
    paused_until: Duration,
    /// Until this time, this host does not report again that no lender has memory to spare.
    pub(crate) silent_until: Duration,
}

impl Borrower {
    pub(crate) fn restore(
        volumes: Vec<LiveVolume>,
        expected: BTreeMap<VolumeId, BTreeSet<LeaseId>>,
    ) -> Self {
        let mut borrower = Self { expected, ..Self::default() };
        volumes.iter().for_each(|live| borrower.add_volume(live, VolumeState::Active));
        borrower
    }

    /// Records the offers, and runs the timers of the `mem_bor_fin`s and of the request in flight.
    pub(crate) fn timers(&mut self, offers: Vec<Offer>, ctx: &mut StepContext<'_>) {
        self.offers = offers;
        self.skipped.retain(|_, until| *until > ctx.now());
        self.pending_releases.tick(ctx);
        let overload_gone = !ctx.memory().needs_borrowed(ctx.config());
        if overload_gone
            && self.round.as_ref().is_some_and(|r| r.purpose == Purpose::Volume(Cause::Overload))
        {
            self.abandon(ctx);
        }
        if let Some(round) = &mut self.round
            && let Wait::Over(lender) = round.tick(ctx)
        {
            self.skip(&lender, ctx);
            self.proceed(ctx);
        }
    }

    /// Runs Algorithm 3 for a monitoring period.
    pub(crate) fn tick(&mut self, ctx: &mut StepContext<'_>) {
        let needed = ctx.memory().needs_borrowed(ctx.config());
        let idle =
            |volume: &Volume| volume.state == VolumeState::Active && volume.retry_at <= ctx.now();
        let goes =
            |volume: &Volume| volume.returned || (!needed && volume.cause == Cause::Overload);
        let going: Vec<_> =
            self.volumes.iter().filter(|(_, v)| idle(v) && goes(v)).map(|(id, _)| *id).collect();
        going.into_iter().for_each(|volume| self.deactivate(volume, ctx));
        if ctx.wants_to_swap() && self.nearly_full(ctx) && self.may_start(ctx) {
            let (group, bytes) = (ctx.config().group.clone(), ctx.config().request);
            if let Err(refusal) = self.borrow(Cause::Overload, bytes, group, ctx) {
                self.pause(ctx.config().cooldown, ctx);
                ctx.decide(What::BorrowRefused { bytes, cause: Cause::Overload, refusal });
            }
        }
    }

    /// Returns whether more than three quarters of the borrowed memory is in use and no more is on
    /// its way. Extents of a volume that lost their lease to a recall are on a disk, so they do not
    /// count as borrowed memory.
    pub(crate) fn nearly_full(&self, ctx: &StepContext<'_>) -> bool {
        let mut swap = self.volumes.values().filter(|volume| volume.owner.is_swap());
        let all_active = swap.all(|volume| volume.state == VolumeState::Active);
        let is_room = |holding: &Holding| {
            holding.copy_of.is_none() && self.volumes[&holding.volume].owner.is_swap()
        };
        let (used, borrowed) = (ctx.memory().swap_used.0, self.borrowed_for(is_room).0);
        all_active && used.saturating_mul(4) > borrowed.saturating_mul(3)
    }

    /// Returns whether a round for overload may start at this step.
    pub(crate) fn may_start(&self, ctx: &StepContext<'_>) -> bool {
        ctx.config().borrows && self.round.is_none() && ctx.now() >= self.paused_until
    }

    /// Starts no round for overload for `wait`.
    pub(crate) fn pause(&mut self, wait: Duration, ctx: &StepContext<'_>) {
        self.paused_until = ctx.now().saturating_add(wait);
    }

    /// Does not ask this lender for a cooldown, unless the operator wants to borrow.
    pub(crate) fn skip(&mut self, lender: &HostName, ctx: &StepContext<'_>) {
        self.skipped.insert(lender.clone(), ctx.now().saturating_add(ctx.config().cooldown));
    }

    pub(crate) fn candidates(
        &self,
        owner: &Owner,
        without_skipped: bool,
        ctx: &StepContext<'_>,
    ) -> Candidates {
        Candidates::new(self.offers_to(owner, without_skipped, ctx))
    }

    pub(crate) fn offers_to(
        &self,
        owner: &Owner,
        without_skipped: bool,
        ctx: &StepContext<'_>,
    ) -> impl Iterator<Item = Offer> {
        self.offers(without_skipped, ctx).map(|offer| offer.to(owner))
    }

    /// Returns the offers of other hosts.
    pub(crate) fn offers(
        &self,
        without_skipped: bool,
        ctx: &StepContext<'_>,
    ) -> impl Iterator<Item = &Offer> {
        let asked = move |offer: &&Offer| {
            offer.host != ctx.facts.host
                && !(without_skipped && self.skipped.contains_key(&offer.host))
        };
        self.offers.iter().filter(asked)
    }

    /// Returns how much more this host may borrow. Leases on their way out do not count, so that it
    /// can replace them. Nor do second copies that go first: they take nothing from anybody, and so
    /// keep this host from nothing.
    pub(crate) fn room(&self, ctx: &StepContext<'_>) -> Bytes {
        whole_extents(ctx.config().max_borrowed.saturating_sub(self.counted(ctx)))
    }

    /// Returns how much more this host may borrow for second copies.
    pub(crate) fn room_for_copies(&self, ctx: &StepContext<'_>) -> Bytes {
        whole_extents(ctx.config().max_borrowed.saturating_sub(self.borrowed()))
    }

    /// Returns what counts as borrowed, of at most `max_borrowed`.
    pub(crate) fn counted(&self, ctx: &StepContext<'_>) -> Bytes {
        let protection = &ctx.config().protection;
        self.borrowed_for(|holding| {
            let volume = &self.volumes[&holding.volume];
            holding.copy_of.is_none()
                || protection.of(&volume.owner, &volume.group) != Protection::Opportunistic
        })
    }

    pub(crate) fn borrowed(&self) -> Bytes {
        self.borrowed_for(|_| true)
    }

    fn borrowed_for(&self, which: impl Fn(&Holding) -> bool) -> Bytes {
        let staying = self.holdings.values().filter(|holding| holding.leaving == Leaving::No);
        staying.filter(|holding| which(holding)).map(|holding| holding.borrowed.bytes).sum()
    }

    /// Returns whether this host borrows for swap, which makes it a borrower.
    pub(crate) fn swaps(&self) -> bool {
        self.volumes.values().any(|volume| volume.owner.is_swap())
    }

    pub(crate) fn add_volume(&mut self, live: &LiveVolume, state: VolumeState) {
        let volume = Volume {
            bytes: live.bytes,
            owner: live.owner.clone(),
            group: live.group.clone(),
            cause: live.cause,
            state,
            returned: false,
            retry_at: Duration::ZERO,
        };
        self.volumes.insert(live.volume, volume);
        live.leases.iter().for_each(|lease| self.hold(live.volume, lease.clone()));
        for (of, copy) in &live.copies {
            self.hold(live.volume, copy.clone());
            let holding = self.holdings.get_mut(&copy.lease);
            holding.into_iter().for_each(|holding| holding.copy_of = Some(*of));
        }
    }

    pub(crate) fn hold(&mut self, volume: VolumeId, borrowed: BorrowedLease) {
        let holding = Holding {
            borrowed,
            volume,
            leaving: Leaving::No,
            replaced: Bytes::ZERO,
            surplus: false,
            stuck: None,
            copy_of: None,
            is_beginning: false,
            has_told_lack: false,
            is_abandoned: false,
            rotates: false,
        };
        self.holdings.insert(holding.borrowed.lease, holding);
    }

    /// Marks the volume active. If the operator asked to give it back meanwhile, deactivates it at
    /// once.
    pub(crate) fn activated(&mut self, id: VolumeId, ctx: &mut StepContext<'_>) {
        if let Some(volume) = self.volumes.get_mut(&id)
            && volume.state == VolumeState::Activating
        {
            volume.state = VolumeState::Active;
            if volume.returned {
                self.deactivate(id, ctx);
            }
        }
    }

    pub(crate) fn activation_failed(
        &mut self,
        volume: VolumeId,
        why: String,
        ctx: &mut StepContext<'_>,
    ) {
        let Some(made) = self.volumes.get(&volume) else { return };
        if let Owner::Region(region) = made.owner.clone() {
            ctx.decide(What::Unclaimed { region, volume, why });
        } else {
            ctx.decide(What::ActivationFailed { volume, why });
            self.pause(ctx.config().cooldown, ctx);
        }
        self.drop_volume(volume, ctx);
    }

    /// Algorithm 3 line 4. Does nothing while one of the volume's leases is being vacated, or about
    /// to hold second copies; a later tick tries again.
    fn deactivate(&mut self, id: VolumeId, ctx: &mut StepContext<'_>) {
        let begins = |holding: &Holding| holding.volume == id && holding.is_beginning;
        if self.evacuating(id) || self.holdings.values().any(begins) {
            return;
        }
        self.abandon_replacement(id, ctx);
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        volume.state = VolumeState::Deactivating;
        let what = What::Deactivates { volume: id, bytes: volume.bytes, by_hand: volume.returned };
        for holding in self.holdings.values_mut().filter(|holding| holding.volume == id) {
            (holding.leaving, holding.rotates) = (Leaving::No, false);
        }
        ctx.decide(what);
        ctx.act(Action::Deactivate { volume: id });
    }

    /// Gives the volume's leases back (Algorithm 3 lines 5 and 6): nothing uses them any more.
    pub(crate) fn deactivated(&mut self, volume: VolumeId, ctx: &mut StepContext<'_>) {
        let Some(gone) = self.volumes.get(&volume) else { return };
        let leases = self.holdings.values().filter(|holding| holding.volume == volume).count();
        ctx.decide(match gone.owner.clone() {
            Owner::Swap => What::Deactivated { volume, leases },
            Owner::Region(region) => What::RegionGone { region, volume, leases },
        });
        self.drop_volume(volume, ctx);
    }

    pub(crate) fn deactivation_failed(
        &mut self,
        id: VolumeId,
        why: String,
        ctx: &mut StepContext<'_>,
    ) {
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.state = VolumeState::Active;
            volume.returned = false;
            volume.retry_at = ctx.now().saturating_add(ctx.config().cooldown);
            ctx.decide(What::DeactivationFailed { volume: id, why });
        }
    }

    /// Gives back one volume for swap or all, by the operator's order. For all, it also abandons
    /// the round for a new volume.
    pub(crate) fn give_back_by_hand(&mut self, which: Option<VolumeId>, ctx: &mut StepContext<'_>) {
        if which.is_none() {
            if self.round.as_ref().is_some_and(|round| matches!(round.purpose, Purpose::Volume(_)))
            {
                self.abandon(ctx);
            }
            self.pause(ctx.config().cooldown, ctx);
        }
        let meant = |id: &VolumeId| which.is_none_or(|volume| volume == *id);
        let swap = self.volumes.iter_mut().filter(|(_, volume)| volume.owner.is_swap());
        let mut ready = Vec::new();
        for (id, volume) in swap.filter(|(id, _)| meant(id)) {
            if volume.state != VolumeState::Deactivating {
                volume.returned = true;
            }
            if volume.state == VolumeState::Active {
                ready.push(*id);
            }
        }
        ready.into_iter().for_each(|volume| self.deactivate(volume, ctx));
    }

    fn drop_volume(&mut self, volume: VolumeId, ctx: &mut StepContext<'_>) {
        self.abandon_replacement(volume, ctx);
        self.volumes.remove(&volume);
        let over: Vec<_> = self
            .holdings
            .iter()
            .filter(|(_, holding)| holding.volume == volume)
            .map(|(id, _)| *id)
            .collect();
        over.into_iter().for_each(|lease| self.finish(lease, ctx));
    }

    /// Gives the lease back to its lender. Nothing may use it any more.
    pub(crate) fn finish(&mut self, lease: LeaseId, ctx: &mut StepContext<'_>) {
        if let Some(holding) = self.holdings.remove(&lease) {
            let BorrowedLease { lender, generation, .. } = holding.borrowed;
            self.pending_releases.add(&lender, lease, generation, ctx);
        }
    }

    /// Returns whether the lease belongs to a region that may come from another host.
    pub(crate) fn expects(&self, lease: LeaseId) -> bool {
        self.expected.values().any(|leases| leases.contains(&lease))
    }

    /// Returns whether a lease of this volume is being vacated.
    pub(crate) fn evacuating(&self, volume: VolumeId) -> bool {
        self.holdings.values().any(|h| h.volume == volume && h.leaving == Leaving::Evacuating)
    }

    /// Notes that the lender's agent has handled a message.
    pub(crate) fn delivered(&mut self, to: &HostName, message: &Message) {
        if let Message::MemBorFin { lease, .. } = message {
            self.pending_releases.delivered(to, *lease);
        }
    }

    /// Returns the volumes with a lease for which its lender asks, and that they cannot leave, each
    /// with the bytes of its other leases.
    pub(crate) fn stuck(&self, now: Duration) -> BTreeMap<VolumeId, Bytes> {
        let others = |stuck: &Holding| -> Bytes {
            let others = self.holdings.values().filter(|other| {
                other.volume == stuck.volume
                    && other.copy_of.is_none()
                    && other.borrowed.lease != stuck.borrowed.lease
            });
            others.map(|other| other.borrowed.bytes).sum()
        };
        let mut all = BTreeMap::new();
        let waiting = |holding: &&Holding| holding.keeps_others_waiting(now);
        for holding in self.holdings.values().filter(waiting) {
            let most = all.entry(holding.volume).or_insert(Bytes::ZERO);
            *most = others(holding).max(*most);
        }
        all
    }

    pub(crate) fn volumes(&self) -> impl Iterator<Item = VolumeStatus> {
        self.volumes.iter().map(|(&id, volume)| VolumeStatus {
            volume: id,
            // The leases of a region come and go.
            bytes: if volume.owner.is_swap() { volume.bytes } else { self.leased(id) },
            owner: volume.owner.clone(),
            group: volume.group.clone(),
            cause: volume.cause,
            state: volume.state,
        })
    }

    fn leased(&self, volume: VolumeId) -> Bytes {
        let of_it = self
            .holdings
            .values()
            .filter(|holding| holding.volume == volume && holding.copy_of.is_none());
        of_it.map(|holding| holding.borrowed.bytes).sum()
    }

    pub(crate) fn leases(&self) -> impl Iterator<Item = BorrowedStatus> {
        self.holdings.values().map(|holding| BorrowedStatus {
            lease: holding.borrowed.clone(),
            volume: holding.volume,
            leaving: holding.leaving != Leaving::No,
            copy_of: holding.copy_of,
        })
    }
}
