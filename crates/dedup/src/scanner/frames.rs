//! The file of the pages that a group's regions share on a host.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::PathBuf;

use aquifer_page::{FrameIndex, Group, PAGE_SIZE};
use aquifer_region::process::GroupFiles;
use rustix::fs::{FallocateFlags, fallocate};

use crate::{ScanError, failed};

/// Frames by which the file grows; a frame takes no memory before it is used.
const STEP: u64 = 1 << 16;

/// The file of frames, locked against other writers.
#[derive(Debug)]
pub(super) struct Frames {
    file: File,
    path: PathBuf,
    giving: File,
    /// Whether each frame is in use.
    used: Vec<bool>,
    /// Frames that were used and are free.
    free: Vec<FrameIndex>,
    /// No frame from this one on was ever used.
    next: u64,
}

impl Frames {
    /// Opens the file; the frames in `shared` are in use.
    pub(super) fn open(
        files: &GroupFiles,
        group: &Group,
        shared: impl Iterator<Item = FrameIndex>,
    ) -> Result<Self, ScanError> {
        let (directory, path) = (files.directory(), files.frames());
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(failed("making", directory))?;
        let mut options = OpenOptions::new();
        let file =
            options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.map_err(failed("opening", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(ScanError::Busy(group.clone())),
            Err(TryLockError::Error(error)) => return Err(failed("locking", &path)(error)),
        }
        let pages = file.metadata().map_err(failed("examining", &path))?.len() / PAGE_SIZE as u64;
        let mut options = OpenOptions::new();
        let giving =
            options.write(true).create(true).truncate(false).mode(0o600).open(files.giving());
        let giving = giving.map_err(failed("opening", &files.giving()))?;
        let mut this = Self {
            file,
            path,
            giving,
            used: vec![true; pages as usize],
            free: Vec::new(),
            next: pages,
        };
        this.give_back_all_but(shared)?;
        this.next = this.used().last().map_or(0, |last| last.0 + 1);
        this.free.retain(|frame| frame.0 < this.next);
        Ok(this)
    }

    /// Returns whether the file was removed, which happens with the group's last region.
    pub(super) fn is_gone(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| metadata.nlink() == 0)
    }

    pub(super) fn used(&self) -> impl Iterator<Item = FrameIndex> {
        (0..).zip(&self.used).filter(|(_, used)| **used).map(|(frame, _)| FrameIndex(frame))
    }

    pub(super) fn read(&self, frame: FrameIndex, into: &mut [u8]) -> Result<(), ScanError> {
        self.file.read_exact_at(into, frame.offset()).map_err(failed("reading", &self.path))
    }

    /// Writes a page into a free frame. New frames are consecutive, because pages found one after
    /// the other are then mapped together.
    pub(super) fn put(&mut self, page: &[u8]) -> Result<FrameIndex, ScanError> {
        let is_full = self.next == self.used.len() as u64;
        let frame = match self.free.pop() {
            Some(frame) if is_full && self.free.len() as u64 >= self.next / 2 => frame,
            other => {
                self.free.extend(other);
                self.next += 1;
                FrameIndex(self.next - 1)
            }
        };
        if frame.0 >= self.used.len() as u64 {
            self.used.resize((frame.0 + STEP) as usize, false);
            let length = self.used.len() as u64 * PAGE_SIZE as u64;
            self.file.set_len(length).map_err(failed("growing", &self.path))?;
        }
        self.file.write_all_at(page, frame.offset()).map_err(failed("writing", &self.path))?;
        self.used[frame.0 as usize] = true;
        Ok(frame)
    }

    /// Frees the memory of all frames but `shared`; returns those that were in use. The lock keeps
    /// engines from sharing pages meanwhile: one may still act on proposals of an earlier scanner.
    pub(super) fn give_back_all_but(
        &mut self,
        shared: impl Iterator<Item = FrameIndex>,
    ) -> Result<Vec<FrameIndex>, ScanError> {
        self.giving.lock().map_err(failed("locking", &self.path))?;
        let gone = self.give_back(shared);
        self.giving.unlock().map_err(failed("unlocking", &self.path))?;
        gone
    }

    fn give_back(
        &mut self,
        shared: impl Iterator<Item = FrameIndex>,
    ) -> Result<Vec<FrameIndex>, ScanError> {
        let mut still = vec![false; self.used.len()];
        for frame in shared {
            if let Some(still) = still.get_mut(frame.0 as usize) {
                *still = true;
            }
        }
        let gone: Vec<_> = self.used().filter(|frame| !still[frame.0 as usize]).collect();
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for frame in &gone {
            let punched = fallocate(&self.file, flags, frame.offset(), PAGE_SIZE as u64);
            punched.map_err(|error| failed("punching a hole in", &self.path)(error.into()))?;
        }
        self.free.retain(|frame| !still[frame.0 as usize]);
        self.free.extend(&gone);
        self.used = still;
        Ok(gone)
    }
}
