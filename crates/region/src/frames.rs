//! Pages that are kept once for several regions of a group.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use aquifer_page::{FrameIndex, PageIndex};
use aquifer_region_client::FileMap;

use crate::{effect, lock};

/// The frame of the group that each page of a region may be mapped from. The file outlives the
/// engine and holds 8 bytes a page: the frame's number plus one, or 0 for none.
///
/// If a page is not in the region's file and has a frame, that frame is its content. If a page is
/// in the file, the file's content counts, whatever its frame: a crash interrupted a share or an
/// unshare.
#[derive(Debug)]
pub(crate) struct Sharers {
    words: FileMap,
    /// Whether any frame was ever set. If not, the file is not read, as reading it would take
    /// memory.
    any: AtomicBool,
}

impl Sharers {
    /// Maps the file of a region of so many pages.
    pub(crate) fn new(file: &File, pages: u64) -> io::Result<Self> {
        let length = pages * size_of::<u64>() as u64;
        file.set_len(length)?;
        let any = rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0)).is_ok();
        Ok(Self { words: FileMap::new(file, length as usize)?, any: AtomicBool::new(any) })
    }

    /// Maps a file that another process changes.
    pub(crate) fn of_another(file: &File, pages: u64) -> io::Result<Self> {
        let this = Self::new(file, pages)?;
        this.any.store(true, Ordering::Relaxed);
        Ok(this)
    }

    pub(crate) fn get(&self, page: u64) -> Option<FrameIndex> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        self.words.words()[page as usize].load(Ordering::Acquire).checked_sub(1).map(FrameIndex)
    }

    pub(crate) fn set(&self, page: u64, frame: Option<FrameIndex>) {
        if frame.is_none() && !self.any.load(Ordering::Acquire) {
            return;
        }
        effect::at("sharer");
        self.any.store(true, Ordering::Release);
        self.words.words()[page as usize]
            .store(frame.map_or(0, |frame| frame.0 + 1), Ordering::Release);
    }

    /// Returns all pages that have a frame, with the frame.
    pub(crate) fn all(&self) -> impl Iterator<Item = (PageIndex, FrameIndex)> {
        let pages =
            if self.any.load(Ordering::Acquire) { self.words.words().len() as u64 } else { 0 };
        (0..pages).filter_map(|page| Some((PageIndex(page), self.get(page)?)))
    }
}

/// Returns the path of the lock file beside the frames. An engine locks it shared while it shares
/// pages. The scanner locks it exclusively while it frees unused frames.
pub(crate) fn giving(frames: &Path) -> PathBuf {
    frames.with_extension("giving")
}

/// The frames of the region's group, in a file that the scanner writes and engines read.
#[derive(Debug)]
pub(crate) struct Frames {
    path: PathBuf,
    file: Mutex<Option<Arc<File>>>,
}

impl Frames {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, file: Mutex::default() }
    }

    /// Opens the file, which exists once the group shares anything.
    pub(crate) fn file(&self) -> io::Result<Arc<File>> {
        let mut file = lock(&self.file);
        if let Some(file) = &*file {
            return Ok(file.clone());
        }
        let opened = Arc::new(OpenOptions::new().read(true).open(&self.path)?);
        Ok(file.insert(opened).clone())
    }

    /// Keeps all frames in use until the returned file is closed. A frame that is about to be
    /// shared is in no record yet.
    pub(crate) fn hold(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        let held = options
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(giving(&self.path))?;
        held.lock_shared()?;
        Ok(held)
    }

    pub(crate) fn read(&self, frame: FrameIndex, into: &mut [u8]) -> io::Result<()> {
        self.file()?.read_exact_at(into, frame.offset())
    }
}
