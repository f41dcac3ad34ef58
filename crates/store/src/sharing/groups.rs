//! The groups of a store whose leases share.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use aquifer_page::{Group, lock};

use super::frames::GroupFrames;
use crate::dir::{Dir, Entry};
use crate::ram::RamLock;
use crate::sys::Table;
use crate::{SharedUsage, StoreError};

/// The groups of a store that have sharing leases.
#[derive(Debug)]
pub(crate) struct Groups {
    dir: Arc<Dir>,
    ram: Arc<RamLock>,
    all: Mutex<BTreeMap<Group, Members>>,
}

/// The frames of a group and their users.
#[derive(Debug)]
pub(super) struct Members {
    pub(super) frames: Arc<GroupFrames>,
    /// Number of served leases.
    pub(super) leases: usize,
    /// The tables of leases that cannot be served. The frames to which they refer stay.
    pub(super) left_alone: Vec<Table>,
}

impl Groups {
    pub(crate) fn new(dir: Arc<Dir>, ram: Arc<RamLock>) -> Self {
        Self { dir, ram, all: Mutex::default() }
    }

    /// Returns the frames of a group, for one more lease of it; makes them for the first.
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

    /// Takes over recovered frames.
    pub(super) fn adopt(&self, group: Group, members: Members) {
        self.locked().insert(group, members);
    }

    /// Counts one lease of a group less; deletes the frames with the last one.
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

    /// Returns how much each group stores and takes.
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
        // Each change is a single insertion, removal or assignment, so a panic in another thread
        // leaves none half done.
        lock(&self.all)
    }
}
