//! Second copies of leases: which lease gets one next, and what becomes of leases whose
//! lender is gone.
//!
//! One lease at a time gets its copy. If a lender is silent for [`GONE`], the pages that it has
//! alone can only wait for it. Those with a second copy elsewhere move to other leases, which then
//! get second copies, too.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_page::{Bytes, HostName, LeaseId, Zone};

use super::offers::Waiting;
use super::{CopyReading, Health, Node, VolumeReading};
use crate::{BorrowedStatus, Event, Offer, Protection};

/// The silence after which a lender is taken for gone. One that starts again is back before.
const GONE: Duration = Duration::from_secs(15);

/// The time from one attempt to protect a lease, or to leave it, to the next.
const RETRY: Duration = Duration::from_secs(30);

/// What the node remembers of second copies.
#[derive(Clone, Debug, Default)]
pub(super) struct Copies {
    /// What the last look found of leases.
    seen: BTreeMap<LeaseId, Seen>,
    /// Since when the lender of a lease is silent.
    silent: BTreeMap<LeaseId, Duration>,
    /// When this host last tried to protect a lease, or to leave it.
    tried: BTreeMap<LeaseId, Duration>,
    /// The zones of hosts, as far as they have told.
    zones: BTreeMap<HostName, Zone>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    is_ok: bool,
    takes_copies: bool,
    copy: Option<CopyReading>,
}

impl Node {
    /// Notes which leases and copies answer.
    pub(super) fn see_copies(&mut self, volumes: &[VolumeReading]) {
        let (now, lost) = (self.now, &self.borrowing.lost);
        let copies = &mut self.borrowing.copies;
        copies.seen.clear();
        let mut silent = BTreeMap::new();
        let begun: BTreeMap<_, _> = self
            .controller
            .borrowed()
            .into_iter()
            .filter_map(|held| Some((held.copy_of?, held.lease.lease)))
            .collect();
        let held = volumes
            .iter()
            .flat_map(|volume| volume.leases.iter().map(|held| (volume.takes_copies, held)));
        for (takes_copies, held) in held {
            let is_ok = held.health == Health::Ok && !lost.contains(&held.lease);
            copies.seen.insert(held.lease, Seen { is_ok, takes_copies, copy: held.copy });
            let answers = held.copy.map_or(is_ok, |copy| copy.first_answers && is_ok);
            // The engine may not use a lease that holds copies by this host's book.
            let copy = held.copy.map(|it| (it.lease, it.answers));
            let unused =
                begun.get(&held.lease).filter(|lease| Some(**lease) != copy.map(|it| it.0));
            let unused = unused.map(|lease| (*lease, false));
            let both = [Some((held.lease, answers)), copy, unused];
            let both = both.into_iter().flatten();
            for (lease, _) in both.filter(|(lease, answers)| !answers || lost.contains(lease)) {
                let since = copies.silent.get(&lease).copied().unwrap_or(now);
                silent.insert(lease, since);
            }
        }
        copies.silent = silent;
    }

    /// Remembers the zones of hosts.
    pub(super) fn note_zones(&mut self, offers: &[Offer]) {
        let zone = |offer: &Offer| Some((offer.host.clone(), offer.zone.clone()?));
        self.borrowing.copies.zones.extend(offers.iter().filter_map(zone));
    }

    /// Asks for a second copy of a lease, apart from the zone of its lender.
    pub(super) fn protect(&mut self, lease: LeaseId) {
        let borrowed = self.controller.borrowed();
        let held = borrowed.iter().find(|held| held.lease.lease == lease);
        let Some(lender) = held.map(|held| held.lease.lender.clone()) else { return };
        let zones = &self.borrowing.copies.zones;
        let near = zones.get(&lender).map(|zone| {
            let is_near = |(_, other): &(&HostName, &Zone)| *other == zone;
            zones.iter().filter(is_near).map(|(host, _)| host.clone()).collect()
        });
        self.step(Event::Protect { lease, near: near.unwrap_or_default() });
    }

    /// Takes the next step for second copies: leaves what a lender that is gone had, or protects a
    /// lease.
    pub(super) fn keep_copies(&mut self) {
        let protection = self.controller.facts().config.protection.clone();
        let copies = &self.borrowing.copies;
        let is_calm =
            !protection.has_copies() && copies.silent.is_empty() && copies.tried.is_empty();
        if (is_calm && !self.controller.has_copies())
            || self.belonging.has_left
            || self.controller.is_asking()
        {
            return;
        }
        let borrowed = self.controller.borrowed();
        let held: BTreeSet<_> = borrowed.iter().map(|held| held.lease.lease).collect();
        self.borrowing.copies.tried.retain(|lease, _| held.contains(lease));
        let copied: BTreeSet<_> = borrowed.iter().filter_map(|held| held.copy_of).collect();
        let volumes = self.controller.volumes().into_iter();
        let wanting =
            volumes.filter(|one| protection.of(&one.owner, &one.group) != Protection::None);
        let wanting: BTreeSet<_> = wanting.map(|volume| volume.volume).collect();
        let rests = |lease: LeaseId| {
            let tried = self.borrowing.copies.tried.get(&lease);
            tried.is_some_and(|at| !self.passed(RETRY, *at))
        };
        // If a lease got no copy lately, no other one asks the peers again so soon.
        let has_failed = borrowed.iter().any(|held| {
            let lease = held.lease.lease;
            let lacks_one = held.copy_of.is_none() && !copied.contains(&lease);
            lacks_one && wanting.contains(&held.volume) && rests(lease)
        });
        let next = borrowed.iter().filter_map(|held| {
            let lease = held.lease.lease;
            let wants_copies = wanting.contains(&held.volume);
            let step = self.repair(held, wants_copies).or_else(|| {
                let lacks_one = wants_copies && held.copy_of.is_none() && !copied.contains(&lease);
                (lacks_one && !has_failed && self.may_copy(lease)).then_some(Next::Protect)
            })?;
            let may_try = !held.leaving && !rests(lease) && self.is_idle(held.volume);
            may_try.then_some((lease, held.lease.bytes, step))
        });
        // Each lease has its turn, even if others get no copy.
        let tried = |lease: &LeaseId| self.borrowing.copies.tried.get(lease).copied();
        let Some((lease, bytes, step)) = next.min_by_key(|(lease, ..)| tried(lease)) else {
            return;
        };
        self.borrowing.copies.tried.insert(lease, self.now);
        match step {
            Next::Leave => self.with_offers(Waiting::Abandon(lease, bytes)),
            Next::EndCopy => self.step(Event::GiveBack { lease }),
            Next::Protect => self.with_offers(Waiting::Protect(lease, bytes)),
        }
    }

    /// Returns what to do about a lease if its lender is gone, or if it holds copies in vain.
    fn repair(&self, held: &BorrowedStatus, wants_copies: bool) -> Option<Next> {
        let copies = &self.borrowing.copies;
        let lease = held.lease.lease;
        let is_gone = copies.silent.get(&lease).is_some_and(|since| self.passed(GONE, *since));
        let seen = copies.seen.get(&held.copy_of.unwrap_or(lease))?;
        let copy = seen.copy;
        match held.copy_of {
            None => {
                let has_all = copy.is_some_and(|copy| copy.answers && copy.lacks == Bytes::ZERO);
                (is_gone && has_all).then_some(Next::Leave)
            }
            Some(_) if is_gone || !wants_copies => {
                let copy = copy.filter(|copy| copy.lease == lease);
                let is_needed = |copy: CopyReading| {
                    !copy.first_answers || !seen.is_ok || copy.first_lacks > Bytes::ZERO
                };
                (!copy.is_some_and(is_needed)).then_some(Next::EndCopy)
            }
            Some(_) => None,
        }
    }

    /// Returns whether a lease answers with all of its pages, and so does the lease with their
    /// second copies, if there is one. Copies that go first, and those on the disk, may lag behind.
    pub(super) fn is_whole(&self, lease: LeaseId) -> bool {
        let Some(seen) = self.borrowing.copies.seen.get(&lease) else { return false };
        let borrowed = self.controller.borrowed();
        let second = borrowed.iter().find(|held| held.copy_of == Some(lease));
        let may_lag = second.is_none_or(|held| self.copies_go_first(held.volume));
        let second = second.map(|held| held.lease.lease);
        let is_seen = |second: LeaseId| seen.copy.is_some_and(|copy| copy.lease == second);
        let is_whole = |copy: CopyReading| {
            copy.first_answers
                && copy.answers
                && copy.first_lacks == Bytes::ZERO
                && (may_lag || copy.lacks == Bytes::ZERO)
        };
        seen.is_ok && second.is_none_or(is_seen) && seen.copy.is_none_or(is_whole)
    }

    /// Returns whether a lease answers, so that its pages can be copied.
    fn may_copy(&self, lease: LeaseId) -> bool {
        let seen = self.borrowing.copies.seen.get(&lease);
        seen.is_some_and(|seen| seen.is_ok && seen.takes_copies && seen.copy.is_none())
    }
}

/// What a lease needs.
enum Next {
    /// Its pages move elsewhere.
    Leave,
    /// It holds copies, and goes back.
    EndCopy,
    /// It needs second copies.
    Protect,
}
