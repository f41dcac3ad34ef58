//! The place of the kernel's memory cgroups, and their version.

use std::fs;
use std::path::{Path, PathBuf};

use aquifer_procfs::Version;

use super::{CgroupError, failed};

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
    /// If there is none, or if /proc/self/mounts cannot be read.
    pub fn find() -> Result<Self, CgroupError> {
        let path = Path::new("/proc/self/mounts");
        let mounts = fs::read_to_string(path).map_err(|source| failed("reading", path, source))?;
        Self::among(&mounts).ok_or(CgroupError::NoMemoryController)
    }

    /// Returns the hierarchy's topmost directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the version of its interface.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Allows memory limits for cgroups right below the root; version 2 needs it, version 1 does
    /// not.
    ///
    /// # Errors
    /// If the kernel refuses (it takes root).
    pub fn enable(&self) -> Result<(), CgroupError> {
        let path = self.root.join("cgroup.subtree_control");
        if self.version == Version::V1 || has_memory(&path) {
            return Ok(());
        }
        fs::write(&path, "+memory").map_err(|source| failed("writing", &path, source))
    }

    /// Returns whether the kernel counts swap by cgroup.
    pub fn counts_swap(&self) -> bool {
        match self.version {
            Version::V1 => self.root.join("memory.memsw.limit_in_bytes").exists(),
            // The root of version 2 has no limit files. Without swap accounting, cgroups below the
            // root have none either.
            Version::V2 => fs::read_to_string("/proc/cmdline")
                .is_ok_and(|line| !line.contains("swapaccount=0")),
        }
    }

    /// Finds the hierarchy with the memory controller in a text like /proc/self/mounts.
    fn among(mounts: &str) -> Option<Self> {
        aquifer_procfs::mounts(mounts).find_map(|mount| {
            let version = match mount.kind {
                "cgroup" if mount.has("memory") => Version::V1,
                "cgroup2" if has_memory(&mount.path.join("cgroup.controllers")) => Version::V2,
                _ => return None,
            };
            Some(Self { root: mount.path, version })
        })
    }

    /// Returns a hierarchy in a directory of the caller's choice, for tests without the kernel.
    #[cfg(test)]
    pub(super) fn at(root: &Path, version: Version) -> Self {
        Self { root: root.to_owned(), version }
    }
}

/// Returns whether a file that lists controllers lists `memory`.
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
