//! The memory behind a lease: the mapped file, the state of its pages, and the two kinds of hold on them.
//!
//! The only unsafe code of this crate. What makes it sound: bytes of the file are only reached through a [`ReadRun`] or
//! [`WriteRun`], which hold the locks of the pages concerned, and the store's directory is locked against other
//! processes.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::slice;

use aquifer_page::PAGE_SIZE;
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::mm::{Advice, MapFlags, MlockFlags, ProtFlags};

use crate::lock::PageState;
use crate::span::runs;

/// A piece of address space, unmapped when dropped.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to the value, not to a thread; access to its bytes is ruled by `Frames`.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared `Mapping` gives out addresses only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes of `file`, shared.
    fn of_file(file: &File, length: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice cannot touch existing memory.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        Self::new(base, length)
    }

    /// Maps `length` bytes of zeroes that cost nothing until they are written.
    fn zeroed(length: usize) -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: as in `of_file`.
        let base = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, flags)
        }?;
        Self::new(base, length)
    }

    fn new(base: *mut core::ffi::c_void, length: usize) -> io::Result<Self> {
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, length })
    }

    /// The address of the byte at `offset`.
    ///
    /// # Panics
    /// If `offset + length` leaves the mapping.
    fn at(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.length), "inside the mapping");
        // SAFETY: just checked to stay inside the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    fn advise(&self, offset: usize, length: usize, advice: Advice) -> io::Result<()> {
        let start = self.at(offset, length).cast();
        // SAFETY: `start` and `length` are inside our own mapping, and no advice used here changes its contents.
        Ok(unsafe { rustix::mm::madvise(start, length, advice) }?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody can have a reference into it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// A sparse tmpfs file, mapped, with a lock and a stored bit for each page.
///
/// Trap: merely reading a hole of a tmpfs file through a shared mapping allocates the page. So which pages are there is
/// kept in the page states, and the bytes of a page that is not stored are never looked at.
#[derive(Debug)]
pub(crate) struct Frames {
    file: File,
    data: Mapping,
    states: Mapping,
    pages: usize,
}

impl Frames {
    /// Maps `file`, which is `pages` long and of which nothing is stored as far as the states know.
    pub(crate) fn map(file: File, pages: usize) -> io::Result<Self> {
        let data = Mapping::of_file(&file, pages * PAGE_SIZE)?;
        // In a huge page a hole would be zeroed but not given back.
        match data.advise(0, data.length, Advice::LinuxNoHugepage) {
            // Kernels without huge pages do not know the advice.
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
            _ => {}
        }
        let states = Mapping::zeroed(pages * size_of::<PageState>())?;
        Ok(Self { file, data, states, pages })
    }

    /// Sees to it that stored pages are never swapped out: each is locked as it is mapped.
    pub(crate) fn lock_in_ram(&self) -> io::Result<()> {
        // SAFETY: our own mapping; locking does not change its contents.
        Ok(unsafe {
            rustix::mm::mlock_with(self.data.base.as_ptr().cast(), self.data.length, MlockFlags::ONFAULT)
        }?)
    }

    /// Marks what the file holds as stored and maps it, so that it is locked in RAM. Returns the number of pages.
    pub(crate) fn adopt_stored(&mut self) -> io::Result<usize> {
        let mut found = 0;
        let mut at = 0;
        let end = self.data.length as u64;
        while let Some(start) = self.seek(SeekFrom::Data(at))? {
            at = self.seek(SeekFrom::Hole(start))?.unwrap_or(end).min(end);
            let pages = start as usize / PAGE_SIZE..(at as usize).div_ceil(PAGE_SIZE);
            pages.clone().for_each(|page| self.states()[page].set_stored(true));
            found += pages.len();
            self.data.advise(pages.start * PAGE_SIZE, pages.len() * PAGE_SIZE, Advice::LinuxPopulateRead)?;
        }
        Ok(found)
    }

    fn seek(&self, to: SeekFrom) -> io::Result<Option<u64>> {
        match rustix::fs::seek(&self.file, to) {
            Ok(at) => Ok(Some(at)),
            // No more data after this place.
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn states(&self) -> &[PageState] {
        // SAFETY: the mapping is as long as `pages` states, page-aligned, zeroed (a valid state, all atomics) and only
        // ever used through this function.
        unsafe { slice::from_raw_parts(self.states.base.as_ptr().cast(), self.pages) }
    }

    /// The first page of `pages` that is stored or held by somebody.
    pub(crate) fn first_not_idle(&self, pages: Range<usize>) -> Option<usize> {
        self.states()[pages.clone()].iter().position(|state| !state.is_idle_hole()).map(|at| pages.start + at)
    }

    /// The runs of stored and not stored pages in `pages`, as they are just now.
    pub(crate) fn peek_runs(&self, pages: Range<usize>) -> impl Iterator<Item = (Range<usize>, bool)> {
        let states = self.states();
        runs(pages, |page| states[page].stored())
    }

    /// Takes all of `pages` for reading, in ascending order.
    pub(crate) fn read(&self, pages: Range<usize>) -> ReadRun<'_> {
        self.states()[pages.clone()].iter().for_each(PageState::read);
        ReadRun { frames: self, pages }
    }

    /// Takes all of `pages` for reading if none needs waiting.
    pub(crate) fn try_read(&self, pages: Range<usize>) -> Option<ReadRun<'_>> {
        let states = &self.states()[pages.clone()];
        let taken = states.iter().position(|state| !state.try_read());
        // Dropping the run gives back what was taken.
        let run =
            ReadRun { frames: self, pages: pages.start..taken.map_or(pages.end, |at| pages.start + at) };
        taken.is_none().then_some(run)
    }

    /// Takes all of `pages` for writing, in ascending order.
    pub(crate) fn write(&self, pages: Range<usize>) -> WriteRun<'_> {
        self.states()[pages.clone()].iter().for_each(PageState::write);
        WriteRun { frames: self, pages }
    }
}

/// Pages held for reading.
#[derive(Debug)]
pub(crate) struct ReadRun<'a> {
    frames: &'a Frames,
    pages: Range<usize>,
}

impl ReadRun<'_> {
    /// The runs of stored and not stored pages.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (Range<usize>, bool)> {
        self.frames.peek_runs(self.pages.clone())
    }

    /// The bytes of `pages`, all of which are held and stored.
    pub(crate) fn bytes(&self, pages: &Range<usize>) -> &[u8] {
        assert_within(pages, &self.pages);
        let length = pages.len() * PAGE_SIZE;
        let start = self.frames.data.at(pages.start * PAGE_SIZE, length);
        // SAFETY: inside the mapping; the read locks held for as long as `self` lives keep writers out.
        unsafe { slice::from_raw_parts(start, length) }
    }
}

impl Drop for ReadRun<'_> {
    fn drop(&mut self) {
        self.frames.states()[self.pages.clone()].iter().for_each(PageState::unlock_read);
    }
}

/// Pages held for writing.
#[derive(Debug)]
pub(crate) struct WriteRun<'a> {
    frames: &'a Frames,
    pages: Range<usize>,
}

impl WriteRun<'_> {
    /// The first run in `pages` that is stored, or that is not.
    pub(crate) fn next_run(&self, pages: Range<usize>, stored: bool) -> Option<Range<usize>> {
        assert_within(&pages, &self.pages);
        self.frames.peek_runs(pages).find(|&(_, is)| is == stored).map(|(run, _)| run)
    }

    /// Whether this page is stored.
    pub(crate) fn stored(&self, page: usize) -> bool {
        self.frames.states()[page].stored()
    }

    /// The bytes of `pages`, all of which are held and stored.
    pub(crate) fn bytes(&mut self, pages: &Range<usize>) -> &mut [u8] {
        assert_within(pages, &self.pages);
        let length = pages.len() * PAGE_SIZE;
        let start = self.frames.data.at(pages.start * PAGE_SIZE, length);
        // SAFETY: inside the mapping; the write locks held for as long as `self` lives keep everybody else out.
        unsafe { slice::from_raw_parts_mut(start, length) }
    }

    /// Gives RAM, full of zeroes, to `pages`, none of which is stored. All or nothing.
    ///
    /// `MADV_POPULATE_WRITE` because writing to a page that a full tmpfs cannot give is a SIGBUS, while this is an error.
    /// It also maps the page, without which `mlock` does not hold it in RAM. Measured for one random page, microseconds
    /// with the copy that follows: populate 2.9, `pwrite` and a touch to map it 4.6, `fallocate` 2.8 (but then a fault in
    /// the copy, and no gain for runs), just writing it 3.0.
    pub(crate) fn populate(&mut self, pages: &Range<usize>) -> io::Result<()> {
        assert_within(pages, &self.pages);
        let data = &self.frames.data;
        if let Err(error) =
            data.advise(pages.start * PAGE_SIZE, pages.len() * PAGE_SIZE, Advice::LinuxPopulateWrite)
        {
            self.punch_file(pages)?;
            return Err(error);
        }
        self.set_stored(pages, true);
        Ok(())
    }

    /// Gives the RAM of `pages` back; they read as zeroes from now on.
    pub(crate) fn punch(&mut self, pages: &Range<usize>) -> io::Result<()> {
        assert_within(pages, &self.pages);
        self.punch_file(pages)?;
        self.set_stored(pages, false);
        Ok(())
    }

    fn punch_file(&self, pages: &Range<usize>) -> io::Result<()> {
        let (offset, length) = ((pages.start * PAGE_SIZE) as u64, (pages.len() * PAGE_SIZE) as u64);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        loop {
            match rustix::fs::fallocate(&self.frames.file, flags, offset, length) {
                Err(rustix::io::Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }

    fn set_stored(&self, pages: &Range<usize>, stored: bool) {
        self.frames.states()[pages.clone()].iter().for_each(|state| state.set_stored(stored));
    }
}

impl Drop for WriteRun<'_> {
    fn drop(&mut self) {
        self.frames.states()[self.pages.clone()].iter().for_each(PageState::unlock_write);
    }
}

fn assert_within(inner: &Range<usize>, outer: &Range<usize>) {
    assert!(outer.start <= inner.start && inner.end <= outer.end, "only pages that are held");
}
