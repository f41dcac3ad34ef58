//! Leases that come and go, and engines that die meanwhile.

use std::rc::Rc;
use std::sync::Arc;

use aquifer_page::LeaseId;

use super::super::Engine;
use super::world::{Host, World, expect, wrong};
use crate::effect;

impl World {
    /// Adds a lease, or evacuates one.
    pub(super) fn change_leases(&self) {
        let (lease, host) = (LeaseId(u128::from(1 + self.below(3))), self.host());
        let (has, count) = (host.leases.borrow().contains(&lease), host.leases.borrow().len());
        match has {
            false => self.add_lease(lease),
            true if count > 1 => self.evacuate(lease, self.one_in(2)),
            true => {}
        }
    }

    /// Adds a lease as the region's process does: to the record, and then to the volume.
    pub(super) fn add_lease(&self, lease: LeaseId) {
        let host = self.host();
        self.lender.renew(lease);
        self.suspects.borrow_mut().remove(&lease);
        let added = self.run(&host, format_args!("add lease {lease}"), |engine| {
            effect::at("record");
            host.leases.borrow_mut().insert(lease);
            effect::at("lease");
            self.join(engine.volume(), &host, lease);
        });
        if added.is_none() {
            self.restart(&host);
        }
    }

    /// Evacuates a lease. If the engine dies, the operator repeats the request if `again` says so.
    pub(super) fn evacuate(&self, lease: LeaseId, again: bool) {
        let host = self.host();
        loop {
            let is_cache_whole = self.limit.get() >= self.shape.pages;
            // One of two lenders may have been dead when pages were discarded.
            let copy = host.copies.borrow().get(&lease).copied();
            let had_copy = copy.is_some();
            // Then a page whose write was interrupted is not known there until its next write.
            let mut pair = copy.into_iter().chain([lease]);
            let is_halved = had_copy && pair.any(|lease| self.lender.away(lease).is_some());
            let has_room = host.leases.borrow().len() > 1 || is_cache_whole;
            let done = self.run(&host, format_args!("evacuate lease {lease}"), |engine| {
                // A thread that used a moving extent would wait for this one.
                self.schedule.playing.set(true);
                let done = engine.evacuate(lease, |_| ());
                if done.is_ok() {
                    effect::at("record");
                    host.leases.borrow_mut().remove(&lease);
                    host.copies.borrow_mut().remove(&lease);
                }
                done
            });
            match done {
                Some(Err(error)) if has_room && !is_halved => {
                    wrong(format_args!("evacuate: {error}"))
                }
                Some(Err(_)) => return,
                Some(Ok(())) if !had_copy && self.lender.count(lease) > 0 => {
                    wrong(format_args!("lease {lease} was given up with pages"))
                }
                Some(Ok(())) => return,
                None => self.restart(&host),
            }
            if !again {
                return;
            }
        }
    }

    /// Changes the limit of the cache.
    pub(super) fn limit(&self, frames: u64) {
        self.limit.set(frames);
        crate::lock(&self.host().engine().cache).limit = frames;
    }

    /// Gives the destination of a hand-over the leases that the source has on record.
    pub(super) fn take_leases(&self, host: &Rc<Host>, engine: &Arc<Engine>) {
        let leases = self.host().leases.borrow().clone();
        effect::at("record");
        host.leases.borrow_mut().clone_from(&leases);
        let volume = engine.volume();
        let has: Vec<_> = volume.targets().into_iter().map(|target| target.lease).collect();
        leases
            .iter()
            .filter(|lease| !has.contains(lease))
            .for_each(|lease| self.join(volume, host, *lease));
        for lease in has.into_iter().filter(|lease| !leases.contains(lease)) {
            expect("give up an empty lease", volume.remove_unused(lease));
        }
        volume.distrust_unused();
    }
}
