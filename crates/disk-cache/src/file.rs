//! A disk's file, read and written past the kernel's page cache.

use std::cell::RefCell;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use aquifer_page::{Bytes, PAGE_SIZE};
use rustix::fs::{Advice, FallocateFlags, OFlags, fadvise, fallocate, fdatasync, seek};
use rustix::io::Errno;
use zerocopy::{FromBytes, FromZeros as _, Immutable, IntoBytes, KnownLayout};

use crate::sys;

/// Most bytes of one read or write.
pub(super) const MOST: usize = 1 << 20;

/// A page of memory, aligned for direct I/O.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
pub(super) struct Page([u8; PAGE_SIZE]);

thread_local! {
    static BUFFER: RefCell<Vec<Page>> = const { RefCell::new(Vec::new()) };
}

/// Lends `use_it` this thread's buffer of `pages` pages with arbitrary content. Calls must not
/// nest.
pub(super) fn with_buffer<T>(pages: usize, use_it: impl FnOnce(&mut [u8]) -> T) -> T {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < pages {
            buffer.resize(pages, Page::new_zeroed());
        }
        use_it(buffer[..pages].as_mut_bytes())
    })
}

/// QEMU's image locks (block/file-posix.c): a lock of byte `DOES + x` says that the holder does x,
/// one of `ALONE + x` that others must not.
const DOES: i64 = 100;
const ALONE: i64 = 200;
/// The operations x.
const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// The identity of a file or device, which is the same under all of its names.
pub(super) type Identity = (u64, u64);

pub(super) fn identity(metadata: &Metadata) -> Identity {
    let is_device = metadata.file_type().is_block_device();
    if is_device { (u64::MAX, metadata.rdev()) } else { (metadata.dev(), metadata.ino()) }
}

/// A file or block device that holds a disk.
#[derive(Debug)]
pub(super) struct DiskFile {
    /// `None` if the file system has no direct I/O.
    direct: Option<File>,
    plain: File,
    read_only: bool,
    size: u64,
    /// Whether the file may be shorter than `size`, and grows.
    grows: bool,
}

impl DiskFile {
    /// Opens a disk. The caller [locks](Self::lock) it before it writes, or keeps what it reads.
    pub(super) fn open(path: &Path, read_only: bool) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(!read_only);
        let plain = options.open(path)?;
        let kind = plain.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(io::Error::other("it is neither a file nor a block device"));
        }
        let length = seek(&plain, rustix::fs::SeekFrom::End(0))?;
        let room =
            if kind.is_file() && path.extension().is_some_and(|is| is == "qcow2") && !read_only {
                qcow2_room(&plain)
            } else {
                0
            };
        let direct = options.custom_flags(OFlags::DIRECT.bits() as i32).open(path).ok();
        let (size, grows) = (length.max(room), room > length);
        let this = Self { direct, plain, read_only, size, grows };
        Ok(if this.takes_direct() { this } else { Self { direct: None, ..this } })
    }

    /// Returns whether direct reads work: some files can be opened for direct I/O and not read.
    fn takes_direct(&self) -> bool {
        let first = |direct: &File| with_buffer(1, |page| direct.read_at(page, 0));
        self.direct.as_ref().is_some_and(|direct| first(direct).is_ok())
    }

    pub(super) fn size(&self) -> Bytes {
        Bytes(self.size)
    }

    pub(super) fn identity(&self) -> io::Result<Identity> {
        Ok(identity(&self.plain.metadata()?))
    }

    /// Locks the disk: no other process may write it from now on or, unless this one only reads,
    /// read it.
    ///
    /// # Errors
    /// [`ResourceBusy`](io::ErrorKind::ResourceBusy) if another process has it open; the system's.
    pub(super) fn lock(&self) -> io::Result<()> {
        // Another process that tries meanwhile must not see half of the locks for long.
        lock(&self.plain, self.read_only).inspect_err(|_| _ = self.unlock())
    }

    /// Releases the locks; closing the file does so at the latest.
    pub(super) fn unlock(&self) -> io::Result<()> {
        sys::unlock(&self.plain)
    }

    /// Returns the handle for a range of whole pages, and whether it is direct. The last page may
    /// be partial, which direct I/O cannot write.
    fn by(&self, start: u64, length: usize) -> (&File, bool) {
        match &self.direct {
            Some(direct) if self.grows || start + length as u64 <= self.size => (direct, true),
            _ => (&self.plain, false),
        }
    }

    /// Reads whole pages into an aligned buffer; bytes beyond the end of the file are zeroes.
    pub(super) fn read(&self, start: u64, into: &mut [u8]) -> io::Result<()> {
        let (file, direct) = self.by(start, into.len());
        let mut done = 0;
        while done < into.len() {
            match file.read_at(&mut into[done..], start + done as u64) {
                Ok(0) => break,
                Ok(read) if direct && !(done + read).is_multiple_of(PAGE_SIZE) => {
                    done += read;
                    if start + done as u64 >= self.length()? {
                        break;
                    }
                    // The read stopped before a bad spot. Direct I/O cannot read the rest of this
                    // page alone, so read the page again.
                    done -= done % PAGE_SIZE;
                    if read < PAGE_SIZE {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if !self.grows && start + (done as u64) < self.size.min(start + into.len() as u64) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        into[done..].fill(0);
        if !direct {
            self.forget(start, into.len());
        }
        Ok(())
    }

    /// Returns the current length.
    fn length(&self) -> io::Result<u64> {
        if self.grows { Ok(self.plain.metadata()?.len()) } else { Ok(self.size) }
    }

    /// Writes whole pages, except bytes beyond the size.
    pub(super) fn write(&self, start: u64, from: &[u8]) -> io::Result<()> {
        let (file, _) = self.by(start, from.len());
        let inside = (self.size - start).min(from.len() as u64) as usize;
        file.write_all_at(&from[..inside], start)
    }

    /// Makes all writes durable, and drops them from the kernel's page cache.
    pub(super) fn flush(&self) -> io::Result<()> {
        fdatasync(&self.plain)?;
        self.forget(0, 0);
        Ok(())
    }

    /// Zeroes whole pages without writing them, if the file system can.
    pub(super) fn zero(&self, start: u64, length: u64, hole: bool) -> io::Result<()> {
        let how = if hole { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE };
        // The file's size stays: a growing file grows by writes only.
        match fallocate(self.plain.as_fd(), how | FallocateFlags::KEEP_SIZE, start, length) {
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NODEV) => {
                Err(io::ErrorKind::Unsupported.into())
            }
            done => Ok(done?),
        }
    }

    /// Drops a range from the kernel's page cache.
    fn forget(&self, start: u64, length: usize) {
        // A failure only costs memory.
        let _ =
            fadvise(&self.plain, start, std::num::NonZero::new(length as u64), Advice::DontNeed);
    }
}

/// Locks the file as QEMU does, so that neither opens a file that the other writes.
fn lock(file: &File, read_only: bool) -> io::Result<()> {
    let does: &[i64] = if read_only { &[READ] } else { &[READ, WRITE, RESIZE] };
    for byte in does.iter().map(|what| DOES + what).chain([ALONE + WRITE, ALONE + RESIZE]) {
        sys::lock_byte(file, byte)?;
    }
    let others_do = [DOES + WRITE, DOES + RESIZE];
    for byte in does.iter().map(|what| ALONE + what).chain(others_do) {
        if sys::is_locked_byte(file, byte)? {
            let why = match read_only {
                true => "another process has it open for writing",
                false => "another process has it open",
            };
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
        }
    }
    Ok(())
}

/// Returns the size to which a qcow2 image may grow: twice the guest's disk plus 64 MiB. The rest
/// is room for tables, and for other data of QEMU. Returns 0 for other files.
fn qcow2_room(file: &File) -> u64 {
    let mut head = [0; 32];
    if file.read_exact_at(&mut head, 0).is_err() || &head[..4] != b"QFI\xfb" {
        return 0;
    }
    let guest = u64::from_be_bytes(head[24..].try_into().unwrap_or_default());
    guest.saturating_mul(2).saturating_add(Bytes::mib(64).0).next_multiple_of(PAGE_SIZE as u64)
}
