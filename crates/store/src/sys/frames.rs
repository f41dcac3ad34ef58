//! The mapped file of a group's frames.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::slice;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Mutex, OnceLock};

use aquifer_page::{PAGE_SIZE, lock};

use super::mapping::{self, Mapping};

/// Frames in the first extent of address space, 64 MiB. Each further extent is as long as all
/// before it together.
const FIRST: u32 = 1 << FIRST_BITS;
const FIRST_BITS: u32 = 14;
const EXTENTS: usize = (u32::BITS - FIRST_BITS + 1) as usize;

/// The metadata of a frame.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Meta {
    /// Number of pages that refer to the frame.
    pub(crate) references: AtomicU32,
    /// The next free frame, if this is a free frame without RAM.
    pub(crate) next: AtomicU32,
    /// The fingerprint of the contents, if pages refer to the frame.
    pub(crate) fingerprint: AtomicU64,
}

/// A frame that has RAM, to which no page refers, and which only the owner of this value knows.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Blank(pub(crate) u32);

/// The frames of a group: a sparse tmpfs file, mapped by extents as it grows, and each frame's
/// metadata.
///
/// The owner of a [`Blank`] fills the frame once. The frame does not change until it is a `Blank`
/// again, so readers with a reference need no lock.
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
    /// Takes over `file`; maps nothing of it.
    pub(crate) fn new(file: File) -> Self {
        Self { file, extents: [const { OnceLock::new() }; EXTENTS], growing: Mutex::default() }
    }

    /// Returns the number of the extent that contains the frame.
    pub(crate) fn extent_of(frame: u32) -> usize {
        (u32::BITS - frame.leading_zeros()).saturating_sub(FIRST_BITS) as usize
    }

    /// Returns the frames of an extent.
    fn frames_of(extent: usize) -> Range<u64> {
        let end = u64::from(FIRST) << extent;
        if extent == 0 { 0..end } else { end / 2..end }
    }

    /// Makes address space for `frame` if it is missing. Returns the result of locking it in RAM if
    /// it is new.
    pub(crate) fn reach(&self, frame: u32) -> io::Result<Option<io::Result<()>>> {
        let at = Self::extent_of(frame);
        if self.extents[at].get().is_some() {
            return Ok(None);
        }
        let _one_at_a_time = lock(&self.growing);
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
        // Under the lock, no other thread can have set it.
        let _ = self.extents[at].set(Extent { data, meta });
        Ok(Some(locked))
    }

    /// Returns the extent of `frame`, and the frame's index there.
    ///
    /// # Panics
    /// If there is no address space for the frame.
    fn locate(&self, frame: u32) -> (&Extent, usize) {
        let at = Self::extent_of(frame);
        let extent = self.extents[at].get().expect("a frame that was handed out");
        (extent, (u64::from(frame) - Self::frames_of(at).start) as usize)
    }

    /// Returns the metadata of `frame`.
    pub(crate) fn meta(&self, frame: u32) -> &Meta {
        let (extent, place) = self.locate(frame);
        let meta = extent.meta.at(place * size_of::<Meta>(), size_of::<Meta>()).cast::<Meta>();
        // SAFETY: inside the mapping and aligned, zeroed at first (a valid value, all atomics), and
        // only ever used through this function.
        unsafe { &*meta }
    }

    /// Returns the contents of `frames`, all in one extent. The caller holds a reference to each,
    /// or a page that refers to it.
    pub(crate) fn bytes(&self, frames: Range<u32>) -> &[u8] {
        let (extent, place) = self.locate(frames.start);
        let length = frames.len() * PAGE_SIZE;
        let start = extent.data.at(place * PAGE_SIZE, length);
        // SAFETY: inside the mapping. A frame with a reference is no `Blank`, and only a `Blank` is
        // ever written.
        unsafe { slice::from_raw_parts(start, length) }
    }

    /// Fills a frame.
    pub(crate) fn fill(&self, blank: Blank, content: &[u8; PAGE_SIZE]) -> u32 {
        let (extent, place) = self.locate(blank.0);
        let start = extent.data.at(place * PAGE_SIZE, PAGE_SIZE);
        // SAFETY: inside the mapping; only the owner of a `Blank` knows the frame, and this
        // function owns it.
        unsafe { start.copy_from_nonoverlapping(content.as_ptr(), PAGE_SIZE) };
        blank.0
    }

    /// Takes RAM for `frames`, which have address space but no RAM and are all in one extent. On an
    /// error, none of them keeps RAM.
    pub(crate) fn populate(&self, frames: Range<u32>) -> io::Result<()> {
        let (extent, place) = self.locate(frames.start);
        extent.data.populate_write(&(place..place + frames.len())).inspect_err(|_| {
            // The caller gets the first error. The next open finds frames that stay.
            let _ = self.punch(frames);
        })
    }

    /// Maps `frames`, which have RAM and are all in one extent, so that the kernel locks them in
    /// RAM.
    pub(crate) fn keep(&self, frames: Range<u32>) -> io::Result<()> {
        let (extent, place) = self.locate(frames.start);
        extent.data.populate_read(&(place..place + frames.len()))
    }

    /// Frees the RAM of `frames`, which no other thread knows.
    pub(crate) fn punch(&self, frames: Range<u32>) -> io::Result<()> {
        mapping::punch(&self.file, &(frames.start as usize..frames.end as usize))
    }

    /// Returns the runs of frames that have RAM, and the number of frames in the file. For
    /// recovery.
    pub(crate) fn stored(&self) -> io::Result<(Vec<Range<usize>>, usize)> {
        let pages = self.file.metadata()?.len() as usize / PAGE_SIZE;
        Ok((mapping::stored_runs(&self.file, pages)?, pages))
    }

    /// Returns the bytes that the file takes according to the kernel.
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
