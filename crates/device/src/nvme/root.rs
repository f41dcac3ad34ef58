use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Where the kernel's files are: `/`, except in tests, which have a directory that looks like it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root(PathBuf);

impl Default for Root {
    fn default() -> Self {
        Self::at("/")
    }
}

impl Root {
    /// The kernel's files as they are below `dir`.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self(dir.into())
    }

    /// What is called `path`, an absolute path, on a real host.
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The text of a file, trimmed; none where it cannot be read.
    pub(crate) fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        fs::read_to_string(self.path(path)).ok().map(|text| text.trim().to_owned())
    }

    /// Tells the kernel `text` through one of its files, in one piece. (Which the kernel makes itself: asked to make one, it
    /// does not say that there is none.)
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

    /// Has the kernel make an object of configfs.
    pub(crate) fn make_dir(&self, path: impl AsRef<Path>) -> io::Result<()> {
        fs::create_dir(self.ready(path)?)
    }

    /// Has the kernel remove one, which takes the files and groups that came with it along; one that is gone is fine.
    pub(crate) fn remove_dir(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let path = self.path(path);
        gone_is_fine(if self.is_imitated() {
            fs::remove_dir_all(path)
        } else {
            fs::remove_dir(path)
        })
    }

    /// Has the kernel bind one object of configfs to another.
    pub(crate) fn link(&self, to: impl AsRef<Path>, path: impl AsRef<Path>) -> io::Result<()> {
        std::os::unix::fs::symlink(self.path(to), self.ready(path)?)
    }

    /// Has the kernel undo that; a link that is gone is fine.
    pub(crate) fn remove_link(&self, path: impl AsRef<Path>) -> io::Result<()> {
        gone_is_fine(fs::remove_file(self.path(path)))
    }

    fn is_imitated(&self) -> bool {
        self.0 != Path::new("/")
    }

    /// The path; what the kernel would have above it is made where there is no kernel.
    fn ready(&self, path: impl AsRef<Path>) -> io::Result<PathBuf> {
        let path = self.path(path);
        if let Some(parent) = path.parent().filter(|_| self.is_imitated()) {
            fs::create_dir_all(parent)?;
        }
        Ok(path)
    }

    /// The names in a directory, sorted; none where there is no such directory.
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
