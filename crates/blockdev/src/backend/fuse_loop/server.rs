//! The FUSE file system that contains a volume as a file.

use std::cell::{Cell, RefCell};
use std::ffi::OsStr;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use aquifer_page::{PAGE_SIZE, WorkerId, lock};
use aquifer_transport::poll_token::PollToken;
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyStatfs, ReplyWrite, Request, WriteFlags,
};

use super::ballast::Arrivals;
use crate::Disk;
use crate::backend::MAX_REQUEST;
use crate::safety::touch_stack;

/// Name of the file through which each worker is warmed up; see [`Server::warm_up`].
pub(super) const WARM_UP_NAME: &str = "warm-up";

const ROOT: INodeNo = INodeNo(1);
const DISK: INodeNo = INodeNo(2);
const WARM_UP: INodeNo = INodeNo(3);

/// Cache lifetime of names and attributes. No file changes without the kernel's knowledge, so the
/// kernel may keep them.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// Time within which all workers must have received their warm-up write.
const WARM_UP_TIMEOUT: Duration = Duration::from_secs(10);

/// More than a loop device's queue holds, so that FUSE never queues a request itself.
const MAX_IN_FLIGHT: u16 = 1024;

thread_local! {
    static WORKER: Cell<Option<WorkerId>> = const { Cell::new(None) };
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A file system of one file, the volume. `workers` threads serve it and share only the disk and
/// the token.
pub(super) struct Server {
    name: String,
    disk: Arc<dyn Disk>,
    workers: usize,
    next_worker: AtomicUsize,
    poll_token: Arc<PollToken>,
    arrivals: Arc<Arrivals>,
    met: Mutex<usize>,
    all_met: Condvar,
}

impl Server {
    /// Creates a server that calls the volume file `name`.
    pub(super) fn new(
        disk: Arc<dyn Disk>,
        workers: usize,
        name: String,
        poll_token: Arc<PollToken>,
        arrivals: Arc<Arrivals>,
    ) -> Self {
        Self {
            name,
            disk,
            workers,
            next_worker: AtomicUsize::new(0),
            poll_token,
            arrivals,
            met: Mutex::new(0),
            all_met: Condvar::new(),
        }
    }

    /// Returns the calling worker thread. The threads belong to one session, so a number stays
    /// valid once assigned.
    fn worker(&self) -> WorkerId {
        WORKER.get().unwrap_or_else(|| {
            let worker = WorkerId(self.next_worker.fetch_add(1, Ordering::Relaxed));
            WORKER.set(Some(worker));
            worker
        })
    }

    /// Prepares the calling worker to serve without a page fault or an allocation.
    ///
    /// [`super::warm_up`] sends as many writes of the largest size as there are workers. Each
    /// worker holds its write until all the others have theirs, so each gets exactly one. The
    /// kernel has then copied a full request into each worker's receive buffer, which makes that
    /// buffer resident. If the process locks its memory, the buffer is also locked. Each worker
    /// then has its index, its buffer and its connections.
    fn warm_up(&self) -> io::Result<()> {
        let worker = self.worker();
        touch_stack();
        self.poll_token.join();
        BUFFER.with_borrow_mut(|buffer| {
            buffer.resize(MAX_REQUEST, 0);
            buffer.fill(1);
            self.disk.read(worker, 0, &mut buffer[..PAGE_SIZE])
        })?;
        let mut met = lock(&self.met);
        *met += 1;
        self.all_met.notify_all();
        let waited =
            self.all_met.wait_timeout_while(met, WARM_UP_TIMEOUT, |met| *met < self.workers);
        let (_met, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }

    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, size) = match inode {
            ROOT => (FileType::Directory, 0),
            DISK => (FileType::RegularFile, self.disk.capacity().0),
            WARM_UP => (FileType::RegularFile, (self.workers * MAX_REQUEST) as u64),
            _ => return None,
        };
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size / 512,
            atime: SystemTime::UNIX_EPOCH,
            mtime: SystemTime::UNIX_EPOCH,
            ctime: SystemTime::UNIX_EPOCH,
            crtime: SystemTime::UNIX_EPOCH,
            kind,
            perm: if kind == FileType::Directory { 0o700 } else { 0o600 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: PAGE_SIZE as u32,
            flags: 0,
        })
    }
}

impl Filesystem for Server {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let refused = |what: &str| {
            let why = format!("the kernel's FUSE does not support {what}");
            io::Error::new(io::ErrorKind::Unsupported, why)
        };
        config
            .add_capabilities(InitFlags::FUSE_ASYNC_DIO)
            .map_err(|_| refused("asynchronous direct I/O"))?;
        config
            .set_max_write(MAX_REQUEST as u32)
            .map_err(|_| refused("writes of the needed size"))?;
        config
            .set_max_background(MAX_IN_FLIGHT)
            .map_err(|_| refused("enough requests in flight"))?;
        config
            .set_congestion_threshold(MAX_IN_FLIGHT)
            .map_err(|_| refused("so high a congestion threshold"))?;
        Ok(())
    }

    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let inode = match name.to_str() {
            Some(WARM_UP_NAME) => WARM_UP,
            Some(name) if name == self.name => DISK,
            _ => return reply.error(Errno::ENOENT),
        };
        match self.attributes(inode) {
            Some(attributes) => reply.entry(&FOREVER, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        match self.attributes(inode) {
            Some(attributes) => reply.attr(&FOREVER, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, _inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let flags = FopenFlags::FOPEN_DIRECT_IO
            | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
            | FopenFlags::FOPEN_NOFLUSH;
        reply.opened(FileHandle(0), flags);
    }

    fn release(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn read(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.poll_token.begin();
        let arrived = self.arrivals.arrive();
        BUFFER.with_borrow_mut(|buffer| {
            let Some(data) = buffer.get_mut(..size as usize) else {
                return reply.error(Errno::EINVAL);
            };
            match self.disk.read(self.worker(), offset, data) {
                Ok(()) => reply.data(data),
                Err(error) => reply.error(errno(&error)),
            }
        });
        drop(arrived);
        self.poll_token.take();
    }

    fn write(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.poll_token.begin();
        let arrived = self.arrivals.arrive();
        let done = match inode {
            DISK => self.disk.write(self.worker(), offset, data),
            _ => self.warm_up(),
        };
        match done {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(errno(&error)),
        }
        drop(arrived);
        self.poll_token.take();
    }

    fn fallocate(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        if mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) == 0 {
            return reply.error(Errno::EOPNOTSUPP);
        }
        self.poll_token.begin();
        let arrived = self.arrivals.arrive();
        done(self.disk.discard(self.worker(), offset, length), reply);
        drop(arrived);
        self.poll_token.take();
    }

    fn fsync(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        self.poll_token.begin();
        let arrived = self.arrivals.arrive();
        done(self.disk.flush(self.worker()), reply);
        drop(arrived);
        self.poll_token.take();
    }

    /// Reports the block size, which the loop driver uses as the discard granularity.
    fn statfs(&self, _request: &Request, _inode: INodeNo, reply: ReplyStatfs) {
        let blocks = self.disk.capacity().pages();
        reply.statfs(blocks, 0, 0, 2, 0, PAGE_SIZE as u32, 255, PAGE_SIZE as u32);
    }
}

fn done(result: io::Result<()>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(&error)),
    }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO))
}
