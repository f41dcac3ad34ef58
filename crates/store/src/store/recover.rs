//! Recovery of the leases that an earlier process left in the directory.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use aquifer_page::{Group, LeaseId};

use super::{Finding, Store, pages_of};
use crate::dir::Entry;
use crate::lease::Pages;
use crate::sharing::{Found, SharedPages};
use crate::sys::{LeasePages as _, PrivatePages, Table};
use crate::{Lease, LeaseRecord, StoreError};

impl Store {
    /// Recovers the leases of the earlier process, and deletes files of half-finished creations and
    /// removals.
    pub(super) fn recover(&mut self) -> Result<(), StoreError> {
        let files = self.dir.list()?;
        let mut tables: BTreeMap<Group, BTreeSet<LeaseId>> = BTreeMap::new();
        for entry in &files {
            match entry {
                Entry::Draft(_) => self.dir.delete(entry)?,
                Entry::Pages(id) | Entry::Table(id, _) if !files.contains(&Entry::Record(*id)) => {
                    self.dir.delete(entry)?;
                    self.findings.push(Finding::PagesWithoutRecord(*id));
                }
                Entry::Table(id, group) => _ = tables.entry(group.clone()).or_default().insert(*id),
                Entry::Pages(_) | Entry::Record(_) | Entry::Frames(_) => {}
            }
        }
        for (group, leases) in &tables {
            let has_frames = files.contains(&Entry::Frames(group.clone()));
            if let Err(error) = self.recover_group(group, leases, has_frames) {
                // New leases cannot share either, as the frames stay where they are.
                let why = error.to_string();
                let path = self.dir.file(&Entry::Frames(group.clone()));
                let unusable = |id: &LeaseId| {
                    let error = StoreError::file("recover", &path)(io::Error::other(why.clone()));
                    Finding::Unusable(*id, error)
                };
                self.findings.extend(leases.iter().map(unusable));
            }
        }
        for entry in &files {
            match entry {
                Entry::Frames(group) if !tables.contains_key(group) => {
                    self.dir.delete(entry)?;
                    self.findings.push(Finding::FramesWithoutLeases(group.clone()));
                }
                Entry::Record(id) if !tables.values().any(|leases| leases.contains(id)) => {
                    match self.recover_own(*id, &files) {
                        Ok(found) => self.findings.extend(found),
                        Err(error) => self.findings.push(Finding::Unusable(*id, error)),
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Recovers a lease that has no table.
    fn recover_own(&self, id: LeaseId, files: &[Entry]) -> Result<Option<Finding>, StoreError> {
        let record = LeaseRecord::load(&self.dir.file(&Entry::Record(id)))?;
        let entry = Entry::Pages(id);
        if record.shared || !files.contains(&entry) {
            self.dir.delete(&Entry::Record(id))?;
            return Ok(Some(Finding::RecordWithoutPages(Box::new(record))));
        }
        let (file, length) = self.dir.open(&entry)?;
        let path = self.dir.file(&entry);
        self.check_record(id, &record, &entry, record.capacity.0, length)?;
        let mut private = PrivatePages::map(file, record.capacity.pages() as usize)
            .map_err(StoreError::file("map", &path))?;
        self.ram.note(private.lock_in_ram());
        let stored = private.adopt_stored().map_err(StoreError::file("recover", &path))?;
        let lease =
            Lease::new(record, Pages::Private(Arc::new(private)), stored, Arc::clone(&self.dir));
        self.locked().insert(id, Arc::new(lease));
        Ok(None)
    }

    /// Recovers a group's sharing leases. Counts all references first, as a frame is free only if
    /// no table refers to it.
    fn recover_group(
        &mut self,
        group: &Group,
        leases: &BTreeSet<LeaseId>,
        has_frames: bool,
    ) -> Result<(), StoreError> {
        let mut recovery = self.groups.recover(group, has_frames)?;
        let mut served = Vec::new();
        let mut unusable = Vec::new();
        for &id in leases {
            let entry = Entry::Table(id, group.clone());
            let found = recovery.adopt(&entry)?;
            match self.check_shared(id, &entry, &found) {
                Ok(record) => served.push((record, found)),
                Err(error) => {
                    recovery.leave_alone(found.table);
                    unusable.push(Finding::Unusable(id, error));
                }
            }
        }
        let frames = self.groups.recovered(recovery, served.len())?;
        for (record, Found { table, stored, .. }) in served {
            let (id, pages) = (record.id, SharedPages::new(table, Arc::clone(&frames)));
            let lease = Lease::new(record, Pages::Shared(pages), stored, Arc::clone(&self.dir));
            self.locked().insert(id, Arc::new(lease));
        }
        self.findings.extend(unusable);
        Ok(())
    }

    /// Returns the record of a sharing lease if the lease can be served.
    fn check_shared(
        &self,
        id: LeaseId,
        entry: &Entry,
        found: &Found,
    ) -> Result<LeaseRecord, StoreError> {
        let record = LeaseRecord::load(&self.dir.file(&Entry::Record(id)))?;
        let pages = record.capacity.pages() as usize;
        let (expected, length) =
            (Table::file_length(pages), Table::file_length(found.table.pages()));
        self.check_record(id, &record, entry, expected, length)?;
        match found.lost {
            None => Ok(record),
            Some(page) => {
                let why = format!("page {page} is lost: its frame no longer exists");
                Err(StoreError::file("use", &self.dir.file(entry))(io::Error::other(why)))
            }
        }
    }

    /// Checks that a record belongs to a file of this length.
    fn check_record(
        &self,
        id: LeaseId,
        record: &LeaseRecord,
        entry: &Entry,
        expected: u64,
        length: u64,
    ) -> Result<(), StoreError> {
        if record.id == id && pages_of(record) == *entry && expected == length && length > 0 {
            return Ok(());
        }
        let sharing = if record.shared { "that shares" } else { "that does not share" };
        let why = format!(
            "its record names lease {} of group {} with {} {sharing}, and the file has {length} \
             bytes",
            record.id, record.group, record.capacity
        );
        Err(StoreError::file("use", &self.dir.file(entry))(io::Error::other(why)))
    }
}
