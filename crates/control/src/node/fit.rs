//! The check that the pages swapped to a volume fit into memory, before the volume leaves.

use std::collections::BTreeSet;

use aquifer_page::{Bytes, VolumeId};

use super::Node;
use crate::{Memory, VolumeState};

/// Share of memory that must stay free after all swapped-out pages return: programs allocate
/// meanwhile.
const KEPT_FREE: f64 = 0.02;

impl Node {
    /// Returns this volume and those that leave at the same time.
    pub fn leaving_with(&self, volume: VolumeId) -> BTreeSet<VolumeId> {
        let leaving = self.controller.volumes().into_iter();
        let leaving = leaving.filter(|other| other.state == VolumeState::Deactivating);
        leaving.map(|other| other.volume).chain([volume]).collect()
    }

    /// Checks that the pages swapped to a volume, and to the others that leave with it, fit into
    /// memory. The check must precede swapoff: in a cgroup the kernel would make room by killing
    /// programs. `back` is how much is swapped to them, less the free space of other volumes.
    ///
    /// # Errors
    /// Says what does not fit.
    pub fn fits_without(
        &self,
        volume: VolumeId,
        back: Bytes,
        memory: &Memory,
    ) -> Result<(), String> {
        // The volumes may hold pages of other cgroups, which have their own memory for them.
        let back = back.min(memory.swap_used);
        let free = memory.total.saturating_sub(memory.used);
        let keep = memory.total.scaled(KEPT_FREE);
        if back == Bytes::ZERO || back.saturating_add(keep) <= free {
            return Ok(());
        }
        Err(format!(
            "{back} is swapped out to {} and does not fit into memory: {free} of {} is free",
            match self.leaving_with(volume).len() {
                1 => format!("volume {volume}"),
                count => format!("the {count} volumes that are given back"),
            },
            memory.total
        ))
    }
}
