//! The adapter between a volume and the backends.

use std::io;
use std::sync::Arc;

use aquifer_page::{Bytes, WorkerId};
use aquifer_volume::{Volume, VolumeError};

use crate::Disk;

/// A volume as a disk for the backends.
pub(super) struct VolumeDisk(pub(super) Arc<Volume>);

impl Disk for VolumeDisk {
    fn capacity(&self) -> Bytes {
        self.0.capacity()
    }

    fn read(&self, worker: WorkerId, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.0.read(worker, offset, data).map_err(errno)
    }

    fn write(&self, worker: WorkerId, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(worker, offset, data).map_err(errno)
    }

    fn discard(&self, worker: WorkerId, offset: u64, len: u64) -> io::Result<()> {
        self.0.discard(worker, offset, len).map_err(errno)
    }

    fn flush(&self, worker: WorkerId) -> io::Result<()> {
        self.0.flush(worker).map_err(errno)
    }
}

/// Maps an error to the errno for the kernel. The volume's status has the details.
fn errno(error: VolumeError) -> io::Error {
    io::Error::from_raw_os_error(match io::Error::from(error).kind() {
        io::ErrorKind::StorageFull => libc::ENOSPC,
        io::ErrorKind::InvalidInput => libc::EINVAL,
        _ => libc::EIO,
    })
}
