//! The store's directory: its lock, and the names of its files.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use aquifer_page::{Group, LeaseId};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, Stat, fstat, openat, statat, unlinkat};
use rustix::io::Errno;

use crate::{StoreError, guarded, tmpfs};

/// The name of the file whose `flock` the store's process holds.
const LOCK: &str = "lock";

/// The store's directory, locked against other processes while this value lives.
#[derive(Debug)]
pub(crate) struct Dir {
    path: PathBuf,
    directory: OwnedFd,
    /// Holds the `flock` on the directory's `lock` file, which the drop removes.
    lock: File,
}

impl Drop for Dir {
    fn drop(&mut self) {
        // No other process removes a file that this one holds, and `lock_file` does not keep a
        // removed one. A file that stays for another reason does no harm.
        if is_named(&self.directory, &self.lock) {
            let _ = unlinkat(&self.directory, LOCK, AtFlags::empty());
        }
    }
}

/// A file of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// The pages of a lease that does not share.
    Pages(LeaseId),
    /// The page table of a lease that shares with its group. The name contains the group, so that
    /// the store knows which group's frames the table refers to even if it cannot parse the record.
    Table(LeaseId, Group),
    /// The frames of a group.
    Frames(Group),
    Record(LeaseId),
    /// A record whose writer died before it replaced the old record.
    Draft(LeaseId),
}

impl Entry {
    /// Parses a file name; returns `None` for a file that is not the store's.
    fn parse(name: &str) -> Option<Self> {
        if let Some(group) = name.strip_suffix(".frames") {
            return Some(Self::Frames(group.parse().ok()?));
        }
        let (id, extension) = name.split_once('.')?;
        let id = id.parse().ok()?;
        match extension {
            "pages" => Some(Self::Pages(id)),
            "json" => Some(Self::Record(id)),
            "json.new" => Some(Self::Draft(id)),
            _ => Some(Self::Table(id, extension.strip_suffix(".table")?.parse().ok()?)),
        }
    }
}

impl Dir {
    /// Makes the directory and its parents if necessary, checks that it is on a tmpfs, and locks
    /// it.
    pub(crate) fn lock(path: &Path) -> Result<Self, StoreError> {
        tmpfs::for_store(path)?;
        let directory = guarded::open(path)?;
        check_tmpfs(&directory, path)?;
        tmpfs::warn_of_swap(path);
        let only_us = fs::Permissions::from_mode(0o700);
        fs::set_permissions(path, only_us).map_err(StoreError::file("make private", path))?;
        let lock = lock_file(&directory, path)?;
        Ok(Self { path: path.to_owned(), directory, lock })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn file(&self, entry: &Entry) -> PathBuf {
        self.path.join(match entry {
            Entry::Pages(id) => format!("{id}.pages"),
            Entry::Table(id, group) => format!("{id}.{group}.table"),
            Entry::Frames(group) => format!("{group}.frames"),
            Entry::Record(id) => format!("{id}.json"),
            Entry::Draft(id) => format!("{id}.json.new"),
        })
    }

    /// Lists the store's files; ignores others.
    pub(crate) fn list(&self) -> Result<Vec<Entry>, StoreError> {
        let fail = || StoreError::file("list", &self.path);
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(fail())? {
            let name = entry.map_err(fail())?.file_name();
            found.extend(name.to_str().and_then(Entry::parse));
        }
        Ok(found)
    }

    /// Creates a new sparse file of `length` bytes.
    pub(crate) fn create(&self, entry: &Entry, length: u64) -> Result<File, StoreError> {
        let path = self.file(entry);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(&path).map_err(StoreError::file("create", &path))?;
        file.set_len(length).map_err(StoreError::file("size", &path))?;
        Ok(file)
    }

    /// Opens an existing file; returns it and its length in bytes.
    pub(crate) fn open(&self, entry: &Entry) -> Result<(File, u64), StoreError> {
        let path = self.file(entry);
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
        let file = options.open(&path).map_err(StoreError::file("open", &path))?;
        let length = file.metadata().map_err(StoreError::file("examine", &path))?.len();
        Ok((file, length))
    }

    /// Deletes a file; a missing file is no error.
    pub(crate) fn delete(&self, entry: &Entry) -> Result<(), StoreError> {
        let path = self.file(entry);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(StoreError::file("delete", &path)(error))
            }
            _ => Ok(()),
        }
    }
}

fn check_tmpfs(directory: &OwnedFd, path: &Path) -> Result<(), StoreError> {
    let statfs = rustix::fs::fstatfs(directory)
        .map_err(|error| StoreError::file("examine", path)(error.into()))?;
    if tmpfs::is_tmpfs(&statfs) { Ok(()) } else { Err(StoreError::NotTmpfs(path.to_owned())) }
}

/// Takes the lock and writes this process's id into the file, for the error of the next process.
fn lock_file(directory: &OwnedFd, dir: &Path) -> Result<File, StoreError> {
    let path = dir.join(LOCK);
    // The process that held the lock may have removed the file after this one opened it. Another
    // process may lock a new file then, so a lock on the removed one excludes nobody.
    let mut file = loop {
        let file = open_locked(directory, dir, &path)?;
        if is_named(directory, &file) {
            break file;
        }
    };
    let write = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    write.map_err(StoreError::file("write", &path))?;
    Ok(file)
}

/// Returns whether the directory's `lock` is this file.
fn is_named(directory: &OwnedFd, file: &File) -> bool {
    let named = statat(directory, LOCK, AtFlags::SYMLINK_NOFOLLOW);
    let of = |stat: Stat| (stat.st_dev, stat.st_ino);
    named.is_ok_and(|named| fstat(file).is_ok_and(|file| of(file) == of(named)))
}

/// Opens or creates the file and takes its lock.
fn open_locked(directory: &OwnedFd, dir: &Path, path: &Path) -> Result<File, StoreError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = openat(directory, LOCK, flags, Mode::RUSR | Mode::WUSR);
    let mut file =
        File::from(opened.map_err(|error| StoreError::file("open", path)(error.into()))?);
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => {
            let mut pid = String::new();
            // Without the pid the error only says less.
            let _ = file.read_to_string(&mut pid);
            Err(StoreError::Busy { dir: dir.to_owned(), pid: pid.trim().to_owned() })
        }
        Err(error) => Err(StoreError::file("lock", path)(error.into())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use super::*;

    /// Locks the directory as [`Dir::lock`] does; the place of the directory does not matter here.
    fn lock(path: &Path) -> Result<Dir, StoreError> {
        let directory = OwnedFd::from(File::open(path).unwrap());
        let lock = lock_file(&directory, path)?;
        Ok(Dir { path: path.to_owned(), directory, lock })
    }

    #[test]
    fn the_lock_leaves_no_file_and_has_one_holder_at_a_time() {
        const THREADS: u32 = 4;
        const ROUNDS: u32 = 2_000;
        let dir = tempfile::tempdir().unwrap();
        let [holders, locked] = [AtomicU32::new(0), AtomicU32::new(0)];
        let contend = || {
            for _ in 0..ROUNDS {
                match lock(dir.path()) {
                    Ok(held) => {
                        assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                        locked.fetch_add(1, Ordering::SeqCst);
                        thread::yield_now();
                        assert_eq!(holders.fetch_sub(1, Ordering::SeqCst), 1);
                        drop(held);
                    }
                    Err(StoreError::Busy { .. }) => thread::yield_now(),
                    Err(error) => panic!("{error}"),
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(contend);
            }
        });
        assert!(locked.into_inner() >= THREADS);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_drop_spares_a_lock_of_another_process() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock(dir.path()).unwrap();
        // An operator removes the file, and another process makes its own.
        fs::remove_file(dir.path().join(LOCK)).unwrap();
        let other = lock(dir.path()).unwrap();
        drop(held);
        assert!(dir.path().join(LOCK).exists());
        drop(other);
        assert!(!dir.path().join(LOCK).exists());
    }

    #[test]
    fn every_file_is_known_by_its_name_whatever_its_group_is_called() {
        let null = || File::open("/dev/null").unwrap();
        let dir = Dir { path: "/store".into(), directory: null().into(), lock: null() };
        let id = LeaseId::random();
        let groups =
            ["red", "json", "a.table", "b.frames", &id.to_string(), &format!("{id}.pages")[..38]];
        let of_groups = groups.iter().flat_map(|name| {
            let group: Group = name.parse().unwrap();
            [Entry::Table(id, group.clone()), Entry::Frames(group)]
        });
        for entry in of_groups.chain([Entry::Pages(id), Entry::Record(id), Entry::Draft(id)]) {
            let path = dir.file(&entry);
            let name = path.file_name().unwrap().to_str().unwrap();
            assert_eq!(Entry::parse(name), Some(entry), "{name}");
        }
        for name in ["lock", "README", "x.pages", &format!("{id}.table"), ".frames"] {
            assert_eq!(Entry::parse(name), None, "{name}");
        }
    }
}
