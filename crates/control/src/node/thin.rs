//! Leases smaller than their region: what a region needs at lenders, and what it gives back.

use std::time::Duration;

use aquifer_page::{Bytes, Group, VolumeId};

use super::Node;
use super::caches::LEAST_LOAN;
use crate::ledger::{AutoCache, RegionMemory};
use crate::{BorrowedLease, BorrowedStatus, Event, Subject};

/// Time from the last change of caches or leases to the return of a lease.
const RETURN: Duration = Duration::from_secs(120);

impl Node {
    /// Returns whether a limit over several caches covers this one. Such a limit may take all of a
    /// cache but a little.
    fn is_limited(&self, region: &RegionMemory) -> bool {
        let covers = |group: &Option<Group>| group.as_ref().is_none_or(|it| *it == region.group);
        self.own.read.cache_limits.iter().any(|limit| covers(&limit.group))
    }

    pub(super) fn needs(&self, region: &RegionMemory, cache: Bytes) -> Bytes {
        if self.is_limited(region) { region.size } else { region.needs(cache) }
    }

    pub(super) fn wants(&self, region: &RegionMemory, cache: Bytes) -> Bytes {
        if self.is_limited(region) { region.size } else { region.wants(cache) }
    }

    pub(super) fn least_cache(&self, region: &RegionMemory, leased: Bytes) -> Bytes {
        match self.is_limited(region) && leased < region.size {
            true => region.size,
            false => region.least_cache(leased),
        }
    }

    /// Returns the bytes of the leases that this host holds for a volume.
    pub(super) fn held(&self, volume: VolumeId) -> Bytes {
        let is_of_it = |held: &BorrowedStatus| held.volume == volume && held.copy_of.is_none();
        let held = self.controller.borrowed().into_iter().filter(is_of_it);
        held.map(|held| held.lease.bytes).sum()
    }

    /// Returns what the region has at lenders, without the leases that it is about to leave.
    pub(super) fn keeps(&self, auto: AutoCache) -> Bytes {
        let borrowed = self.controller.borrowed().into_iter();
        let is_leaving = |held: &BorrowedStatus| {
            held.volume == auto.volume && held.copy_of.is_none() && held.leaving
        };
        let leaving = borrowed.filter(is_leaving);
        auto.leased.saturating_sub(leaving.map(|held| held.lease.bytes).sum())
    }

    /// Gives back a lease that a region does not want. A region keeps some more than it wants, as
    /// its cache may shrink again.
    pub(super) fn give_back_surplus(&mut self) {
        let since = *self.own.caches.leases_changed.get_or_insert(self.now);
        let since = self.own.caches.changed.map_or(since, |changed| changed.max(since));
        if !self.passed(RETURN, since) || self.is_busy() || self.own.caches.loan.is_some() {
            return;
        }
        let (stuck, away) = (self.controller.stuck(self.now), self.borrowing.watch.away());
        let surplus = self.autos().find_map(|(region, auto)| {
            let keeps = self.keeps(auto);
            let more = match region.cache < region.size {
                true => region.size.scaled(LEAST_LOAN),
                false => Bytes::ZERO,
            };
            let wants = self.wants(region, region.cache).saturating_add(more);
            let of_it =
                |held: &&BorrowedStatus| held.volume == auto.volume && held.copy_of.is_none();
            let borrowed = self.controller.borrowed();
            let settled = !stuck.contains_key(&auto.volume)
                && !self.rests(&region.name)
                && auto.leased == self.held(auto.volume)
                && borrowed.iter().filter(of_it).all(|held| !held.leaving);
            // A lease of a lender that is away cannot leave now.
            let answers = |held: &&BorrowedStatus| !away.contains(&held.lease.lender);
            let fits = |held: &&BorrowedStatus| wants.saturating_add(held.lease.bytes) <= keeps;
            let lease = borrowed
                .iter()
                .filter(of_it)
                .filter(answers)
                .filter(fits)
                .max_by_key(|held| held.lease.bytes);
            lease
                .filter(|_| settled)
                .map(|held| (region.name.clone(), held.lease.clone(), keeps, wants))
        });
        let Some((region, lease, keeps, wants)) = surplus else { return };
        let BorrowedLease { lease, lender, bytes, .. } = lease;
        self.own.caches.leases_changed = Some(self.now);
        self.log(
            format!(
                "gives lease {lease} of {bytes} back to {lender}: region {region} has {keeps} at \
                 lenders, and wants {wants}"
            ),
            vec![Subject::Region(region.clone()), Subject::Vm(region)],
        );
        self.step(Event::GiveBack { lease });
    }
}
