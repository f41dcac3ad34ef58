//! Files that are replaced whole: a reader finds what was there before or what is there now, and never a part.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Puts `data` in the place of what is in the file at `path`, for its owner only.
///
/// A process that is killed meanwhile leaves the old content or the new. A host that loses power may lose both: see
/// [`replace_durably`]. One writer of a path at a time; the draft is `PATH.new`.
///
/// # Errors
/// The system's; the old content is still there then.
pub fn replace(path: &Path, data: &[u8]) -> io::Result<()> {
    replace_with(path, data, |_| Ok(())).map(drop)
}

/// As [`replace`], and returns only once the content would outlive a loss of power.
///
/// # Errors
/// As [`replace`].
pub fn replace_durably(path: &Path, data: &[u8]) -> io::Result<()> {
    replace_with(path, data, File::sync_all)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new("."))).and_then(|directory| directory.sync_all())
}

/// As [`replace`], with something done to the new file before anybody can find it: to lock it, for example. Returns the file,
/// open for reading and writing.
///
/// # Errors
/// As [`replace`], and that of `prepare`.
pub fn replace_with(
    path: &Path,
    data: &[u8],
    prepare: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<File> {
    let draft = draft(path);
    let mut options = OpenOptions::new();
    // Never into what is there already, which may be a link.
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
        // What cannot be removed is removed by the next draft.
        let _ = fs::remove_file(&draft);
        return Err(error);
    }
    Ok(file)
}

/// Whether the open file is the one at `path`: it may have been replaced or removed since it was opened.
///
/// # Errors
/// The system's, but not that there is nothing at `path`.
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
    fn what_cannot_be_prepared_leaves_the_old_content() {
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
