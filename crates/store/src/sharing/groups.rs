use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer_page::Group;

use super::frames::GroupFrames;
use crate::dir::{Dir, Entry};
use crate::ram::RamLock;
use crate::sys::Table;
use crate::{SharedUsage, StoreError};

/// The groups of a store that have leases that share.
#[derive(Debug)]
pub(crate) struct Groups {
    dir: Arc<Dir>,
    ram: Arc<RamLock>,
    all: Mutex<BTreeMap<Group, Members>>,
}

/// Who uses the frames of a group.
#[derive(Debug)]
pub(super) struct Members {
    pub(super) frames: Arc<GroupFrames>,
    /// How many leases are served.
    pub(super) leases: usize,
    /// The tables of those that are left alone. What they refer to stays.
    pub(super) left_alone: Vec<Table>,
}

impl Groups {
    pub(crate) fn new(dir: Arc<Dir>, ram: Arc<RamLock>) -> Self {
        Self { dir, ram, all: Mutex::default() }
    }

    /// The frames of a group, for one more lease of it. The first has them made.
    pub(crate) fn join(&self, group: &Group) -> Result<Arc<GroupFrames>, StoreError> {
        let mut all = self.locked();
        if let Some(members) = all.get_mut(group) {
            members.leases += 1;
            return Ok(Arc::clone(&members.frames));
        }
        let frames = Arc::new(self.create(group)?);
        all.insert(
            group.clone(),
            Members { frames: Arc::clone(&frames), leases: 1, left_alone: Vec::new() },
        );
        Ok(frames)
    }

    /// Makes the file for a group's frames.
    pub(super) fn create(&self, group: &Group) -> Result<GroupFrames, StoreError> {
        let entry = Entry::Frames(group.clone());
        let file = self.dir.create(&entry, 0)?;
        GroupFrames::new(file, Arc::clone(&self.ram))
            .map_err(StoreError::file("map", &self.dir.file(&entry)))
    }

    /// Takes over frames that were recovered.
    pub(super) fn adopt(&self, group: Group, members: Members) {
        self.locked().insert(group, members);
    }

    /// Has one lease less use the frames of a group. The last has them go.
    pub(crate) fn leave(&self, group: &Group) -> Result<(), StoreError> {
        let mut all = self.locked();
        let Some(members) = all.get_mut(group) else { return Ok(()) };
        if members.leases > 1 || !members.left_alone.is_empty() {
            members.leases -= 1;
            return Ok(());
        }
        self.dir.delete(&Entry::Frames(group.clone()))?;
        all.remove(group);
        Ok(())
    }

    /// What each group stores and takes.
    pub(crate) fn usage(&self) -> Vec<(Group, SharedUsage)> {
        self.locked()
            .iter()
            .map(|(group, members)| (group.clone(), members.frames.usage()))
            .collect()
    }

    pub(super) fn dir(&self) -> &Arc<Dir> {
        &self.dir
    }

    pub(super) fn ram(&self) -> &Arc<RamLock> {
        &self.ram
    }

    pub(super) fn locked(&self) -> MutexGuard<'_, BTreeMap<Group, Members>> {
        // Changed by single insertions, removals and assignments, so a panic elsewhere has left none half done.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
