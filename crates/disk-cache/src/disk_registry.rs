//! The disks that are served, and their clients.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use aquifer_nbd::server::{self, Exports, Peer, Refused, Storage, Zeroes};
use aquifer_page::{Bytes, lock};
use aquifer_transport::serving::Connections;

use super::disk::{Disk, Traffic};
use super::file::{DiskFile, Identity, identity};
use super::lender::PageLender;
use super::pages::Pages;
use super::{ARRIVING, DiskStatus, READ_ONLY};

/// The open disks, by the identity of their files. The first client opens a disk. When the last
/// client is gone, the disk is closed and its pages are dropped, so that later changes by others
/// are seen.
#[derive(Debug)]
pub(super) struct DiskRegistry {
    pub(super) pages: Arc<Pages>,
    pub(super) traffic: Arc<Traffic>,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    disks: HashMap<Identity, Entry>,
    next: u32,
}

#[derive(Debug)]
struct Entry {
    disk: Arc<Disk>,
    path: PathBuf,
    /// The process that may write the disk, if it is known; the outer `None` if the disk is
    /// read-only.
    writer: Option<Option<u32>>,
    connections: u64,
}

/// A client's handle to a disk.
#[derive(Debug)]
struct Handle {
    disk: Arc<Disk>,
    identity: Identity,
    registry: Arc<DiskRegistry>,
}

/// The NBD server's view of the open disks.
#[derive(Debug)]
pub(super) struct Disks(pub(super) Arc<DiskRegistry>);

impl DiskRegistry {
    pub(super) fn new(size: Bytes, lenders: Vec<PageLender>) -> io::Result<Self> {
        Ok(Self {
            pages: Arc::new(Pages::new(size, lenders)?),
            traffic: Arc::default(),
            open: Mutex::default(),
        })
    }

    /// Lists the open disks.
    pub(super) fn disks(&self) -> Vec<DiskStatus> {
        let open = lock(&self.open);
        let status = |entry: &Entry| DiskStatus {
            path: entry.path.clone(),
            read_only: entry.writer.is_none(),
            held: entry.disk.is_held(),
            connections: entry.connections,
        };
        let mut disks: Vec<_> = open.disks.values().map(status).collect();
        disks.sort_by(|one, two| one.path.cmp(&two.path));
        disks
    }

    /// Unlocks a disk whose VM has moved to another host. A disk that is not open is not locked.
    pub(super) fn release(&self, path: &Path) -> io::Result<()> {
        let identity = identity(&fs::metadata(path)?);
        let disk = {
            let open = lock(&self.open);
            let entry = open.disks.get(&identity).filter(|entry| entry.writer.is_some());
            entry.map(|entry| entry.disk.clone())
        };
        disk.map_or(Ok(()), |disk| disk.release())
    }

    /// Opens a disk, and locks it unless its VM is `arriving`.
    fn open(
        self: &Arc<Self>,
        path: &Path,
        (writer, arriving): (Option<Option<u32>>, bool),
    ) -> Result<Handle, String> {
        let mut open = lock(&self.open);
        let cannot = |error: io::Error| format!("cannot open {}: {error}", path.display());
        let identity = identity(&fs::metadata(path).map_err(cannot)?);
        if let Some(entry) = open.disks.get_mut(&identity) {
            if entry.writer != writer {
                return Err(entry.taken(path));
            }
            entry.connections += 1;
            return Ok(Handle { disk: entry.disk.clone(), identity, registry: self.clone() });
        }
        let file = DiskFile::open(path, writer.is_none()).map_err(cannot)?;
        if !arriving {
            file.lock().map_err(cannot)?;
        }
        // The path may name another file by now.
        let identity = file.identity().map_err(cannot)?;
        let number = open.next;
        open.next = number.checked_add(1).ok_or("too many disks were opened: restart the cache")?;
        let (pages, traffic) = (self.pages.clone(), self.traffic.clone());
        let (read_only, held) = (writer.is_none(), !arriving);
        let disk = Arc::new(Disk::new(number, file, (read_only, held), pages, traffic));
        let entry = Entry { disk: disk.clone(), path: path.to_owned(), writer, connections: 1 };
        open.disks.insert(identity, entry);
        Ok(Handle { disk, identity, registry: self.clone() })
    }
}

impl Entry {
    fn taken(&self, path: &Path) -> String {
        let path = path.display();
        match self.writer {
            None => format!("other VMs read {path}: open it read-only, or stop those VMs first"),
            Some(Some(process)) => format!(
                "process {process} has {path} open for writing, and a disk has one writer at a \
                 time: stop the VM of that process first"
            ),
            Some(None) => format!("another process has {path} open for writing"),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut open = lock(&self.registry.open);
        let Some(entry) = open.disks.get_mut(&self.identity) else { return };
        entry.connections -= 1;
        if entry.connections == 0 {
            self.disk.close();
            open.disks.remove(&self.identity);
        }
    }
}

impl Connections for Disks {}

impl Exports for Disks {
    fn open(&self, name: &str, peer: &Peer) -> Result<Storage, Refused> {
        let (path, writer, arriving) = match name.strip_prefix(READ_ONLY) {
            Some(path) => (path, None, false),
            None => {
                let path = name.strip_prefix(ARRIVING);
                (path.unwrap_or(name), Some(peer.process), path.is_some())
            }
        };
        if !path.starts_with('/') {
            return Err(Refused::Unknown(name.to_owned()));
        }
        let handle =
            self.0.open(Path::new(path), (writer, arriving)).map_err(Refused::Forbidden)?;
        Ok(Storage::Disk(Arc::new(handle)))
    }

    fn list(&self, _: &Peer) -> Vec<String> {
        let name = |disk: DiskStatus| {
            let path = disk.path.to_string_lossy();
            if disk.read_only { format!("{READ_ONLY}{path}") } else { path.into_owned() }
        };
        self.0.disks().into_iter().map(name).collect()
    }
}

impl server::Disk for Handle {
    fn size(&self) -> Bytes {
        self.disk.size()
    }

    fn is_read_only(&self) -> bool {
        self.disk.is_read_only()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.disk.read(offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.disk.write(offset, from)
    }

    fn flush(&self) -> io::Result<()> {
        self.disk.flush()
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        self.disk.trim(offset, length)
    }

    fn write_zeroes(&self, offset: u64, length: u64, how: Zeroes) -> io::Result<()> {
        self.disk.write_zeroes(offset, length, how)
    }
}
