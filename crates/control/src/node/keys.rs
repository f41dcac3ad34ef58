//! Keys of leases: how old they are, and the leases that others replace so that their pages get new
//! keys.
//!
//! The agent makes a key for each lease that it borrows. So a key ends with its lease: another
//! lease replaces that one, as in a recall, and the mover encrypts each page under the new key. One
//! lease at a time is replaced, and only while nothing else moves. If its pages have second copies,
//! the volume first gets the other lease with copies of its own, so that each page has two copies
//! at any time.
//!
//! An age counts the time that agents of this host ran, by a clock that does not jump. So no wall
//! clock that does can make all keys old at once, or keep them young.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_page::{Bytes, LeaseId, VolumeId};

use super::offers::Waiting;
use super::orders::failed;
use super::{Answer, Node, Ticket};
use crate::{BorrowedStatus, Event, Owner, Protection, RegionRequest, Subject};

/// The part of the lifetime in which keys of one age fall due: the last quarter.
const SPREAD: u32 = 4;

/// The part of the lifetime that is the shortest pause.
const PAUSE_PART: u32 = 8;

/// The longest first pause after an attempt that failed. Each further failure doubles it.
const PAUSE: Duration = Duration::from_secs(600);

/// How often failures double the pause.
const DOUBLINGS: u32 = 5;

/// The longest time from one replaced lease to the next one that is due.
const SPACING: Duration = Duration::from_secs(60);

/// How long a lease may wait until another one has room and second copies for its pages. Less than
/// the time after which a region gives back what it does not need.
const PREPARING: Duration = Duration::from_secs(90);

/// What a node knows of keys when it begins.
#[derive(Clone, Debug, Default)]
pub struct KeySettings {
    /// The age at which a key has been replaced, if lenders have room; `None` for never.
    pub lifetime: Option<Duration>,
    /// The ages that the previous agent noted. A key without one counts as made now.
    pub ages: BTreeMap<LeaseId, Duration>,
    /// The leases whose keys the operator wanted replaced, and that the previous agent still had.
    pub ordered: BTreeSet<LeaseId>,
}

/// What the node remembers of keys.
#[derive(Clone, Debug, Default)]
pub(super) struct Keys {
    settings: KeySettings,
    /// For each held lease with a key of its own: an age, and when the key had it.
    known: BTreeMap<LeaseId, (Duration, Duration)>,
    /// The leases whose keys the operator wants replaced.
    ordered: BTreeSet<LeaseId>,
    /// When this host last tried to replace each lease.
    tried: BTreeMap<LeaseId, Duration>,
    /// The lease that is being replaced, or was last tried.
    current: Option<LeaseId>,
    prepared: Option<Prepared>,
    /// The attempts that failed since the last that succeeded.
    failures: u32,
    /// No attempt begins before.
    rests_until: Duration,
}

/// A lease whose volume gets another lease, with second copies, before its pages move.
#[derive(Clone, Debug)]
struct Prepared {
    lease: LeaseId,
    /// The leases of the volume before.
    others: BTreeSet<LeaseId>,
    since: Duration,
}

impl Keys {
    pub(super) fn new(settings: KeySettings) -> Self {
        let ordered = settings.ordered.clone();
        Self { settings, ordered, ..Self::default() }
    }

    /// Takes note of the leases that have keys of their own, and forgets those that are not held.
    fn note(&mut self, own: &BTreeSet<LeaseId>, held: &BTreeSet<LeaseId>, now: Duration) {
        for lease in own.intersection(held) {
            let ages = &mut self.settings.ages;
            self.known
                .entry(*lease)
                .or_insert_with(|| (ages.remove(lease).unwrap_or_default(), now));
        }
        self.known.retain(|lease, _| held.contains(lease));
        self.ordered.retain(|lease| held.contains(lease));
        self.tried.retain(|lease, _| held.contains(lease));
        self.prepared.take_if(|prepared| !held.contains(&prepared.lease));
        if self.current.take_if(|lease| !held.contains(lease)).is_some() {
            let pause =
                if self.ordered.is_empty() { self.pause().min(SPACING) } else { Duration::ZERO };
            (self.failures, self.rests_until) = (0, now.saturating_add(pause));
        }
    }

    fn age(&self, lease: LeaseId, now: Duration) -> Option<Duration> {
        let (age, then) = self.known.get(&lease)?;
        Some(age.saturating_add(now.saturating_sub(*then)))
    }

    /// Returns why the key of a lease must be replaced, if it must.
    fn why(&self, lease: LeaseId, now: Duration) -> Option<String> {
        let age = self.age(lease, now)?;
        if self.ordered.contains(&lease) {
            return Some("the operator ordered it".to_owned());
        }
        let lifetime = self.settings.lifetime?;
        let is_due = age >= lifetime.saturating_sub(early(lifetime, lease));
        is_due.then(|| format!("it is {} old, of at most {}", rounded(age), rounded(lifetime)))
    }

    /// Returns the first pause after a failure.
    fn pause(&self) -> Duration {
        let part = self.settings.lifetime.map(|lifetime| lifetime / PAUSE_PART);
        part.map_or(PAUSE, |part| part.clamp(Duration::from_secs(1), PAUSE))
    }

    /// Notes an attempt. Until it succeeds, it counts as one that failed.
    fn try_next(&mut self, lease: LeaseId, now: Duration) {
        self.failures = self.failures.saturating_add(1);
        self.rest(now);
        self.tried.insert(lease, now);
        self.current = Some(lease);
    }

    /// Begins no attempt for a while: for longer after each failure.
    fn rest(&mut self, now: Duration) {
        let doublings = self.failures.saturating_sub(1).min(DOUBLINGS);
        self.rests_until = now.saturating_add(self.pause().saturating_mul(1 << doublings));
    }

    /// Takes an attempt back that did not begin.
    fn call_off(&mut self, now: Duration) {
        (self.failures, self.rests_until) = (self.failures.saturating_sub(1), now);
    }
}

/// Returns whether another lease holds second copies of the pages of this one.
fn has_copy(borrowed: &[BorrowedStatus], lease: LeaseId) -> bool {
    borrowed.iter().any(|held| held.copy_of == Some(lease))
}

/// Returns how long before the end of the lifetime a key falls due. Keys of one age get different
/// times, also those of leases with consecutive ids.
fn early(lifetime: Duration, lease: LeaseId) -> Duration {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let id = (lease.0 ^ (lease.0 >> 64)) as u64;
    let share = (id.wrapping_mul(GOLDEN) >> 32) as f64 / f64::from(u32::MAX);
    (lifetime / SPREAD).mul_f64(share)
}

/// Returns a time with its two largest units, for people.
fn rounded(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}min", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d {}h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

impl Node {
    /// Returns the ages of the keys of leases that have keys of their own, at the last input.
    pub fn key_ages(&self) -> BTreeMap<LeaseId, Duration> {
        let age = |lease: &LeaseId| Some((*lease, self.borrowing.keys.age(*lease, self.now)?));
        self.borrowing.keys.known.keys().filter_map(age).collect()
    }

    /// Returns the leases whose keys the operator wants replaced.
    pub fn ordered_keys(&self) -> &BTreeSet<LeaseId> {
        &self.borrowing.keys.ordered
    }

    /// Returns whether a lease is left so that its pages get another key. It stays if the leases
    /// for its pages cannot be used.
    pub fn rotates(&self, lease: LeaseId) -> bool {
        self.controller.rotates(lease)
    }

    /// Takes note of keys, and replaces the next lease whose key must be replaced.
    pub(super) fn rotate_keys(&mut self, own: &BTreeSet<LeaseId>) {
        let borrowed = self.controller.borrowed();
        let held = borrowed.iter().map(|held| held.lease.lease).collect();
        self.borrowing.keys.note(own, &held, self.now);
        self.end_preparation(&borrowed);
        if self.now < self.borrowing.keys.rests_until || !self.is_calm(&borrowed) {
            return;
        }
        let prepared = self.borrowing.keys.prepared.as_ref().map(|prepared| prepared.lease);
        let due = borrowed.iter().filter(|held| {
            let lease = held.lease.lease;
            prepared.is_none_or(|prepared| prepared == lease)
                && self.borrowing.keys.why(lease, self.now).is_some()
                && self.may_replace(held, &borrowed)
        });
        let rank = |held: &&BorrowedStatus| {
            let lease = held.lease.lease;
            let age = self.borrowing.keys.age(lease, self.now).unwrap_or_default();
            (self.borrowing.keys.tried.get(&lease).copied(), std::cmp::Reverse(age))
        };
        let Some(next) = due.min_by_key(rank) else { return };
        let (lease, bytes) = (next.lease.lease, next.lease.bytes);
        self.borrowing.keys.try_next(lease, self.now);
        self.with_offers(Waiting::Rotate(lease, bytes));
    }

    /// Returns whether nothing else happens to the memory of this host: no recall, no drain, no
    /// shortage, and nothing that moves.
    fn is_calm(&self, borrowed: &[BorrowedStatus]) -> bool {
        let lends = self.controller.facts().config.lends;
        let drains = self.vacates() || (self.is_draining() && lends);
        let recalls = self.controller.recalling_since().is_some()
            || borrowed.iter().any(|held| held.leaving)
            || !self.controller.stuck(self.now).is_empty();
        let borrows = self.controller.is_asking()
            || self.requested() > Bytes::ZERO
            || self.orders.is_borrowing()
            || self.own.caches.is_borrowing()
            || self.is_busy();
        !(drains || recalls || borrows || self.controller.is_short() || self.has_left())
    }

    /// Returns whether a lease may be replaced: its volume is in use, moves nowhere, and has all of
    /// its pages and their second copies.
    fn may_replace(&self, held: &BorrowedStatus, borrowed: &[BorrowedStatus]) -> bool {
        let mut of_volume = borrowed.iter().filter(|other| other.volume == held.volume);
        let is_still = match self.owner(held.volume) {
            Some(Owner::Region(region)) => !self.is_moving(&region),
            Some(Owner::Swap) => true,
            None => false,
        };
        held.copy_of.is_none()
            && is_still
            && self.is_idle(held.volume)
            && !self.borrowing.watch.has_spilled(held.volume)
            && of_volume.all(|other| other.copy_of.is_some() || self.is_whole(other.lease.lease))
            && (!self.is_prepared(held.lease.lease) || self.has_copied_room(held, borrowed))
    }

    fn owner(&self, volume: VolumeId) -> Option<Owner> {
        let volumes = self.controller.volumes();
        volumes.into_iter().find(|known| known.volume == volume).map(|known| known.owner)
    }

    fn is_prepared(&self, lease: LeaseId) -> bool {
        self.borrowing.keys.prepared.as_ref().is_some_and(|prepared| prepared.lease == lease)
    }

    /// Returns whether second copies of a volume are only in memory that nobody else needs.
    pub(super) fn copies_go_first(&self, volume: VolumeId) -> bool {
        let protection = &self.controller.facts().config.protection;
        let volumes = self.controller.volumes();
        let known = volumes.iter().find(|known| known.volume == volume);
        let protection = known.map(|known| protection.of(&known.owner, &known.group));
        protection == Some(Protection::Opportunistic)
    }

    /// Returns whether other leases of the volume have room for the pages of this one, and second
    /// copies. Copies that go first may be missing in the end.
    fn has_copied_room(&self, held: &BorrowedStatus, borrowed: &[BorrowedStatus]) -> bool {
        let lease = held.lease.lease;
        let mut others = borrowed.iter().filter(|other| {
            other.volume == held.volume && other.copy_of.is_none() && other.lease.lease != lease
        });
        let prepared = self.borrowing.keys.prepared.as_ref();
        let is_late = prepared.is_some_and(|prepared| self.passed(PREPARING, prepared.since));
        self.room_for(held, borrowed) >= held.lease.bytes
            && (others.all(|other| has_copy(borrowed, other.lease.lease))
                || (is_late && self.copies_go_first(held.volume)))
    }

    /// Returns the room that the volume has got for the pages of a lease. A region never has more
    /// at lenders than its size, so more than that is such room, too.
    fn room_for(&self, held: &BorrowedStatus, borrowed: &[BorrowedStatus]) -> Bytes {
        let prepared =
            self.borrowing.keys.prepared.as_ref().filter(|it| it.lease == held.lease.lease);
        let is_new = |other: &&BorrowedStatus| {
            other.volume == held.volume
                && other.copy_of.is_none()
                && prepared.is_some_and(|it| !it.others.contains(&other.lease.lease))
        };
        let new = borrowed.iter().filter(is_new).map(|other| other.lease.bytes).sum();
        let owner = self.owner(held.volume);
        let region = owner.as_ref().and_then(Owner::region);
        let region = self.own.read.regions.iter().find(|known| region == Some(&known.name));
        let beyond = region.map_or(Bytes::ZERO, |region| {
            self.held(held.volume).saturating_sub(region.size.round_up_to_extents())
        });
        beyond.max(new)
    }

    /// Replaces a lease, if lenders have room for its pages.
    pub(super) fn rotate(&mut self, lease: LeaseId) {
        let borrowed = self.controller.borrowed();
        let held = borrowed.iter().find(|held| held.lease.lease == lease);
        let why = self.borrowing.keys.why(lease, self.now);
        let (Some(held), Some(why)) = (held, why) else { return };
        // Much may have happened since the question for offers.
        if !self.is_calm(&borrowed) || !self.may_replace(held, &borrowed) {
            return self.borrowing.keys.call_off(self.now);
        }
        let (lender, bytes) = (&held.lease.lender, held.lease.bytes);
        // A volume for swap gets no leases before its pages move. The next one gets its copy then.
        let is_swap = self.owner(held.volume).is_some_and(|owner| owner.is_swap());
        let is_copied = !is_swap && has_copy(&borrowed, lease);
        let room = match is_copied || self.is_prepared(lease) {
            true => self.room_for(held, &borrowed),
            false => Bytes::ZERO,
        };
        // The lease itself counts until another one with copies is there.
        let prepares = is_copied && room < bytes;
        let may_borrow = self.controller.may_borrow() >= bytes;
        let lacks = match prepares && !may_borrow && !self.copies_go_first(held.volume) {
            true => bytes.saturating_sub(room),
            false => self.controller.irreplaceable(lease).saturating_sub(room),
        };
        if lacks > Bytes::ZERO {
            let wait = rounded(self.borrowing.keys.rests_until.saturating_sub(self.now));
            let what = format!(
                "keeps the key of lease {lease} of {lender}, although {why}: no lender, or no rest \
                 of borrow.max, has room for {lacks} of its pages; tries again in {wait}"
            );
            return self.log(what, self.about(held));
        }
        if prepares && may_borrow {
            return self.prepare_room(&held.clone(), &borrowed, &why);
        }
        let what = format!(
            "replaces lease {lease} of {lender}, so that its pages get a new key in place of the \
             present one: {why}"
        );
        self.log(what, self.about(held));
        self.step(Event::Replace { lease, room: room.min(bytes) });
    }

    /// Borrows for the pages of a lease that have second copies. The lease is replaced once the new
    /// one has copies, too.
    fn prepare_room(&mut self, held: &BorrowedStatus, borrowed: &[BorrowedStatus], why: &str) {
        let Some(Owner::Region(region)) = self.owner(held.volume) else { return };
        let (lease, bytes, volume) = (held.lease.lease, held.lease.bytes, held.volume);
        let of_volume = borrowed.iter().filter(|other| other.volume == volume);
        let others = of_volume.map(|other| other.lease.lease).collect();
        self.borrowing.keys.prepared = Some(Prepared { lease, others, since: self.now });
        // The next attempt is the second half of this one.
        self.borrowing.keys.rests_until = self.now;
        let what = format!(
            "borrows {bytes} for region {region}, to replace lease {lease} and its second copy: \
             its pages get a new key in place of the present one: {why}"
        );
        self.log(what, self.about(held));
        let mut volumes = self.controller.volumes().into_iter();
        let group = volumes.find(|known| known.volume == volume).map(|known| known.group);
        let group = group.unwrap_or_default();
        let request = RegionRequest { region, volume, bytes, least: bytes, group };
        self.step(Event::BorrowFor(request));
    }

    /// Gives back what a volume got for the pages of a lease, if it got no second copies in time.
    fn end_preparation(&mut self, borrowed: &[BorrowedStatus]) {
        let Some(late) = self.borrowing.keys.prepared.clone() else { return };
        let Some(held) = borrowed.iter().find(|held| held.lease.lease == late.lease) else {
            return;
        };
        let most = if self.copies_go_first(held.volume) { PREPARING * 2 } else { PREPARING };
        if held.leaving || !self.passed(most, late.since) {
            return;
        }
        self.borrowing.keys.prepared = None;
        self.borrowing.keys.rest(self.now);
        let what = format!(
            "keeps the key of lease {}: no lease with second copies was there to replace it in {}",
            late.lease,
            rounded(most)
        );
        self.log(what, self.about(held));
        let unused = borrowed.iter().filter(|other| {
            let is_known = late.others.contains(&other.lease.lease);
            other.volume == held.volume && other.copy_of.is_none() && !is_known
        });
        for other in unused {
            self.step(Event::GiveBack { lease: other.lease.lease });
        }
    }

    /// Returns what a decision about a lease concerns.
    fn about(&self, held: &BorrowedStatus) -> Vec<Subject> {
        let (lease, lender) = (held.lease.lease, held.lease.lender.clone());
        let mut about = vec![Subject::Host(lender), Subject::Lease(lease)];
        about.push(Subject::Volume(held.volume));
        if let Some(Owner::Region(region)) = self.owner(held.volume) {
            about.extend([Subject::Region(region.clone()), Subject::Vm(region)]);
        }
        about
    }

    /// Takes the order to replace the key of a lease, or of all.
    pub(super) fn order_rotation(&mut self, which: Option<LeaseId>, ticket: Ticket) {
        let chosen = match which {
            None => self.borrowing.keys.known.keys().copied().collect(),
            Some(lease) if self.borrowing.keys.known.contains_key(&lease) => {
                BTreeSet::from([lease])
            }
            Some(lease) => {
                let (error, help) = self.keyless(lease);
                return self.answer(ticket, failed(error, Some(help)));
            }
        };
        self.borrowing.keys.ordered.extend(&chosen);
        (self.borrowing.keys.failures, self.borrowing.keys.rests_until) = (0, self.now);
        self.answer(ticket, Answer::Rotates(chosen.into_iter().collect()));
    }

    /// Says why a lease has no key that can be replaced, and what helps.
    fn keyless(&self, lease: LeaseId) -> (String, &'static str) {
        let borrowed = self.controller.borrowed();
        match borrowed.iter().find(|held| held.lease.lease == lease) {
            None => {
                let help = "'aquifer status --json' lists the leases";
                (format!("this host holds no lease {lease}"), help)
            }
            Some(BorrowedStatus { copy_of: Some(of), .. }) => (
                format!("lease {lease} holds second copies, under the key of lease {of}"),
                "name that lease",
            ),
            Some(_) => (
                format!("lease {lease} has no key of its own"),
                "docs/explain/security.md tells which keys can be replaced",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_one_age_fall_due_at_different_times() {
        let lifetime = Duration::from_secs(30 * 86_400);
        let mut times: Vec<_> = (0..100).map(|id| early(lifetime, LeaseId(7_000 + id))).collect();
        times.sort();
        assert!(times.iter().all(|early| *early <= lifetime / SPREAD));
        let nearest = times.windows(2).map(|pair| pair[1] - pair[0]).min().expect("some");
        assert!(nearest > Duration::from_secs(60), "{nearest:?}");
    }

    #[test]
    fn failures_lengthen_the_pause_up_to_a_limit() {
        let mut keys = Keys::new(KeySettings::default());
        let mut waits = Vec::new();
        for _ in 0..10 {
            keys.try_next(LeaseId(1), Duration::ZERO);
            waits.push(keys.rests_until);
        }
        assert_eq!((waits[0], waits[1]), (PAUSE, PAUSE * 2));
        assert_eq!(waits[9], PAUSE * (1 << DOUBLINGS));
    }
}
