//! The region's file, which holds the pages of the local cache.

use std::fs::File;
use std::io;
use std::mem;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::PAGE_SIZE;
use aquifer_region_client::FileMap;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};

use crate::{effect, sys};

/// How often the engine tries again to remove pages, and for how long before it warns.
const REMOVE_INTERVAL: Duration = Duration::from_millis(1);
const REMOVE_PATIENCE: Duration = Duration::from_secs(1);

/// The file and the engine's own mapping of it.
#[derive(Debug)]
pub(crate) struct RegionFile {
    file: File,
    map: FileMap,
}

impl RegionFile {
    /// Maps a file that already has its size.
    pub(crate) fn new(file: File) -> io::Result<Self> {
        let length = file.metadata()?.len() as usize;
        Ok(Self { map: FileMap::new(&file, length)?, file })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn pages(&self) -> u64 {
        self.map.bytes().len() as u64 / PAGE_SIZE as u64
    }

    /// Returns the address of a page in the engine's own mapping.
    pub(crate) fn address(&self, page: u64) -> usize {
        self.map.bytes()[page as usize * PAGE_SIZE..].as_ptr().addr()
    }

    /// Brings pages that are in the file into the engine's own page table. It adds a page of zeroes
    /// to the file where there is none.
    pub(crate) fn populate(&self, pages: &Range<u64>) -> io::Result<()> {
        sys::advise(&self.map, pages, libc::MADV_POPULATE_READ)
    }

    /// Takes pages out of the engine's own page table.
    pub(crate) fn unmap(&self, pages: &Range<u64>) -> io::Result<()> {
        sys::advise(&self.map, pages, libc::MADV_DONTNEED)
    }

    /// Asks the kernel to split the folio of a page that only the engine has mapped. Advice for a
    /// part of a folio is what makes the kernel split it.
    pub(crate) fn split(&self, page: u64) -> io::Result<()> {
        sys::advise(&self.map, &(page..page + 1), libc::MADV_COLD)
    }

    /// Reads pages that programs may write to meanwhile. The result may include such a write
    /// wholly, partly or not at all.
    pub(crate) fn read(&self, first: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, first * PAGE_SIZE as u64)
    }

    /// Does the same for pages in ascending order, one after the other.
    pub(crate) fn read_pages(&self, pages: &[u64], into: &mut [u8]) -> io::Result<()> {
        let mut rest = into;
        runs(pages.iter().copied()).into_iter().try_for_each(|run| {
            let bytes = (run.end - run.start) as usize * PAGE_SIZE;
            let (now, later) = mem::take(&mut rest).split_at_mut(bytes);
            rest = later;
            self.read(run.start, now)
        })
    }

    /// Writes pages, none of which is in a page table, into the file.
    pub(crate) fn put(&self, first: u64, data: &[u8]) -> io::Result<()> {
        effect::at("put");
        self.file.write_all_at(data, first * PAGE_SIZE as u64)
    }

    /// Removes pages from the file and from all page tables.
    pub(crate) fn punch(&self, pages: &Range<u64>) -> io::Result<()> {
        effect::at("punch");
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let bytes = |pages| pages * PAGE_SIZE as u64;
        Ok(fallocate(&self.file, flags, bytes(pages.start), bytes(pages.end - pages.start))?)
    }

    /// Does the same, and returns once the pages are gone. While the kernel cannot split a huge
    /// page, it keeps zeroes in the place of its pages, and a program must not get these.
    pub(crate) fn remove(&self, pages: &Range<u64>) -> io::Result<()> {
        self.punch(pages)?;
        let mut warns_at = Some(Instant::now() + REMOVE_PATIENCE);
        while !present_in(&self.file, pages)?.is_empty() {
            if warns_at.take_if(|at| Instant::now() > *at).is_some() {
                tracing::warn!(
                    "pages {pages:?} of the region stay in a huge page that some program or device \
                     uses; the engine waits until the kernel removes them"
                );
            }
            thread::sleep(REMOVE_INTERVAL);
            self.punch(pages)?;
        }
        Ok(())
    }

    /// Returns the device number of the file's tmpfs.
    pub(crate) fn device(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.dev())
    }

    /// Returns whether a page is in the file. If the kernel cannot tell, the page counts as
    /// present.
    pub(crate) fn has(&self, page: u64) -> bool {
        self.next(page) == page
    }

    /// Returns the first page from `page` on that is in the file, and [`u64::MAX`] without one. If
    /// the kernel cannot tell, `page` counts as present.
    pub(crate) fn next(&self, page: u64) -> u64 {
        match seek(&self.file, SeekFrom::Data(page * PAGE_SIZE as u64)) {
            Ok(start) => start / PAGE_SIZE as u64,
            Err(rustix::io::Errno::NXIO) => u64::MAX,
            Err(_) => page,
        }
    }

    /// Returns how many bytes of the file are in RAM.
    pub(crate) fn allocated(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks() * 512)
    }

    /// Returns the pages that are in the file.
    pub(crate) fn present(&self) -> io::Result<Vec<Range<u64>>> {
        present(&self.file)
    }

    /// Returns which of these pages are in the file.
    pub(crate) fn present_in(&self, pages: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
        present_in(&self.file, pages)
    }
}

/// Returns the pages that are in a file of a tmpfs.
pub(crate) fn present(file: &File) -> io::Result<Vec<Range<u64>>> {
    present_in(file, &(0..file.metadata()?.len().div_ceil(PAGE_SIZE as u64)))
}

/// Returns which of these pages are in a file of a tmpfs.
fn present_in(file: &File, pages: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut runs = Vec::new();
    let mut at = pages.start;
    while at < pages.end {
        let start = match seek(file, SeekFrom::Data(at * PAGE_SIZE as u64)) {
            Ok(start) if start < pages.end * PAGE_SIZE as u64 => start,
            Ok(_) | Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        at = pages.end.min(seek(file, SeekFrom::Hole(start))?.div_ceil(PAGE_SIZE as u64));
        runs.push(start / PAGE_SIZE as u64..at);
    }
    Ok(runs)
}

/// Groups pages in ascending order into runs.
pub(crate) fn runs(pages: impl IntoIterator<Item = u64>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for page in pages {
        match runs.last_mut() {
            Some(run) if run.end == page => run.end += 1,
            _ => runs.push(page..page + 1),
        }
    }
    runs
}
