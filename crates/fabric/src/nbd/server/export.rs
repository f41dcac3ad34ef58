//! What an export is made of.

use std::fmt;
use std::io;
use std::sync::Arc;

use aquifer_page::{Bytes, LeaseId};
use aquifer_store::{Lease, StoreError};
use rustix::io::Errno;

use crate::nbd::proto::{errno, export_flag};

/// What is behind an export.
#[derive(Clone, Debug)]
pub enum Export {
    /// A lease of a store.
    Lease(Arc<Lease>),
    /// Anything else, served without holes.
    Disk(Arc<dyn Disk>),
}

/// An export that is not of a store. Called from the threads of connections, which the calls may keep waiting; every range that it is asked for is
/// inside its size. An error of a call is the client's, as an error of NBD, and nothing else comes of it.
pub trait Disk: fmt::Debug + Send + Sync {
    /// Its size, which does not change.
    fn size(&self) -> Bytes;

    /// Whether it is not to be written: the calls that would are not made then.
    fn is_read_only(&self) -> bool;

    /// Reads all of `into`.
    ///
    /// # Errors
    /// The system's.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes all of `from`, for all connections to see.
    ///
    /// # Errors
    /// The system's; what the range reads as is then unspecified.
    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()>;

    /// Has all that was written, by whatever connection, be permanent.
    ///
    /// # Errors
    /// The system's.
    fn flush(&self) -> io::Result<()>;

    /// Gives the room of a range back where it can; what it reads as then is up to the disk.
    ///
    /// # Errors
    /// The system's.
    fn trim(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::Unsupported`] where it was to be fast and cannot be.
    fn write_zeroes(&self, offset: u64, length: u64, how: Zeroes) -> io::Result<()>;
}

/// How a range is to come to read as zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zeroes {
    /// Its room may be given back.
    pub hole: bool,
    /// Only if that is faster than to write them.
    pub fast: bool,
}

/// What there is to say to a client of what it asked for, as the protocol has it.
pub(super) type Done = Result<(), u32>;

impl Export {
    /// The lease, if it is one.
    pub(super) fn lease(&self) -> Option<&Lease> {
        match self {
            Self::Lease(lease) => Some(lease),
            Self::Disk(_) => None,
        }
    }

    pub(super) fn id(&self) -> Option<LeaseId> {
        self.lease().map(Lease::id)
    }

    pub(super) fn size(&self) -> Bytes {
        match self {
            Self::Lease(lease) => lease.capacity(),
            Self::Disk(disk) => disk.size(),
        }
    }

    /// What it can do.
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

    /// Whether a range can be asked for.
    pub(super) fn check(&self, offset: u64, length: u64) -> Done {
        match self {
            Self::Lease(lease) => done(lease.check(offset, length)),
            Self::Disk(disk) => {
                let fits = offset.checked_add(length).is_some_and(|end| end <= disk.size().0);
                if fits { Ok(()) } else { Err(errno::EINVAL) }
            }
        }
    }

    /// As [`check`](Self::check), for commands that find no space beyond the end.
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

    /// Writes what was [checked](Self::check_write).
    pub(super) fn write(&self, offset: u64, from: &[u8]) -> Done {
        match self {
            Self::Lease(lease) => done(lease.write(offset, from)).map_err(no_space_there),
            Self::Disk(disk) => disk_done(disk.write(offset, from)),
        }
    }

    pub(super) fn flush(&self) -> Done {
        match self {
            // What is in RAM is as permanent as it gets.
            Self::Lease(_) => Ok(()),
            Self::Disk(disk) => disk_done(disk.flush()),
        }
    }

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

    pub(super) fn write_zeroes(&self, offset: u64, length: u64, how: Zeroes) -> Done {
        match self {
            Self::Lease(lease) if how.hole => {
                done(lease.discard(offset, length)).map_err(no_space_there)
            }
            // To take RAM for all of the range is no faster than writing it.
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

fn done(result: Result<(), StoreError>) -> Done {
    result.map_err(|error| error_code(&error))
}

/// What a lease's error is called.
pub(super) fn error_code(error: &StoreError) -> u32 {
    match error {
        StoreError::Range { .. } => errno::EINVAL,
        StoreError::Full { .. } | StoreError::NoMemory { .. } => errno::ENOSPC,
        StoreError::Gone(_) => errno::ESHUTDOWN,
        _ => errno::EIO,
    }
}

/// The protocol has another error for what would write beyond the end.
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
