//! Where the kernel's memory cgroups are and which version they have.

use std::fs;
use std::path::{Path, PathBuf};

use super::{CgroupError, failed};

/// The two interfaces to cgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Version {
    /// A hierarchy a controller, `memory.limit_in_bytes`.
    V1,
    /// One hierarchy, `memory.max`.
    V2,
}

/// The hierarchy that has the memory controller.
#[derive(Debug, Clone)]
pub struct Hierarchy {
    root: PathBuf,
    version: Version,
}

impl Hierarchy {
    /// Finds the hierarchy that has the memory controller among the mounted ones.
    ///
    /// # Errors
    /// If there is none.
    pub fn find() -> Result<Self, CgroupError> {
        let path = Path::new("/proc/self/mounts");
        let mounts = fs::read_to_string(path).map_err(|source| failed("reading", path, source))?;
        Self::among(&mounts).ok_or(CgroupError::NoMemoryController)
    }

    /// The hierarchy's topmost directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Lets cgroups right below the root have memory limits: version 2 has to be told.
    ///
    /// # Errors
    /// If the caller may not (it takes root).
    pub fn enable(&self) -> Result<(), CgroupError> {
        let path = self.root.join("cgroup.subtree_control");
        if self.version == Version::V1 || has_memory(&path) {
            return Ok(());
        }
        fs::write(&path, "+memory").map_err(|source| failed("writing", &path, source))
    }

    /// Whether the kernel counts swap by cgroup.
    pub fn counts_swap(&self) -> bool {
        match self.version {
            Version::V1 => self.root.join("memory.memsw.limit_in_bytes").exists(),
            // The root of version 2 has no limits to look at; without swap accounting a cgroup below it has none either.
            Version::V2 => fs::read_to_string("/proc/cmdline")
                .is_ok_and(|line| !line.contains("swapaccount=0")),
        }
    }

    /// The hierarchy with the memory controller in a text like /proc/self/mounts.
    fn among(mounts: &str) -> Option<Self> {
        mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let root = PathBuf::from(fields.next()?);
            let (kind, options) = (fields.next()?, fields.next()?);
            match kind {
                "cgroup" if options.split(',').any(|option| option == "memory") => {
                    Some(Self { root, version: Version::V1 })
                }
                "cgroup2" if has_memory(&root.join("cgroup.controllers")) => {
                    Some(Self { root, version: Version::V2 })
                }
                _ => None,
            }
        })
    }

    /// A hierarchy at a place of the caller's choice, for tests without the kernel's help.
    #[cfg(test)]
    pub(super) fn at(root: &Path, version: Version) -> Self {
        Self { root: root.to_owned(), version }
    }
}

/// Whether a file that lists controllers lists `memory`.
fn has_memory(path: &Path) -> bool {
    fs::read_to_string(path)
        .is_ok_and(|text| text.split_whitespace().any(|controller| controller == "memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_1_is_found_by_its_memory_option() {
        let mounts =
            "cgroup /c/cpu cgroup rw,cpu 0 0\ncgroup /c/memory cgroup rw,relatime,memory 0 0\n";
        let found = Hierarchy::among(mounts).unwrap();
        assert_eq!((found.root(), found.version()), (Path::new("/c/memory"), Version::V1));
    }

    #[test]
    fn version_2_counts_only_where_it_offers_memory() {
        let dir = tempfile::tempdir().unwrap();
        let mounts = format!("cgroup2 {} cgroup2 rw 0 0\n", dir.path().display());
        fs::write(dir.path().join("cgroup.controllers"), "cpu hugetlb\n").unwrap();
        assert!(Hierarchy::among(&mounts).is_none());
        fs::write(dir.path().join("cgroup.controllers"), "cpu memory\n").unwrap();
        assert_eq!(Hierarchy::among(&mounts).unwrap().version(), Version::V2);
    }
}
