//! Directories in which only root and this user can create or replace files.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, fstat, mkdirat, openat, statat};
use rustix::io::Errno;

use crate::StoreError;

const GROUP_OR_OTHERS_WRITE: u32 = 0o022;

/// In a directory with this bit only an entry's owner, or the directory's, may rename or delete it.
const STICKY: u32 = 0o1000;

/// Opens a directory and makes it and its parents, for this user only, if they are missing. Follows
/// no symbolic link.
///
/// # Errors
/// [`StoreError::Unguarded`] with the first directory on the path that other users could change;
/// [`StoreError::File`] if the system refuses to find, make or open one.
pub(crate) fn open(path: &Path) -> Result<OwnedFd, StoreError> {
    let path = std::path::absolute(path).map_err(StoreError::file("find", path))?;
    let mut names = path.components().peekable();
    let mut at = PathBuf::new();
    let mut opened: Option<OwnedFd> = None;
    while let Some(name) = names.next() {
        at.push(name);
        let parent = opened.as_ref().map_or(CWD, AsFd::as_fd);
        let entered = enter(parent, name, &at)?;
        check(&entered, &at, names.peek().is_none())?;
        opened = Some(entered);
    }
    opened.ok_or_else(|| StoreError::file("find", &path)(std::io::ErrorKind::NotFound.into()))
}

/// Opens the directory `name` in `parent`, or makes it; its path is `at`.
fn enter(parent: BorrowedFd<'_>, name: Component<'_>, at: &Path) -> Result<OwnedFd, StoreError> {
    let name: &OsStr = name.as_os_str();
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || openat(parent, name, flags, Mode::empty());
    let opened = match open() {
        Err(Errno::NOENT) => match mkdirat(parent, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => open(),
            Err(error) => return Err(StoreError::file("create", at)(error.into())),
        },
        opened => opened,
    };
    opened.map_err(|error| {
        let is_link = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_symlink());
        if is_link {
            unguarded(at, "is a symbolic link")
        } else {
            StoreError::file("open", at)(error.into())
        }
    })
}

fn check(directory: &OwnedFd, at: &Path, is_last: bool) -> Result<(), StoreError> {
    let stat = fstat(directory).map_err(|error| StoreError::file("examine", at)(error.into()))?;
    if stat.st_uid != 0 && stat.st_uid != rustix::process::geteuid().as_raw() {
        return Err(unguarded(at, format!("belongs to user {}", stat.st_uid)));
    }
    let keeps_entries = stat.st_mode & STICKY != 0 && !is_last;
    if stat.st_mode & GROUP_OR_OTHERS_WRITE != 0 && !keeps_entries {
        let mode = stat.st_mode & 0o7777;
        return Err(unguarded(
            at,
            format!("has mode {mode:o}, so that other users may write there"),
        ));
    }
    Ok(())
}

fn unguarded(at: &Path, why: impl Into<String>) -> StoreError {
    StoreError::Unguarded { at: at.to_owned(), why: why.into() }
}
