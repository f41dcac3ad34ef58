//! The ublk driver's interface (`linux/ublk_cmd.h`) over io_uring commands.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use io_uring::types::Fd;
use io_uring::{IoUring, cqueue, opcode, squeue};

/// Device number and data of a `struct ublksrv_ctrl_cmd`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Command {
    pub(crate) device: u32,
    pub(crate) data: u64,
}

/// Control commands, as the kernel's header numbers them.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(crate) enum Control {
    GetInfo = ioctl(READ, 0x02, 32),
    Add = ioctl(READ | WRITE, 0x04, 32),
    Delete = ioctl(READ | WRITE, 0x05, 32),
    Start = ioctl(READ | WRITE, 0x06, 32),
    Stop = ioctl(READ | WRITE, 0x07, 32),
    SetParameters = ioctl(READ | WRITE, 0x08, 32),
    StartRecovery = ioctl(READ | WRITE, 0x10, 32),
    EndRecovery = ioctl(READ | WRITE, 0x11, 32),
}

const WRITE: u32 = 1;
const READ: u32 = 2;
const FETCH: u32 = ioctl(READ | WRITE, 0x20, 16);
const COMMIT_AND_FETCH: u32 = ioctl(READ | WRITE, 0x21, 16);

/// Builds the number of an ioctl of the ublk driver, as `_IOC` does.
const fn ioctl(direction: u32, number: u32, size: u32) -> u32 {
    direction << 30 | size << 16 | 0x75 << 8 | number
}

/// An io_uring for commands to `/dev/ublk-control`.
pub(crate) struct ControlRing {
    ring: IoUring<squeue::Entry128>,
    device: File,
}

impl ControlRing {
    pub(crate) fn new(device: File) -> io::Result<Self> {
        Ok(Self { ring: IoUring::builder().build(4)?, device })
    }

    /// Executes a command and waits for its completion. The kernel reads or writes `payload`.
    pub(crate) fn call(
        &mut self,
        control: Control,
        command: Command,
        payload: &mut [u8],
    ) -> io::Result<i32> {
        let mut bytes = [0; 80];
        bytes[..4].copy_from_slice(&command.device.to_ne_bytes());
        bytes[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(payload.len() as u16).to_ne_bytes());
        bytes[8..16].copy_from_slice(&(payload.as_mut_ptr() as u64).to_ne_bytes());
        bytes[16..24].copy_from_slice(&command.data.to_ne_bytes());
        let entry =
            opcode::UringCmd80::new(Fd(self.device.as_raw_fd()), control as u32).cmd(bytes).build();
        // SAFETY: the device stays open and `payload` borrowed until the command completes. This
        // function waits for that; no error ends it earlier.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        loop {
            // An error means an interrupted wait (a signal) or a submission that the next round
            // retries.
            let _ = self.ring.submit_and_wait(1);
            if let Some(done) = self.ring.completion().next() {
                return result(&done);
            }
        }
    }
}

fn result(done: &cqueue::Entry) -> io::Result<i32> {
    if done.result() < 0 {
        Err(io::Error::from_raw_os_error(-done.result()))
    } else {
        Ok(done.result())
    }
}

/// `struct ublksrv_io_desc`, which the driver fills before it completes a fetch.
#[repr(C)]
struct Descriptor {
    operation: AtomicU32,
    sectors: AtomicU32,
    start: AtomicU64,
    _address: AtomicU64,
}

const _: () = assert!(size_of::<Descriptor>() == 24);

/// Number of descriptors that the driver reserves per queue (`UBLK_MAX_QUEUE_DEPTH`).
const MAX_DEPTH: usize = 4096;

/// A request of the block layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// `UBLK_IO_OP_*`.
    pub(crate) operation: u8,
    pub(crate) sectors: u32,
    pub(crate) start: u64,
}

/// One queue of a device: its requests, and a buffer for each. The thread that made it must use it.
pub(crate) struct QueueRing {
    /// Dropped first, because the kernel uses the buffers through it.
    ring: IoUring,
    descriptors: NonNull<Descriptor>,
    mapped: usize,
    buffers: Vec<u8>,
    buffer_size: usize,
    device: Arc<File>,
    queue: u16,
    depth: u16,
}

impl QueueRing {
    pub(crate) fn new(
        device: Arc<File>,
        queue: u16,
        depth: u16,
        buffer_size: usize,
    ) -> io::Result<Self> {
        let page = rustix::param::page_size();
        let mapped = (usize::from(depth) * size_of::<Descriptor>()).next_multiple_of(page);
        let offset =
            usize::from(queue) * (MAX_DEPTH * size_of::<Descriptor>()).next_multiple_of(page);
        let ring = IoUring::new(depth.into())?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                mapped,
                rustix::mm::ProtFlags::READ,
                rustix::mm::MapFlags::SHARED | rustix::mm::MapFlags::POPULATE,
                &device,
                offset as u64,
            )
        }?;
        let descriptors = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        // A value other than zero touches every page.
        let buffers = vec![1; usize::from(depth) * buffer_size];
        Ok(Self { ring, descriptors, mapped, buffers, buffer_size, device, queue, depth })
    }

    /// Asks for a first request under every tag.
    pub(crate) fn fetch_all(&mut self) -> io::Result<()> {
        for tag in 0..self.depth {
            self.push(FETCH, tag, 0)?;
        }
        self.ring.submit()?;
        Ok(())
    }

    /// Submits pending answers and waits for a request. A signal may end the wait early.
    pub(crate) fn wait(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            result => result.map(drop),
        }
    }

    /// Returns the tag of the next request. An error means that the driver has withdrawn the tag
    /// for good.
    pub(crate) fn next(&mut self) -> Option<Result<u16, io::Error>> {
        let done = self.ring.completion().next()?;
        Some(result(&done).map(|_| done.user_data() as u16))
    }

    /// Returns the request under `tag`.
    pub(crate) fn request(&self, tag: u16) -> Request {
        assert!(tag < self.depth, "the driver invents no tags");
        // SAFETY: the mapping has `depth` descriptors, lives as long as `self`, and is only read.
        // The driver writes a descriptor before it completes the fetch of its tag, and so before
        // this read.
        let descriptor = unsafe { self.descriptors.add(tag.into()).as_ref() };
        Request {
            operation: (descriptor.operation.load(Ordering::Acquire) & 0xff) as u8,
            sectors: descriptor.sectors.load(Ordering::Relaxed),
            start: descriptor.start.load(Ordering::Relaxed),
        }
    }

    /// Returns the buffer of the request under `tag`: the data of a write, or room for a read.
    pub(crate) fn buffer(&mut self, tag: u16) -> &mut [u8] {
        let start = usize::from(tag) * self.buffer_size;
        &mut self.buffers[start..start + self.buffer_size]
    }

    /// Answers the request under `tag` and asks for the next. The next [`wait`](Self::wait) submits
    /// it.
    pub(crate) fn answer(&mut self, tag: u16, result: i32) -> io::Result<()> {
        self.push(COMMIT_AND_FETCH, tag, result)
    }

    fn push(&mut self, operation: u32, tag: u16, result: i32) -> io::Result<()> {
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&self.queue.to_ne_bytes());
        bytes[2..4].copy_from_slice(&tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&result.to_ne_bytes());
        bytes[8..].copy_from_slice(&(self.buffer(tag).as_mut_ptr() as u64).to_ne_bytes());
        let entry =
            opcode::UringCmd16::new(Fd(self.device.as_raw_fd()), operation).cmd(bytes).build();
        // SAFETY: the device and the tag's buffer live as long as the ring, which is dropped before
        // them. No code touches the buffer until the driver returns the tag.
        unsafe { self.ring.submission().push(&entry.user_data(tag.into())) }
            .map_err(io::Error::other)
    }
}

impl Drop for QueueRing {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no reference to it is left.
        let _ = unsafe { rustix::mm::munmap(self.descriptors.as_ptr().cast(), self.mapped) };
    }
}
