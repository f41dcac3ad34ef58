//! The controller of one host (Algorithm 1): dispatches events to the borrower and the lender.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_page::{Bytes, HostName, LeaseId, VolumeId};

use crate::borrower::Borrower;
use crate::ledger::{Ledger, OwnMemory};
use crate::lender::{LenderRole, Wish};
use crate::step_context::{Facts, Ids, StepContext};
use crate::{
    AskingStatus, Because, BorrowedLease, BorrowedStatus, Cause, Config, Event, Lent, LentLease,
    LentStatus, LiveVolume, Memory, Message, Reason, Refusal, Role, Shareable, Step, VolumeStatus,
    What, neutral,
};

/// The state that a restarted agent finds on its host.
#[derive(Clone, Debug, Default)]
pub struct Restored {
    /// The leases in the store, each with the URIs that reach its pages.
    pub lent: Vec<(LentLease, Vec<String>)>,
    /// The live volumes. A volume that is not listed must be gone, because this host gives its
    /// leases back.
    pub volumes: Vec<LiveVolume>,
    /// The leases of regions that may come from other hosts, by volume.
    pub expected: BTreeMap<VolumeId, BTreeSet<LeaseId>>,
}

/// The controller of one host (Algorithm 1).
#[derive(Clone, Debug)]
pub struct Controller {
    facts: Facts,
    ids: Ids,
    role: Role,
    borrower: Borrower,
    lender: LenderRole,
}

impl Controller {
    /// Returns a controller that neither borrows nor lends.
    ///
    /// `seed` is the start of its ids: a random number, different at each start, so that ids are
    /// unique among hosts and restarts.
    pub fn new(host: HostName, config: Config, seed: u128) -> Self {
        Self::restore(host, config, seed, Duration::ZERO, Restored::default())
    }

    /// Returns a controller that continues from the state that the previous one left behind.
    ///
    /// The new controller knows nothing else. Requests in flight are forgotten. If the previous
    /// controller was giving leases back, their lenders ask for them again.
    pub fn restore(
        host: HostName,
        config: Config,
        seed: u128,
        now: Duration,
        found: Restored,
    ) -> Self {
        let (memory, own) = (Memory::default(), OwnMemory::default());
        let facts = Facts { host, config, memory, own, caches_relieve: false, now };
        let borrower = Borrower::restore(found.volumes, found.expected);
        let lender = LenderRole::restore(found.lent, facts.config.lends, now);
        let role = match (borrower.swaps(), lender.lends()) {
            (true, _) => Role::Borrower,
            (false, true) => Role::Lender,
            (false, false) => Role::Neutral,
        };
        Self { facts, ids: Ids(seed), role, borrower, lender }
    }

    /// Handles one event, and returns the actions and decisions. `now` is the time since any fixed
    /// moment, and does not go back.
    pub fn step(&mut self, now: Duration, event: Event) -> Step {
        self.facts.now = self.facts.now.max(now);
        if let Event::Tick { memory, .. } = &event {
            self.facts.memory = *memory;
        }
        let Self { facts, ids, role, borrower, lender } = self;
        let mut ctx = StepContext { facts, ids, step: Step::default() };
        handle(event, *role, borrower, lender, &mut ctx);
        borrower.evacuate_waiting(&mut ctx);
        borrower.serve_requests(&mut ctx);
        let next = next_role(*role, borrower.swaps(), lender);
        if next != *role {
            ctx.decide(What::RoleChanged { from: *role, to: next });
            *role = next;
        }
        ctx.step
    }

    /// Ends all lending and borrowing of a host that has nothing lent or borrowed.
    pub(crate) fn retire(&mut self) {
        (self.facts.config.borrows, self.facts.config.lends) = (false, false);
        self.lender = LenderRole::restore(Vec::new(), false, self.facts.now);
    }

    /// Takes a reading of the memory that this host promises besides its leases. It counts from now
    /// on, also for requests that come before the next tick.
    pub fn note_own(&mut self, own: OwnMemory) {
        self.facts.own = own;
    }

    /// Notes whether local caches relieve this host of its overload, from the next tick on.
    pub(crate) fn note_relief(&mut self, caches_relieve: bool) {
        self.facts.caches_relieve = caches_relieve;
    }

    pub(crate) fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Returns the present role.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Returns the last reading.
    pub fn memory(&self) -> Memory {
        self.facts.memory
    }

    /// Returns M_s by eq. 1 or eq. 2, from the last reading.
    pub fn shareable(&self) -> Bytes {
        self.facts.memory.shareable(&self.facts.config)
    }

    /// Returns the bytes that this host would grant to swap at present: the offer for peers that
    /// look for a lender. Zero while it borrows, asks, is overloaded or recalls leases.
    pub fn spare(&self) -> Bytes {
        self.asked(|lender, ctx| lender.spare_for_swap(busy(&self.borrower), ctx))
    }

    /// Returns the bytes that this host would grant to regions at present. Its role does not limit
    /// these, but the memory that it has swapped out itself does.
    pub fn spare_for_regions(&self) -> Bytes {
        self.asked(LenderRole::spare_for_regions)
    }

    /// Returns the bytes that this host would grant at present to second copies that go first.
    pub fn spare_for_copies(&self) -> Bytes {
        self.asked(LenderRole::spare_for_copies)
    }

    fn asked<T>(&self, ask: impl FnOnce(&LenderRole, &StepContext<'_>) -> T) -> T {
        let mut ids = self.ids.clone();
        let ctx = StepContext { facts: &self.facts, ids: &mut ids, step: Step::default() };
        ask(&self.lender, &ctx)
    }

    /// Returns whether this host lacks memory, beside what it borrowed for that.
    pub(crate) fn is_short(&self) -> bool {
        let is_overloaded = self.facts.memory.overloaded(&self.facts.config);
        let has_swap = self.borrower.swaps();
        is_overloaded && (!has_swap || self.asked(|_, ctx| self.borrower.nearly_full(ctx)))
    }

    /// Returns how much of a lease nothing can replace now.
    pub(crate) fn irreplaceable(&self, lease: LeaseId) -> Bytes {
        self.asked(|_, ctx| self.borrower.irreplaceable(lease, ctx))
    }

    /// Returns how much more this host may borrow, apart from second copies.
    pub(crate) fn may_borrow(&self) -> Bytes {
        self.asked(|_, ctx| self.borrower.room(ctx))
    }

    /// Returns whether a lease is left so that its pages get another key.
    pub(crate) fn rotates(&self, lease: LeaseId) -> bool {
        self.borrower.rotates(lease)
    }

    /// Returns the bytes of which a program can make use here while this host stays below T_upper
    /// M_t, also when every promise is used.
    pub fn room(&self) -> Bytes {
        self.room_below(self.facts.config.upper)
    }

    /// Returns the same for another share of M_t.
    pub(crate) fn room_below(&self, share: f64) -> Bytes {
        let (memory, lent) = self.lender.without_copies(&self.facts.memory);
        let unused = lent.granted.saturating_sub(lent.stored);
        let limit = memory.total.scaled(share);
        let promises = self.left().saturating_sub(memory.total.saturating_sub(limit));
        limit.saturating_sub(memory.used).saturating_sub(unused).min(promises)
    }

    /// Returns the bytes that no promise takes: VMs and caches may grow by them. M_r is for them,
    /// too.
    pub fn left(&self) -> Bytes {
        let config = Config { shareable: Shareable::Dynamic, ..self.facts.config.clone() };
        self.lender.ledger(&Facts { config, ..self.facts.clone() }).available()
    }

    /// Returns the account of this host's memory, from the last readings and the present leases.
    pub fn ledger(&self) -> Ledger {
        self.lender.ledger(&self.facts)
    }

    /// Returns the account if this host promised `own`.
    pub(crate) fn ledger_with(&self, own: OwnMemory) -> Ledger {
        self.lender.ledger(&Facts { own, ..self.facts.clone() })
    }

    /// Returns the capacity of the leases that this host could recall.
    pub fn recallable(&self) -> Bytes {
        self.lender.recallable(self.facts.now)
    }

    /// Returns the memory that this host promises besides its leases, from the last reading.
    pub fn own(&self) -> &OwnMemory {
        &self.facts.own
    }

    /// Returns the bytes for which requests of regions wait.
    pub(crate) fn requested(&self) -> Bytes {
        self.borrower.requested()
    }

    /// Returns the volumes, those of regions among them, by id.
    pub fn volumes(&self) -> Vec<VolumeStatus> {
        self.borrower.volumes().collect()
    }

    /// Returns the leases under the volumes, by id.
    pub fn borrowed(&self) -> Vec<BorrowedStatus> {
        self.borrower.leases().collect()
    }

    /// Returns whether this host holds leases with second copies.
    pub(crate) fn has_copies(&self) -> bool {
        self.borrower.has_copies()
    }

    /// Returns the leases that this host gave, by id.
    pub fn lent(&self) -> Vec<LentStatus> {
        self.lender.status().collect()
    }

    /// Returns the sums over this host's leases.
    pub(crate) fn lent_sums(&self) -> Lent {
        self.lender.lent()
    }

    /// Returns the volumes with a lease for which its lender asks, and that they cannot leave, each
    /// with the bytes of its other leases.
    pub(crate) fn stuck(&self, now: Duration) -> BTreeMap<VolumeId, Bytes> {
        self.borrower.stuck(now)
    }

    /// Returns when the oldest recall began that goes on.
    pub(crate) fn recalling_since(&self) -> Option<Duration> {
        self.lender.recalling_since()
    }

    /// Returns the request in flight.
    pub fn asking(&self) -> Option<AskingStatus> {
        self.borrower.round.as_ref().and_then(|round| round.status())
    }

    /// Returns whether this host asks lenders, or waits to ask one again.
    pub(crate) fn is_asking(&self) -> bool {
        self.borrower.round.is_some()
    }

    /// Returns whether a region is about to come here from another host, with its leases.
    pub fn expects(&self) -> bool {
        !self.borrower.expected.is_empty()
    }

    /// Returns the number of unconfirmed `mem_bor_fin`s.
    pub fn pending_releases(&self) -> usize {
        self.borrower.pending_releases.len()
    }
}

/// Returns why this host may not grant anything to swap: it borrows for swap, or it asks and an ack
/// would make it a borrower.
fn busy(borrower: &Borrower) -> Option<Reason> {
    let asks = borrower.round.as_ref().is_some_and(|round| round.owner.is_swap());
    borrower.swaps().then_some(Reason::Borrowing).or(asks.then_some(Reason::Asking))
}

/// Returns the next role by the four edges of Fig. 3, and no others.
fn next_role(role: Role, borrows: bool, lender: &LenderRole) -> Role {
    match role {
        Role::Neutral if borrows => Role::Borrower,
        Role::Neutral if lender.lends() => Role::Lender,
        Role::Borrower | Role::Lender if !borrows && !lender.lends() => Role::Neutral,
        unchanged => unchanged,
    }
}

fn handle(
    event: Event,
    role: Role,
    borrower: &mut Borrower,
    lender: &mut LenderRole,
    ctx: &mut StepContext<'_>,
) {
    match event {
        Event::Tick { stored, lenders, .. } => {
            lender.read(&stored);
            borrower.timers(lenders, ctx);
            tick(role, borrower, lender, ctx);
            lender.timers(ctx);
        }
        Event::Received { from, message } => receive(&from, message, borrower, lender, ctx),
        Event::Delivered { to, message } => {
            borrower.delivered(&to, &message);
            lender.delivered(&to, &message, ctx.now());
        }
        Event::Activated { volume } => borrower.activated(volume, ctx),
        Event::ActivationFailed { volume, why } => borrower.activation_failed(volume, why, ctx),
        Event::Deactivated { volume } => borrower.deactivated(volume, ctx),
        Event::DeactivationFailed { volume, why } => borrower.deactivation_failed(volume, why, ctx),
        Event::Extended { volume, unused } => borrower.extended(volume, unused, ctx),
        Event::GiveBack { lease } => borrower.give_back_lease(lease, ctx),
        Event::Protect { lease, near } => borrower.protect(lease, &near, ctx),
        Event::Copied { lease, failed } => borrower.copied(lease, failed, ctx),
        Event::Abandon { lease } => borrower.abandon_lease(lease, ctx),
        Event::Replace { lease, room } => borrower.replace(lease, room),
        Event::Evacuated { lease, unused } => borrower.evacuated(lease, unused, ctx),
        Event::EvacuationFailed { lease, unused, why } => {
            borrower.evacuation_failed(lease, unused, why, ctx);
        }
        Event::LeaseOpened { lease, uris } => lender.opened(lease, uris, ctx),
        Event::LeaseFailed { lease, why } => lender.open_failed(lease, why, busy(borrower), ctx),
        Event::LeaseFreed { lease } => lender.freed(lease),
        Event::Anew { host } => lender.ask_anew(&host, ctx),
        Event::BorrowerSeen { lease } => lender.seen(lease, ctx.now()),
        Event::Permit { from, lease, generation, to } => {
            lender.permit(&from, lease, generation, to, ctx);
        }
        Event::Taken { by, lease, generation } => lender.taken(&by, lease, generation, ctx),
        Event::LeaseRecorded(lease) => lender.recorded(&lease, ctx),
        Event::RecordFailed { lease, why } => ctx.decide(What::RecordFailed { lease, why }),
        Event::Moved { volume, to } => borrower.moved(volume, to, ctx),
        Event::Expected { volume, leases } => drop(borrower.expected.insert(volume, leases)),
        Event::Missed { volume } => drop(borrower.expected.remove(&volume)),
        Event::Arrived(live) => borrower.arrived(&live, ctx),
        Event::Borrow { bytes, group } => {
            let started = if lender.is_idle() {
                borrower.borrow(Cause::ByHand, bytes, group, ctx)
            } else {
                Err(Refusal::Lending)
            };
            if let Err(refusal) = started {
                ctx.decide(What::BorrowRefused { bytes, cause: Cause::ByHand, refusal });
            }
        }
        Event::BorrowFor(request) => borrower.borrow_for(request),
        Event::Return { volume } => borrower.give_back_by_hand(volume, ctx),
        Event::Drain { on } => lender.drain(on, ctx),
        Event::Reclaim { bytes } => lender.reclaim(bytes, ctx),
        Event::Part { host } => {
            lender.part(&host, ctx);
            borrower.part(&host, ctx);
        }
        Event::Refused { by, message: Message::MemBorReq { request, .. }, why } => {
            borrower.refused(&by, request, why, ctx);
        }
        // The sender repeats all other messages for as long as they matter.
        Event::Refused { .. } => {}
    }
}

/// Runs Algorithm 1, lines 2-8.
fn tick(role: Role, borrower: &mut Borrower, lender: &mut LenderRole, ctx: &mut StepContext<'_>) {
    match role {
        Role::Neutral => neutral::tick(borrower, !lender.is_idle(), ctx),
        Role::Borrower => {
            lender.recall_from_swap(Because::Overload, ctx);
            borrower.tick(ctx);
        }
        Role::Lender => {}
    }
    // In the other roles, the leases of regions.
    lender.tick(ctx);
}

fn receive(
    from: &HostName,
    message: Message,
    borrower: &mut Borrower,
    lender: &mut LenderRole,
    ctx: &mut StepContext<'_>,
) {
    match message {
        Message::MemBorReq { request, bytes, owner, group, goes_first } => {
            let wish = Wish { borrower: from.clone(), request, bytes, owner, group, goes_first };
            lender.requested(wish, busy(borrower), ctx);
        }
        Message::MemBorAck { request, lease, bytes, uris, generation } => {
            let lease = BorrowedLease { lease, lender: from.clone(), bytes, uris, generation };
            borrower.acknowledged(request, lease, ctx);
        }
        Message::MemBorRej { request, spare, reason } => {
            borrower.rejected(from, request, spare, reason, ctx);
        }
        Message::MemBorFin { lease, generation } => lender.denied(from, lease, generation, ctx),
        Message::MemLenFin { lease, generation } => {
            borrower.recalled(from, lease, generation, ctx);
        }
    }
}
