//! Recovery of a group: the tables say which frames are in use. Reference counts, index and free
//! frames follow from that.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_page::{Group, lock};

use super::batch::BATCH;
use super::frames::GroupFrames;
use super::free::FIRST;
use super::groups::{Groups, Members};
use crate::StoreError;
use crate::dir::{Dir, Entry};
use crate::span::runs;
use crate::sys::{FrameFile, LOST, Table};

/// A group whose tables are being read.
#[derive(Debug)]
pub(crate) struct Recovery<'a> {
    dir: &'a Dir,
    group: Group,
    frames: GroupFrames,
    /// For each frame of the file, whether it has RAM.
    stored: Vec<bool>,
    left_alone: Vec<Table>,
}

/// A table as the open finds it.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) table: Table,
    /// Number of stored pages.
    pub(crate) stored: usize,
    /// The first lost page: the table refers to a frame that has no RAM.
    pub(crate) lost: Option<usize>,
}

impl Groups {
    /// Begins the recovery of a group with its frames; makes an empty file if it has none.
    pub(crate) fn recover(
        &self,
        group: &Group,
        has_frames: bool,
    ) -> Result<Recovery<'_>, StoreError> {
        let entry = Entry::Frames(group.clone());
        let frames = if has_frames {
            let (file, _) = self.dir().open(&entry)?;
            GroupFrames::new(file, Arc::clone(self.ram()))
                .map_err(StoreError::file("map", &self.dir().file(&entry)))?
        } else {
            self.create(group)?
        };
        let stored =
            frames.adopt_file().map_err(StoreError::file("recover", &self.dir().file(&entry)))?;
        Ok(Recovery {
            dir: self.dir(),
            group: group.clone(),
            frames,
            stored,
            left_alone: Vec::new(),
        })
    }

    /// Ends the recovery of a group of which `leases` leases are served.
    pub(crate) fn recovered(
        &self,
        recovery: Recovery<'_>,
        leases: usize,
    ) -> Result<Arc<GroupFrames>, StoreError> {
        let Recovery { dir, group, frames, stored, left_alone } = recovery;
        let path = dir.file(&Entry::Frames(group.clone()));
        frames.adopt_references(&stored).map_err(StoreError::file("recover", &path))?;
        let frames = Arc::new(frames);
        self.adopt(group, Members { frames: Arc::clone(&frames), leases, left_alone });
        Ok(frames)
    }
}

impl Recovery<'_> {
    /// Counts the references of one of the group's tables.
    ///
    /// Replaces an entry that refers to a missing frame by [`LOST`]. Otherwise the entry would
    /// refer to whatever a later write puts into that frame.
    pub(crate) fn adopt(&mut self, entry: &Entry) -> Result<Found, StoreError> {
        let (file, length) = self.dir.open(entry)?;
        let path = self.dir.file(entry);
        let mut table = Table::map(file, length as usize / size_of::<u32>())
            .map_err(StoreError::file("map", &path))?;
        let mut lost = None;
        let keep = |page, frame: u32| {
            if self.stored.get(frame as usize) == Some(&true) {
                self.frames.adopt_reference(frame);
                return frame;
            }
            lost = lost.or(Some(page));
            LOST
        };
        let stored = table.adopt(keep).map_err(StoreError::file("recover", &path))?;
        self.frames.ram.note(table.lock_in_ram());
        Ok(Found { table, stored, lost })
    }

    /// Keeps the frames to which the table of an unserved lease refers.
    pub(crate) fn leave_alone(&mut self, table: Table) {
        self.left_alone.push(table);
    }
}

impl GroupFrames {
    /// Makes address space for the whole file. Returns for each of its frames whether it has RAM.
    fn adopt_file(&self) -> io::Result<Vec<bool>> {
        let (runs, frames) = self.file.stored()?;
        let mut stored = vec![false; frames.min(LOST as usize)];
        for run in runs {
            stored[run].fill(true);
        }
        // The first frames are never used, even if the file has RAM there.
        stored.iter_mut().take(FIRST as usize).for_each(|stored| *stored = false);
        let mut at = 1;
        while at < stored.len() {
            self.reach(at as u32)?;
            at *= 2;
        }
        Ok(stored)
    }

    fn adopt_reference(&self, frame: u32) {
        self.file.meta(frame).references.fetch_add(1, Ordering::Relaxed);
        self.counters.references.add(1);
    }

    /// Builds the index of the frames in use, and frees all others.
    fn adopt_references(&self, stored: &[bool]) -> io::Result<()> {
        let end = stored.iter().rposition(|&stored| stored).map_or(FIRST as usize, |last| last + 1);
        let end = end.next_multiple_of(BATCH);
        self.fresh.store(end as u64, Ordering::Relaxed);
        let kind =
            |frame: usize| (self.references(frame as u32) > 0, FrameFile::extent_of(frame as u32));
        for (run, (used, _)) in runs(FIRST as usize..end, kind) {
            let frames = run.start as u32..run.end as u32;
            if used {
                self.file.keep(frames.clone())?;
                self.counters.populated.add(run.len());
                self.counters.frames.add(run.len());
                frames.for_each(|frame| self.adopt_frame(frame));
            } else {
                self.file.punch(frames.clone())?;
                for frame in frames {
                    let home = &self.shards[frame as usize / BATCH % self.shards.len()];
                    lock(home).put_cold(&self.file, frame);
                }
            }
        }
        Ok(())
    }

    fn adopt_frame(&self, frame: u32) {
        if self.references(frame) > 1 {
            self.counters.shared.add(1);
        }
        let fingerprint = self.key.fingerprint(self.page(frame));
        self.file.meta(frame).fingerprint.store(fingerprint, Ordering::Relaxed);
        let mut shard = lock(self.shard_of(fingerprint));
        if shard.find(&self.file, fingerprint).is_none() {
            shard.insert(&self.file, frame);
        }
    }

    /// Returns how many pages refer to a frame. Acquire: the reads of a thread that gave up a
    /// reference happen before, see [`release`](Self::release).
    pub(super) fn references(&self, frame: u32) -> u32 {
        self.file.meta(frame).references.load(Ordering::Acquire)
    }
}
