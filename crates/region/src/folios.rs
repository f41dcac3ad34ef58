//! The folios behind pages of this process, as the kernel shows them to root.
//!
//! A folio is the unit in which the kernel keeps a file in RAM: one page, or a power of two of
//! them. The formats are those of the kernel's Documentation/admin-guide/mm/pagemap.rst.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use aquifer_page::PAGE_SIZE;

/// The physical flags of each page of the host, 8 bytes a page.
const FLAGS: &str = "/proc/kpageflags";

/// The first page of a large folio, and each later one.
const COMPOUND_HEAD: u64 = 1 << 15;
const COMPOUND_TAIL: u64 = 1 << 16;

/// An entry of a pagemap: the page is in RAM; the number of its frame, or 0 without the right to
/// know it.
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// The files that tell of folios.
#[derive(Debug)]
pub(crate) struct Folios {
    flags: File,
    pagemap: File,
}

/// Returns whether this process can tell large folios from single pages.
pub(crate) fn are_known() -> bool {
    File::open(FLAGS).is_ok_and(|flags| flags.read_exact_at(&mut [0; 8], 0).is_ok())
}

impl Folios {
    /// Opens the files.
    ///
    /// # Errors
    /// The process lacks the right, or the kernel lacks `CONFIG_PROC_PAGE_MONITOR`.
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self { flags: File::open(FLAGS)?, pagemap: File::open("/proc/self/pagemap")? })
    }

    /// Returns which of the pages at an address may be in large folios: the first page of each, and
    /// the pages that the kernel is moving. All must be in the page table.
    pub(crate) fn large(&self, address: usize, pages: u64) -> io::Result<Vec<u64>> {
        let entries = words(&self.pagemap, (address / PAGE_SIZE) as u64, pages)?;
        let mut large = Vec::new();
        let mut at = 0;
        while at < entries.len() {
            let frame = entries[at] & FRAME;
            if entries[at] & PRESENT == 0 {
                large.push(at as u64);
                at += 1;
                continue;
            }
            if frame == 0 {
                let why = "the kernel hides the numbers of frames (needs CAP_SYS_ADMIN)";
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
            }
            let is_next = |(ahead, entry): &(u64, &u64)| {
                **entry & PRESENT != 0 && **entry & FRAME == frame + ahead
            };
            let run = (0..).zip(&entries[at..]).take_while(is_next).count();
            let flags = words(&self.flags, frame, run as u64)?;
            for (ahead, flags) in flags.into_iter().enumerate() {
                let is_head = flags & COMPOUND_HEAD != 0;
                // A run of frames may begin inside a folio.
                if is_head || flags & COMPOUND_TAIL != 0 && ahead == 0 {
                    large.push((at + ahead) as u64);
                }
            }
            at += run;
        }
        Ok(large)
    }
}

fn words(file: &File, first: u64, count: u64) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; count as usize * 8];
    file.read_exact_at(&mut bytes, first * 8)?;
    let word = |bytes: &[u8]| bytes.try_into().map(u64::from_ne_bytes).unwrap_or_default();
    Ok(bytes.chunks_exact(8).map(word).collect())
}
