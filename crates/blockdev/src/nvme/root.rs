//! Access to the kernel's files below a root directory.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Root of the kernel's files: `/`, or in tests a directory that imitates it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root(PathBuf);

impl Default for Root {
    fn default() -> Self {
        Self::at("/")
    }
}

impl Root {
    /// Takes the kernel's files from below `dir`.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self(dir.into())
    }

    /// Maps `path`, an absolute path on a real host, to the path below this root.
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Reads a file as trimmed text; `None` if it cannot be read.
    pub(crate) fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        fs::read_to_string(self.path(path)).ok().map(|text| text.trim().to_owned())
    }

    /// Writes `text` to one of the kernel's files in a single call. The file is created only below
    /// an imitated root: in a real one, `O_CREAT` would hide that the file is missing.
    pub(crate) fn write(&self, path: impl AsRef<Path>, text: &str) -> io::Result<()> {
        let imitated = self.is_imitated();
        let path = self.ready(path)?;
        let mut file =
            OpenOptions::new().write(true).create(imitated).truncate(imitated).open(path)?;
        match file.write(text.as_bytes())? {
            written if written == text.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// Creates a configfs object in the kernel.
    pub(crate) fn make_dir(&self, path: impl AsRef<Path>) -> io::Result<()> {
        fs::create_dir(self.ready(path)?)
    }

    /// Removes a configfs object, with the files and default groups that came with it. A missing
    /// object is no error.
    pub(crate) fn remove_dir(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let path = self.path(path);
        gone_is_fine(if self.is_imitated() {
            fs::remove_dir_all(path)
        } else {
            fs::remove_dir(path)
        })
    }

    /// Links one configfs object to another.
    pub(crate) fn link(&self, to: impl AsRef<Path>, path: impl AsRef<Path>) -> io::Result<()> {
        std::os::unix::fs::symlink(self.path(to), self.ready(path)?)
    }

    /// Removes such a link. A missing link is no error.
    pub(crate) fn remove_link(&self, path: impl AsRef<Path>) -> io::Result<()> {
        gone_is_fine(fs::remove_file(self.path(path)))
    }

    fn is_imitated(&self) -> bool {
        self.0 != Path::new("/")
    }

    /// Maps a path, and creates its parents below an imitated root. In a real root the kernel
    /// creates them.
    fn ready(&self, path: impl AsRef<Path>) -> io::Result<PathBuf> {
        let path = self.path(path);
        if let Some(parent) = path.parent().filter(|_| self.is_imitated()) {
            fs::create_dir_all(parent)?;
        }
        Ok(path)
    }

    /// Returns the sorted names in a directory; none if it does not exist.
    pub(crate) fn names(&self, path: impl AsRef<Path>) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(self.path(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let name =
            |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
        let mut names = entries.map(name).collect::<io::Result<Vec<_>>>()?;
        names.sort_unstable();
        Ok(names)
    }
}

fn gone_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
