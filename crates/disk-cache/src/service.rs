//! A running disk cache: its lock, its sockets and its servers.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use aquifer_control_socket::Serving;
use aquifer_nbd::client::Target;
use aquifer_nbd::server::{Security, Server};
use aquifer_page::{Bytes, Group, LeaseId};
use aquifer_region::process::GroupFiles;
use aquifer_transport::Address;

use super::control::{self, Asked};
use super::disk_registry::{DiskRegistry, Disks};
use super::lender::PageLender;
use super::remote_export::{Borrowers, RemoteExports};
use super::{CacheCounts, CacheError, CacheStatus, Options};

/// How long a cache may shrink before it reports the size reached.
const GIVING: Duration = Duration::from_secs(2);

/// Memory freed at a time: a fraction of a second's work.
const STEP: Bytes = Bytes::mib(256);

/// The disk cache of a group, being served. Dropping it ends the service, and leaves only the
/// clients' writes.
#[derive(Debug)]
pub struct Service {
    inner: Arc<Inner>,
    control: Option<Serving>,
    servers: Vec<Server>,
    files: GroupFiles,
    lock: Option<File>,
}

#[derive(Debug)]
struct Inner {
    group: Group,
    /// Whether requests to resize it are ignored.
    fixed: bool,
    ends_unused: bool,
    registry: Arc<DiskRegistry>,
    exports: Arc<RemoteExports>,
    /// The addresses at which it lends, once it does.
    lends: OnceLock<Vec<Address>>,
}

impl Service {
    /// Starts the cache of the group whose regions are in `regions_dir`. The new cache replaces one
    /// that was killed.
    ///
    /// # Errors
    /// [`CacheError::Busy`] if the group has a cache; other [`CacheError`]s if a socket, a file or
    /// memory is not available.
    pub fn start(regions_dir: &Path, group: Group, options: Options) -> Result<Self, CacheError> {
        let files = GroupFiles::new(regions_dir, &group);
        let lock = lock(&files, &group)?;
        let name = format!("{group}/{}", LeaseId::random());
        let lender = |target| {
            let target = Target { export: name.clone(), ..target };
            PageLender::new(target, options.borrows, options.encrypted)
        };
        let lenders = options.lenders.into_iter().map(lender).collect::<Result<_, _>>();
        let lenders = lenders.map_err(io("preparing to borrow for", files.directory()))?;
        let registry = DiskRegistry::new(options.size, lenders)
            .map_err(io("finding memory for", files.directory()))?;
        let registry = Arc::new(registry);
        let exports = Arc::new(RemoteExports::new(group.clone(), registry.pages.clone()));
        let Options { fixed, ends_unused, .. } = options;
        let lends = OnceLock::new();
        let inner = Arc::new(Inner { group, fixed, ends_unused, registry, exports, lends });
        let control = files.cache_control();
        let (servers, lock) = (Vec::new(), Some(lock));
        let mut this = Self { inner: inner.clone(), control: None, servers, files, lock };
        for (address, security) in options.lends {
            this.servers.push(Server::bind(
                &address,
                security,
                Arc::new(Borrowers(inner.exports.clone())),
            )?);
        }
        // Only this call sets it.
        let _ =
            inner.lends.set(this.servers.iter().map(|server| server.address().clone()).collect());
        this.control =
            Some(control::serve(&control, inner.clone()).map_err(io("listening at", &control))?);
        // Last, because VMs connect once this socket exists.
        let address = Address::Unix(this.files.cache_disks());
        let exports = Arc::new(Disks(inner.registry.clone()));
        this.servers.push(Server::bind(&address, Security::Plain, exports)?);
        Ok(this)
    }

    /// Returns the status.
    pub fn status(&self) -> CacheStatus {
        self.inner.status()
    }
}

impl Asked for Inner {
    fn status(&self) -> CacheStatus {
        let DiskRegistry { pages, traffic, .. } = &*self.registry;
        let [hits, misses] = pages.counts();
        CacheStatus {
            group: self.group.clone(),
            size: pages.size(),
            fixed: self.fixed,
            ends_unused: self.ends_unused,
            used: pages.used(),
            counts: CacheCounts {
                hits,
                misses,
                read_bytes: Bytes(traffic.read.load(Ordering::Relaxed)),
                written_bytes: Bytes(traffic.written.load(Ordering::Relaxed)),
            },
            disks: self.registry.disks(),
            lends: self.lends.get().cloned().unwrap_or_default(),
            lent: pages.lent(),
            borrowers: self.exports.borrowers(),
            lenders: pages.lenders().iter().map(PageLender::status).collect(),
        }
    }

    fn resize(&self, size: Bytes) {
        if self.fixed {
            return;
        }
        let deadline = Instant::now() + GIVING;
        let pages = &self.registry.pages;
        loop {
            let next = size.max(pages.size().saturating_sub(STEP));
            pages.resize(next);
            // The client hears the size reached.
            if next == size || Instant::now() > deadline {
                return;
            }
        }
    }

    fn release(&self, disk: &Path) -> io::Result<()> {
        self.registry.release(disk)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.servers.clear();
        self.control = None;
        for file in [self.files.cache_control(), self.files.cache_lock()] {
            // A missing file is no error.
            let _ = fs::remove_file(file);
        }
        self.lock = None;
        self.files.release();
    }
}

/// Takes the lock that makes this the only cache of its group.
fn lock(files: &GroupFiles, group: &Group) -> Result<File, CacheError> {
    let path = files.cache_lock();
    loop {
        files.create()?;
        let mut options = OpenOptions::new();
        let lock = options.create(true).truncate(false).write(true).mode(0o600).open(&path);
        let lock = match lock {
            // A cache that just ended has removed the directory.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            lock => lock.map_err(io("opening", &path))?,
        };
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(CacheError::Busy(group.clone())),
            Err(TryLockError::Error(error)) => return Err(io("locking", &path)(error)),
        }
        // A cache that just ended has removed the file, and another one may have made it anew.
        let is_there = lock
            .metadata()
            .is_ok_and(|lock| fs::metadata(&path).is_ok_and(|is| is.ino() == lock.ino()));
        if is_there {
            return Ok(lock);
        }
    }
}

fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CacheError {
    let path = path.to_owned();
    move |source| CacheError::Io { what, path, source }
}
