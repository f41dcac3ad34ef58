//! Regions with pages in a spill file: this host borrows for them, and their engines move the pages
//! to the new leases.
//!
//! A region spills when a lender wants its lease back, no other host has room, and the region's
//! cache cannot take the pages.

use std::time::Duration;

use aquifer_page::{Bytes, EXTENT_SIZE, RegionName, VolumeId};

use super::Node;
use crate::ledger::{RegionMemory, Spilled};
use crate::{RegionRequest, Subject};

/// The shortest time between two requests for one region. An engine moves pages at its leisure, so
/// the file is not empty at once when a lease has come.
const RETRY: Duration = Duration::from_secs(60);

impl Node {
    /// Borrows for the spilled pages of a region.
    pub(super) fn return_spilled(&mut self) {
        if self.is_busy() {
            return;
        }
        let regions = self.own.read.regions.iter();
        let wanted: Vec<_> = regions.filter_map(|region| self.wants_back(region)).collect();
        let asked = |(region, ..): &(&RegionMemory, VolumeId, Bytes)| {
            self.own.caches.spill_asked.get(&region.name).copied()
        };
        let next = wanted.into_iter().min_by_key(asked);
        let Some((region, volume, bytes)) = next else { return };
        let (name, group) = (region.name.clone(), region.group.clone());
        self.log(
            format!("borrows {bytes} for region {name}: so much of it is in its spill file"),
            about(&name),
        );
        self.own.caches.spill_asked.insert(name.clone(), self.now);
        let least = Bytes(EXTENT_SIZE);
        self.ask_for_loan(RegionRequest { region: name, volume, bytes, least, group }, true);
    }

    /// Returns how much to borrow for this region's spilled pages, and its volume.
    fn wants_back<'a>(
        &self,
        region: &'a RegionMemory,
    ) -> Option<(&'a RegionMemory, VolumeId, Bytes)> {
        let Spilled { volume, bytes } = region.spilled?;
        let asked = self.own.caches.spill_asked.get(&region.name);
        let waits = asked.is_some_and(|at| !self.passed(RETRY, *at));
        let leaves = self.controller.stuck(self.now).contains_key(&volume);
        let lacks = region.size.round_up_to_extents().saturating_sub(self.held(volume));
        let bytes = bytes.min(lacks);
        (!waits && !leaves && bytes > Bytes::ZERO).then_some((region, volume, bytes))
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
