//! The two kinds of storage, and their mapping to NBD commands and error numbers.

use std::fmt;
use std::io;
use std::sync::Arc;

use aquifer_page::export::{Export, ExportError};
use aquifer_page::{Bytes, LeaseId};
use rustix::io::Errno;

use crate::proto::{errno, export_flag};

/// The storage behind an export.
#[derive(Clone, Debug)]
pub enum Storage {
    /// A lease.
    Lease(Arc<dyn Export>),
    /// Other storage, served without holes.
    Disk(Arc<dyn Disk>),
}

/// Storage other than a lease that a server exports.
///
/// The threads of connections call it, and its calls may block them. Every range lies within the
/// disk's size. The server reports an error to the client as an NBD error, and does nothing else
/// about it.
pub trait Disk: fmt::Debug + Send + Sync {
    /// Returns the disk's size, which never changes.
    fn size(&self) -> Bytes;

    /// Returns whether the disk refuses writes; the server then makes no call that would write.
    fn is_read_only(&self) -> bool;

    /// Reads `into.len()` bytes from `offset`.
    ///
    /// # Errors
    /// The error of the operating system.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes `from` at `offset`, visible to all connections.
    ///
    /// # Errors
    /// The error of the operating system; the content of the range is then unspecified.
    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()>;

    /// Makes all writes permanent, whichever connection made them.
    ///
    /// # Errors
    /// The error of the operating system.
    fn flush(&self) -> io::Result<()>;

    /// Releases the space of a range if the disk can; the content of the range is then unspecified.
    ///
    /// # Errors
    /// The error of the operating system.
    fn trim(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// The error of the operating system; [`io::ErrorKind::Unsupported`] if `how` demands speed and
    /// the disk is slow.
    fn write_zeroes(&self, offset: u64, length: u64, how: Zeroes) -> io::Result<()>;
}

/// Constraints on the way to make a range read as zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zeroes {
    /// The disk may release the space of the range.
    pub hole: bool,
    /// The disk must fail unless it is faster than a write of zeroes.
    pub fast: bool,
}

/// The outcome of a command; the error is a number of the protocol.
pub(super) type Done = Result<(), u32>;

impl Storage {
    /// Returns the lease behind the export, if any.
    pub(super) fn lease(&self) -> Option<&dyn Export> {
        match self {
            Self::Lease(lease) => Some(&**lease),
            Self::Disk(_) => None,
        }
    }

    pub(super) fn id(&self) -> Option<LeaseId> {
        self.lease().map(Export::id)
    }

    pub(super) fn size(&self) -> Bytes {
        match self {
            Self::Lease(lease) => lease.capacity(),
            Self::Disk(disk) => disk.size(),
        }
    }

    /// Returns the transmission flags: the server sets a flag only for a feature that it supports
    /// (NBD, "Transmission flags").
    pub(super) fn flags(&self) -> u16 {
        let always = export_flag::HAS_FLAGS
            | export_flag::SEND_FLUSH
            | export_flag::SEND_FUA
            | export_flag::CAN_MULTI_CONN;
        let writes =
            export_flag::SEND_TRIM | export_flag::SEND_WRITE_ZEROES | export_flag::SEND_FAST_ZERO;
        always
            | match self {
                Self::Lease(_) => writes | export_flag::SEND_CACHE,
                Self::Disk(disk) if disk.is_read_only() => export_flag::READ_ONLY,
                Self::Disk(_) => writes,
            }
    }

    /// Checks that a range lies within the export.
    pub(super) fn check(&self, offset: u64, length: u64) -> Done {
        match self {
            Self::Lease(lease) => done(lease.check(offset, length)),
            Self::Disk(disk) => {
                let fits = offset.checked_add(length).is_some_and(|end| end <= disk.size().0);
                if fits { Ok(()) } else { Err(errno::EINVAL) }
            }
        }
    }

    /// Checks a range as [`check`](Self::check) does, for writes: a range past the end gives
    /// `ENOSPC`, a read-only export `EPERM` (NBD, "Error values").
    pub(super) fn check_write(&self, offset: u64, length: u64) -> Done {
        match self {
            Self::Disk(disk) if disk.is_read_only() => Err(errno::EPERM),
            _ => self.check(offset, length).map_err(no_space_there),
        }
    }

    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Done {
        match self {
            Self::Lease(lease) => done(lease.read(offset, into)),
            Self::Disk(disk) => {
                self.check(offset, into.len() as u64)?;
                disk_done(disk.read(offset, into))
            }
        }
    }

    /// Writes a range that [`check_write`](Self::check_write) has accepted.
    pub(super) fn write(&self, offset: u64, from: &[u8]) -> Done {
        match self {
            Self::Lease(lease) => done(lease.write(offset, from)).map_err(no_space_there),
            Self::Disk(disk) => disk_done(disk.write(offset, from)),
        }
    }

    /// Returns once all acknowledged writes are permanent (NBD, "NBD_CMD_FLUSH").
    pub(super) fn flush(&self) -> Done {
        match self {
            // RAM has no more permanent medium behind it.
            Self::Lease(_) => Ok(()),
            Self::Disk(disk) => disk_done(disk.flush()),
        }
    }

    /// Releases a range; the client may then rely on no content there (NBD, "NBD_CMD_TRIM").
    pub(super) fn trim(&self, offset: u64, length: u64) -> Done {
        match self {
            Self::Lease(lease) => done(lease.discard(offset, length)),
            Self::Disk(disk) => {
                self.check(offset, length)?;
                self.check_write(offset, length)?;
                disk_done(disk.trim(offset, length))
            }
        }
    }

    /// Makes a range read as zeroes; only a fast request may fail with `ENOTSUP` (NBD,
    /// "NBD_CMD_WRITE_ZEROES").
    pub(super) fn write_zeroes(&self, offset: u64, length: u64, how: Zeroes) -> Done {
        match self {
            Self::Lease(lease) if how.hole => {
                done(lease.discard(offset, length)).map_err(no_space_there)
            }
            // Allocating RAM for the range is no faster than writing it.
            Self::Lease(_) if how.fast => Err(errno::ENOTSUP),
            Self::Lease(lease) => {
                done(lease.allocate_zeroes(offset, length)).map_err(no_space_there)
            }
            Self::Disk(disk) => {
                self.check_write(offset, length)?;
                disk_done(disk.write_zeroes(offset, length, how))
            }
        }
    }
}

fn done(result: Result<(), ExportError>) -> Done {
    result.map_err(|error| error_code(&error))
}

/// Maps an error of a lease to a number of the protocol.
pub(super) fn error_code(error: &ExportError) -> u32 {
    match error {
        ExportError::Range { .. } => errno::EINVAL,
        ExportError::Full { .. } | ExportError::NoMemory { .. } => errno::ENOSPC,
        ExportError::Gone(_) => errno::ESHUTDOWN,
    }
}

/// Replaces `EINVAL` by `ENOSPC`, the error for writes past the end (NBD, "Error values").
fn no_space_there(error: u32) -> u32 {
    if error == errno::EINVAL { errno::ENOSPC } else { error }
}

fn disk_done(result: io::Result<()>) -> Done {
    result.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => errno::ENOSPC,
        Some(Errno::PERM | Errno::ACCESS | Errno::ROFS) => errno::EPERM,
        Some(Errno::NOMEM) => errno::ENOMEM,
        Some(Errno::OPNOTSUPP) => errno::ENOTSUP,
        None if error.kind() == io::ErrorKind::Unsupported => errno::ENOTSUP,
        _ => errno::EIO,
    })
}
