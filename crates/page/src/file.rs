//! Atomic replacement of files: a reader finds the old content or the new, never a part.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Replaces the content of the file at `path` with `data`, in a file of mode 0600.
///
/// If the process is killed meanwhile, the file has the old content or the new. If the host loses
/// power, both may be lost: see [`replace_durably`]. The caller allows one writer of a path at a
/// time, because all use the draft `PATH.new`.
///
/// # Errors
/// The system's. The old content then stays in place.
pub fn replace(path: &Path, data: &[u8]) -> io::Result<()> {
    replace_with(path, data, |_| Ok(())).map(drop)
}

/// Replaces a file as [`replace`] does, and returns once the content survives a loss of power.
///
/// # Errors
/// As [`replace`]. If only the directory cannot be synced, the new content is in place.
pub fn replace_durably(path: &Path, data: &[u8]) -> io::Result<()> {
    replace_with(path, data, File::sync_all)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new("."))).and_then(|directory| directory.sync_all())
}

/// Replaces a file as [`replace`] does, and calls `prepare` with the new file before another
/// process can find it. `prepare` may lock it, for example. Returns the file, open for reading and
/// writing.
///
/// # Errors
/// As [`replace`], and the error of `prepare`.
pub fn replace_with(
    path: &Path,
    data: &[u8],
    prepare: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<File> {
    let draft = draft(path);
    let mut options = OpenOptions::new();
    // Never opens an existing draft, which may be a symbolic link.
    options.read(true).write(true).create_new(true).mode(0o600);
    let mut file = match options.open(&draft) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(&draft)?;
            options.open(&draft)?
        }
        file => file?,
    };
    let done =
        file.write_all(data).and_then(|()| prepare(&file)).and_then(|()| fs::rename(&draft, path));
    if let Err(error) = done {
        // The next call removes a draft that stays here.
        let _ = fs::remove_file(&draft);
        return Err(error);
    }
    Ok(file)
}

/// Returns whether the open file is the one at `path`. Another process may have replaced or removed
/// that since.
///
/// # Errors
/// When the metadata of `file` cannot be read. An error for `path` only makes the result `false`.
pub fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (ours, there) = (file.metadata()?, fs::metadata(path));
    Ok(there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())))
}

fn draft(path: &Path) -> PathBuf {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn directory(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("aquifer-{name}-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        directory
    }

    #[test]
    fn a_reader_finds_the_old_content_or_the_new() {
        let directory = directory("replaced");
        let path = directory.join("record.json");
        for write in [replace, replace_durably] {
            write(&path, b"old").unwrap();
            let mut reader = File::open(&path).unwrap();
            write(&path, b"the new content").unwrap();
            let mut old = String::new();
            reader.read_to_string(&mut old).unwrap();
            assert_eq!(
                (old.as_str(), fs::read_to_string(&path).unwrap().as_str()),
                ("old", "the new content")
            );
            assert!(!is_at(&reader, &path).unwrap());
        }
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1, "no draft is left");
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_draft_goes_through_no_link() {
        let directory = directory("linked");
        let (path, other) = (directory.join("record.json"), directory.join("other"));
        fs::write(&other, "another's").unwrap();
        std::os::unix::fs::symlink(&other, draft(&path)).unwrap();
        replace(&path, b"new").unwrap();
        assert_eq!(fs::read_to_string(&other).unwrap(), "another's");
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_failed_preparation_leaves_the_old_content() {
        let directory = directory("unprepared");
        let path = directory.join("record.json");
        replace(&path, b"old").unwrap();
        let failed = replace_with(&path, b"new", |_| Err(io::Error::other("no lock")));
        assert_eq!(failed.unwrap_err().to_string(), "no lock");
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
        fs::remove_dir_all(directory).unwrap();
    }
}
