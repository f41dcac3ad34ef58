use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use aquifer_page::LeaseId;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::StoreError;

/// `TMPFS_MAGIC` of `linux/magic.h`.
const TMPFS_MAGIC: u32 = 0x0102_1994;

/// The store's directory, which is ours alone as long as this lives.
#[derive(Debug)]
pub(crate) struct Dir {
    path: PathBuf,
    /// Holds the lock.
    _lock: File,
}

/// A file that belongs to a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Pages,
    Record,
    /// A record that was being written when its writer died.
    Draft,
}

impl Dir {
    /// Makes the directory if need be (its parents too), checks that it is RAM, and locks it.
    pub(crate) fn lock(path: &Path) -> Result<Self, StoreError> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(StoreError::file("create", path))?;
        check_tmpfs(path)?;
        let only_us = fs::Permissions::from_mode(0o700);
        fs::set_permissions(path, only_us).map_err(StoreError::file("make private", path))?;
        let lock = lock_file(path)?;
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The name of a lease's file.
    pub(crate) fn file(&self, id: LeaseId, kind: Kind) -> PathBuf {
        let extension = match kind {
            Kind::Pages => "pages",
            Kind::Record => "json",
            Kind::Draft => "json.new",
        };
        self.path.join(format!("{id}.{extension}"))
    }

    /// All files of leases in the directory; what has another name is none of our business.
    pub(crate) fn list(&self) -> Result<Vec<(LeaseId, Kind)>, StoreError> {
        let fail = || StoreError::file("list", &self.path);
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(fail())? {
            let name = entry.map_err(fail())?.file_name();
            let Some((id, extension)) = name.to_str().and_then(|name| name.split_once('.')) else { continue };
            let kind = match extension {
                "pages" => Kind::Pages,
                "json" => Kind::Record,
                "json.new" => Kind::Draft,
                _ => continue,
            };
            if let Ok(id) = id.parse() {
                found.push((id, kind));
            }
        }
        Ok(found)
    }

    /// Deletes a lease's file; one that is not there is as good as deleted.
    pub(crate) fn delete(&self, id: LeaseId, kind: Kind) -> Result<(), StoreError> {
        let path = self.file(id, kind);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(StoreError::file("delete", &path)(error))
            }
            _ => Ok(()),
        }
    }
}

fn check_tmpfs(path: &Path) -> Result<(), StoreError> {
    let statfs = rustix::fs::statfs(path).map_err(|error| StoreError::file("examine", path)(error.into()))?;
    // The type of `f_type` differs between architectures; the number fits all of them.
    if statfs.f_type as u32 == TMPFS_MAGIC { Ok(()) } else { Err(StoreError::NotTmpfs(path.to_owned())) }
}

/// Takes the lock and writes our process id into it, for the next one's error.
fn lock_file(dir: &Path) -> Result<File, StoreError> {
    let path = dir.join("lock");
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let mut file = options.open(&path).map_err(StoreError::file("open", &path))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            let mut pid = String::new();
            // An unreadable pid only makes the error poorer.
            let _ = file.read_to_string(&mut pid);
            return Err(StoreError::Busy { dir: dir.to_owned(), pid: pid.trim().to_owned() });
        }
        Err(error) => return Err(StoreError::file("lock", &path)(error.into())),
    }
    let write = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    write.map_err(StoreError::file("write", &path))?;
    Ok(file)
}
