use std::fs::File;
use std::io;
use std::ops::Range;
use std::slice;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Mutex, OnceLock, PoisonError};

use aquifer_page::PAGE_SIZE;

use super::mapping::{self, Mapping};

/// Frames in the first extent of address space, 64 MiB. Each further one is as long as all before it together.
const FIRST: u32 = 1 << FIRST_BITS;
const FIRST_BITS: u32 = 14;
const EXTENTS: usize = (u32::BITS - FIRST_BITS + 1) as usize;

/// What is known of a frame besides its contents.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Meta {
    /// How many pages refer to it.
    pub(crate) references: AtomicU32,
    /// The next of the free frames, where this is one without RAM.
    pub(crate) next: AtomicU32,
    /// Of its contents, where pages refer to it.
    pub(crate) fingerprint: AtomicU64,
}

/// A frame that has RAM, to which no page refers, and which nobody but the owner of this knows.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Blank(pub(crate) u32);

/// The frames of a group: a sparse tmpfs file, mapped by extents as it grows, and what is known of each frame.
///
/// A frame is filled once, by who has it as a [`Blank`], and does not change until it is one again, so whatever refers to
/// it may read it without a lock.
#[derive(Debug)]
pub(crate) struct FrameFile {
    file: File,
    extents: [OnceLock<Extent>; EXTENTS],
    /// Held while an extent is added.
    growing: Mutex<()>,
}

#[derive(Debug)]
struct Extent {
    data: Mapping,
    meta: Mapping,
}

impl FrameFile {
    /// Takes over `file`; nothing of it is mapped yet.
    pub(crate) fn new(file: File) -> Self {
        Self { file, extents: [const { OnceLock::new() }; EXTENTS], growing: Mutex::default() }
    }

    /// Which extent a frame is in.
    pub(crate) fn extent_of(frame: u32) -> usize {
        (u32::BITS - frame.leading_zeros()).saturating_sub(FIRST_BITS) as usize
    }

    /// The frames of an extent.
    fn frames_of(extent: usize) -> Range<u64> {
        let end = u64::from(FIRST) << extent;
        if extent == 0 { 0..end } else { end / 2..end }
    }

    /// Sees to it that there is address space for `frame`. Where that is new, says how locking it in RAM went.
    pub(crate) fn reach(&self, frame: u32) -> io::Result<Option<io::Result<()>>> {
        let at = Self::extent_of(frame);
        if self.extents[at].get().is_some() {
            return Ok(None);
        }
        let _one_at_a_time = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.extents[at].get().is_some() {
            return Ok(None);
        }
        let frames = Self::frames_of(at);
        let (offset, end) = (frames.start * PAGE_SIZE as u64, frames.end * PAGE_SIZE as u64);
        if self.file.metadata()?.len() < end {
            self.file.set_len(end)?;
        }
        let count = (frames.end - frames.start) as usize;
        let data = Mapping::of_file(&self.file, offset, count * PAGE_SIZE)?;
        let meta = Mapping::zeroed(count * size_of::<Meta>())?;
        let locked = data.lock_in_ram();
        // Nobody else can have set it meanwhile.
        let _ = self.extents[at].set(Extent { data, meta });
        Ok(Some(locked))
    }

    /// The extent of `frame`, and the frame's place there.
    ///
    /// # Panics
    /// If there is no address space for the frame.
    fn locate(&self, frame: u32) -> (&Extent, usize) {
        let at = Self::extent_of(frame);
        let extent = self.extents[at].get().expect("a frame that was handed out");
        (extent, (u64::from(frame) - Self::frames_of(at).start) as usize)
    }

    /// What is known of `frame`.
    pub(crate) fn meta(&self, frame: u32) -> &Meta {
        let (extent, place) = self.locate(frame);
        let meta = extent.meta.at(place * size_of::<Meta>(), size_of::<Meta>()).cast::<Meta>();
        // SAFETY: inside the mapping and aligned, zeroed at first (a valid value, all atomics), and only ever used
        // through this function.
        unsafe { &*meta }
    }

    /// The contents of `frames`, which are all in one extent, and to each of which a page refers that the caller holds, or
    /// the caller itself does.
    pub(crate) fn bytes(&self, frames: Range<u32>) -> &[u8] {
        let (extent, place) = self.locate(frames.start);
        let length = frames.len() * PAGE_SIZE;
        let start = extent.data.at(place * PAGE_SIZE, length);
        // SAFETY: inside the mapping. Whatever is referred to is no `Blank`, and nothing else is ever written to.
        unsafe { slice::from_raw_parts(start, length) }
    }

    /// Fills a frame.
    pub(crate) fn fill(&self, blank: Blank, content: &[u8; PAGE_SIZE]) -> u32 {
        let (extent, place) = self.locate(blank.0);
        let start = extent.data.at(place * PAGE_SIZE, PAGE_SIZE);
        // SAFETY: inside the mapping; nobody but the owner of a `Blank` knows the frame, and that is us.
        unsafe { start.copy_from_nonoverlapping(content.as_ptr(), PAGE_SIZE) };
        blank.0
    }

    /// Gives RAM to `frames`, which have none and are all in one extent, for which there is address space. All or nothing.
    pub(crate) fn populate(&self, frames: Range<u32>) -> io::Result<()> {
        let (extent, place) = self.locate(frames.start);
        extent.data.populate_write(&(place..place + frames.len())).inspect_err(|_| {
            // The first error is the one to tell. What is left is found by the next open.
            let _ = self.punch(frames);
        })
    }

    /// Maps `frames`, which have RAM and are all in one extent, so that they are locked in it.
    pub(crate) fn keep(&self, frames: Range<u32>) -> io::Result<()> {
        let (extent, place) = self.locate(frames.start);
        extent.data.populate_read(&(place..place + frames.len()))
    }

    /// Gives the RAM of `frames` back; nobody else knows them.
    pub(crate) fn punch(&self, frames: Range<u32>) -> io::Result<()> {
        mapping::punch(&self.file, &(frames.start as usize..frames.end as usize))
    }

    /// The runs of frames that have RAM, and how many frames the file has. For recovery.
    pub(crate) fn stored(&self) -> io::Result<(Vec<Range<usize>>, usize)> {
        let pages = self.file.metadata()?.len() as usize / PAGE_SIZE;
        Ok((mapping::stored_runs(&self.file, pages)?, pages))
    }

    /// Bytes that the kernel says the file takes.
    pub(crate) fn taken(&self) -> io::Result<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(self.file.metadata()?.blocks() * 512)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_follow_one_another_up_to_the_last_frame() {
        let mut end = 0;
        for extent in 0..EXTENTS {
            let frames = FrameFile::frames_of(extent);
            assert_eq!(frames.start, end);
            end = frames.end;
            assert_eq!(FrameFile::extent_of(frames.start as u32), extent);
            assert_eq!(FrameFile::extent_of((frames.end - 1) as u32), extent);
        }
        assert_eq!(end, 1 << 32, "16 TiB");
    }
}
