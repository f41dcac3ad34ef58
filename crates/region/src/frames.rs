//! Pages that are kept once for several regions of a group.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use aquifer_mapping::FileMap;
use aquifer_page::PAGE_SIZE;

use crate::{effect, lock};

/// Which frame of the group each page of a region is mapped from, or may be: 8 bytes a page, the frame's number and one, or 0; in a file that
/// outlives the engine.
///
/// A page that is not in the region's file and has a frame is that frame. One that is in the file is what is there, whatever its frame: it was
/// about to be shared, or to be shared no more.
#[derive(Debug)]
pub(crate) struct Sharers {
    words: FileMap,
    /// Whether any was ever set. What was not is not looked at: that alone would take memory.
    any: AtomicBool,
}

impl Sharers {
    /// That of a region of so many pages.
    pub(crate) fn new(file: &File, pages: u64) -> io::Result<Self> {
        let length = pages * size_of::<u64>() as u64;
        file.set_len(length)?;
        let any = rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0)).is_ok();
        Ok(Self { words: FileMap::new(file, length as usize)?, any: AtomicBool::new(any) })
    }

    /// The same for who only reads what another process sets.
    pub(crate) fn of_another(file: &File, pages: u64) -> io::Result<Self> {
        let this = Self::new(file, pages)?;
        this.any.store(true, Ordering::Relaxed);
        Ok(this)
    }

    pub(crate) fn get(&self, page: u64) -> Option<u64> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        self.words.words()[page as usize].load(Ordering::Acquire).checked_sub(1)
    }

    pub(crate) fn set(&self, page: u64, frame: Option<u64>) {
        if frame.is_none() && !self.any.load(Ordering::Acquire) {
            return;
        }
        effect::at("sharer");
        self.any.store(true, Ordering::Release);
        self.words.words()[page as usize]
            .store(frame.map_or(0, |frame| frame + 1), Ordering::Release);
    }

    /// All that there are, with their pages.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u64, u64)> {
        let pages =
            if self.any.load(Ordering::Acquire) { self.words.words().len() as u64 } else { 0 };
        (0..pages).filter_map(|page| Some((page, self.get(page)?)))
    }
}

/// What is locked beside a file of frames: shared by who has some be shared, and alone by who gives back those that nobody shares.
pub(crate) fn giving(frames: &Path) -> PathBuf {
    frames.with_extension("giving")
}

/// The frames of the region's group: a file that whoever shares pages writes, and engines read.
#[derive(Debug)]
pub(crate) struct Frames {
    path: PathBuf,
    file: Mutex<Option<Arc<File>>>,
}

impl Frames {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, file: Mutex::default() }
    }

    /// The file, which is there as soon as anything is shared.
    pub(crate) fn file(&self) -> io::Result<Arc<File>> {
        let mut file = lock(&self.file);
        if let Some(file) = &*file {
            return Ok(file.clone());
        }
        let opened = Arc::new(OpenOptions::new().read(true).open(&self.path)?);
        Ok(file.insert(opened).clone())
    }

    /// Has no frame be given back for as long as what is returned lives: one that is about to be shared is on no record yet.
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

    pub(crate) fn read(&self, frame: u64, into: &mut [u8]) -> io::Result<()> {
        self.file()?.read_exact_at(into, frame * PAGE_SIZE as u64)
    }
}
