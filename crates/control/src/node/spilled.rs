//! Regions with pages in a spill file: this host borrows for them, and their engines move the pages
//! to the new leases. Or their caches have grown to the regions' sizes, and the pages come home.
//!
//! Pages go there when a lender wants its lease back, no other host has room, and the region's
//! cache cannot take them. So do pages that leave the cache of such a region and find no lease.

use std::time::Duration;

use aquifer_page::{Bytes, RegionName};

use super::Node;
use super::caches::LEAST_LOAN;
use crate::ledger::{RegionMemory, Spilled};
use crate::{RegionRequest, Subject};

/// The time from one request for a region to the next.
const RETRY: Duration = Duration::from_secs(60);

impl Node {
    /// Lets the spilled pages of a region come home, or borrows for them.
    pub(super) fn return_spilled(&mut self) {
        if self.own.caches.loan.is_some() || self.is_busy() {
            return;
        }
        let regions = &self.own.read.regions;
        let asked = &mut self.own.caches.spill_asked;
        asked.retain(|name, _| regions.iter().any(|region| region.name == *name));
        let all = self.own.read.regions.iter().filter(|region| self.has_spilled(region));
        let last = |region: &&RegionMemory| {
            self.own.caches.spill_asked.get(&region.name).map(|(at, _)| *at)
        };
        let Some(region) = all.min_by_key(last).cloned() else { return };
        let Some(Spilled { volume, bytes, .. }) = region.spilled else { return };
        let homeless = self.homeless(&region);
        let RegionMemory { name, group, size, .. } = region;
        let before = self.own.caches.spill_asked.insert(name.clone(), (self.now, bytes));
        if region.auto.is_some() && region.cache >= size {
            self.log(format!("brings {bytes} of region {name} back from its file"), about(&name));
            return self.change(name, size);
        }
        // Not each minute, as long as nobody lends.
        if before.is_none_or(|(_, before)| before != bytes) {
            let what = format!("borrows {homeless} for region {name}, which are in its spill file");
            self.log(what, about(&name));
        }
        let least = homeless.min(size.scaled(LEAST_LOAN));
        let request = RegionRequest { region: name, volume, bytes: homeless, least, group };
        self.ask_for_loan(request, true);
    }

    /// Returns whether there is something to do now for the spilled pages of this region.
    fn has_spilled(&self, region: &RegionMemory) -> bool {
        let Some(Spilled { volume, bytes, .. }) = region.spilled else { return false };
        let asked = self.own.caches.spill_asked.get(&region.name);
        let waits = asked.is_some_and(|(at, _)| !self.passed(RETRY, *at));
        let comes_home = region.auto.is_some() && region.cache >= region.size;
        let leaves = self.controller.stuck(self.now).contains_key(&volume);
        bytes > Bytes::ZERO
            && !waits
            && !leaves
            && (comes_home || self.homeless(region) > Bytes::ZERO)
    }

    /// Returns how much to borrow for the spilled pages of this region. With its leases, it never
    /// has more than its size.
    fn homeless(&self, region: &RegionMemory) -> Bytes {
        let Some(Spilled { volume, homeless, .. }) = region.spilled else { return Bytes::ZERO };
        homeless.min(region.size.round_up_to_extents().saturating_sub(self.held(volume)))
    }

    /// Notes that nobody lends for the spilled pages of a region.
    pub(super) fn keep_spilled(&mut self, region: RegionName, why: &str) {
        let what = format!(
            "the spilled pages of region {region} stay in its file, tries again in {} s: {why}",
            RETRY.as_secs()
        );
        self.log(what, about(&region));
    }
}

fn about(region: &RegionName) -> Vec<Subject> {
    vec![Subject::Region(region.clone()), Subject::Vm(region.clone())]
}
