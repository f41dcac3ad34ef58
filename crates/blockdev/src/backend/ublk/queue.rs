//! The worker that serves one queue of a ublk device.

use std::fs::File;
use std::io;
use std::sync::Arc;

use aquifer_page::{PAGE_SIZE, WorkerId};

use crate::Disk;
use crate::backend::MAX_REQUEST;
use crate::safety::touch_stack;
use crate::sys::ublk::{QueueRing, Request};

const READ: u8 = 0;
const WRITE: u8 = 1;
const FLUSH: u8 = 2;
const DISCARD: u8 = 3;
const WRITE_ZEROES: u8 = 5;

/// Serves one queue until the driver has returned all its tags, which it does when the device is
/// stopped.
///
/// Calls `ready` once, when the driver can deliver requests and all memory that they need is
/// resident.
pub(super) fn run(
    disk: &dyn Disk,
    device: Arc<File>,
    queue: u16,
    depth: u16,
    ready: impl FnOnce(io::Result<()>),
) -> io::Result<()> {
    touch_stack();
    let mut ring = match prepare(disk, device, queue, depth) {
        Ok(ring) => ring,
        Err(error) => {
            ready(Err(error));
            return Ok(());
        }
    };
    ready(Ok(()));
    let mut tags = depth;
    while tags > 0 {
        ring.wait()?;
        while let Some(next) = ring.next() {
            match next {
                Ok(tag) => {
                    let request = ring.request(tag);
                    let result = serve(disk, WorkerId(queue.into()), request, ring.buffer(tag));
                    ring.answer(tag, result)?;
                }
                Err(_) => tags -= 1,
            }
        }
    }
    Ok(())
}

fn prepare(disk: &dyn Disk, device: Arc<File>, queue: u16, depth: u16) -> io::Result<QueueRing> {
    let mut ring = QueueRing::new(device, queue, depth, MAX_REQUEST)?;
    // Opens the disk's connections for this worker. The error is ignored: if the disk stays
    // unreadable, the kernel gets the error with its first request.
    let _ = disk.read(WorkerId(queue.into()), 0, &mut ring.buffer(0)[..PAGE_SIZE]);
    ring.fetch_all()?;
    Ok(ring)
}

/// Serves a request. Returns its length in bytes, or the negated errno.
fn serve(disk: &dyn Disk, worker: WorkerId, request: Request, buffer: &mut [u8]) -> i32 {
    // The start sector of a flush is -1, so the multiplication wraps.
    let (offset, length) = (request.start.wrapping_mul(512), u64::from(request.sectors) * 512);
    let done = match (request.operation, buffer.get_mut(..length as usize)) {
        (READ, Some(data)) => disk.read(worker, offset, data),
        (WRITE, Some(data)) => disk.write(worker, offset, data),
        (FLUSH, _) => disk.flush(worker),
        (DISCARD | WRITE_ZEROES, _) => disk.discard(worker, offset, length),
        _ => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
    };
    match done {
        Ok(()) => length.min(MAX_REQUEST as u64) as i32,
        Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
    }
}
