//! Memory figures of one cgroup, v1 or v2 (cgroups(7)).

use std::io;
use std::path::{Path, PathBuf};

use aquifer_page::Bytes;

use super::{Meminfo, Reading, field, read_file};

/// One memory cgroup.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    version: Version,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Cgroup {
    /// Opens the cgroup at `path`, which must have the memory controller.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let version = if path.join("memory.limit_in_bytes").exists() {
            Version::V1
        } else if path.join("memory.current").exists() {
            Version::V2
        } else {
            let why = if path.exists() {
                "has no memory controller: it lacks memory.current (v2) and \
                 memory.limit_in_bytes (v1)"
            } else {
                "does not exist: create it first, with its limit"
            };
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("the cgroup {} {why}", path.display()),
            ));
        };
        Ok(Self { path: path.to_owned(), version })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn read(&self) -> io::Result<Reading> {
        let stat = read_file(&self.path.join("memory.stat"))?;
        let stat = |key: &str| {
            let missing =
                || invalid(format!("{}/memory.stat has no line '{key}'", self.path.display()));
            field(&stat, key).map(Bytes).ok_or_else(missing)
        };
        let (limit, usage, unused, swap_used) = match self.version {
            Version::V1 => {
                // In v1 `cache` also counts shared memory, which the kernel cannot drop.
                let droppable =
                    stat("total_cache")?.saturating_sub(stat("total_shmem").unwrap_or_default());
                let swap = stat("total_swap").unwrap_or_default();
                (
                    stat("hierarchical_memory_limit")?,
                    self.number("memory.usage_in_bytes")?,
                    droppable,
                    swap,
                )
            }
            Version::V2 => {
                let droppable =
                    stat("file")?.saturating_sub(stat("shmem")?) + stat("slab_reclaimable")?;
                let swap = self.number("memory.swap.current").unwrap_or_default();
                (self.limit_v2()?, self.number("memory.current")?, droppable, swap)
            }
        };
        let total = limit.min(Meminfo.read()?.total);
        Ok(Reading { total, used: usage.saturating_sub(unused), swap_used })
    }

    pub(super) fn oom_kills(&self) -> Option<u64> {
        let file = match self.version {
            Version::V1 => "memory.oom_control",
            Version::V2 => "memory.events",
        };
        field(&read_file(&self.path.join(file)).ok()?, "oom_kill")
    }

    /// Returns the lowest `memory.max` from this cgroup up to the root: v2 has no file that holds
    /// it.
    fn limit_v2(&self) -> io::Result<Bytes> {
        let mut limit = Bytes(u64::MAX);
        for dir in self.path.ancestors() {
            match self.number_in(dir, "memory.max") {
                Ok(max) => limit = limit.min(max),
                Err(error) if dir == self.path => return Err(error),
                Err(_) => break,
            }
        }
        Ok(limit)
    }

    fn number(&self, file: &str) -> io::Result<Bytes> {
        self.number_in(&self.path, file)
    }

    fn number_in(&self, dir: &Path, file: &str) -> io::Result<Bytes> {
        let path = dir.join(file);
        match read_file(&path)?.trim() {
            "max" => Ok(Bytes(u64::MAX)),
            text => text
                .parse()
                .map(Bytes)
                .map_err(|_| invalid(format!("{} holds '{text}', not a number", path.display()))),
        }
    }

    pub(super) fn contains_self(&self) -> bool {
        let Ok(procs) = read_file(&self.path.join("cgroup.procs")) else { return false };
        let own = std::process::id().to_string();
        procs.lines().any(|pid| pid == own)
    }
}

fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn cgroup(files: &[(&str, &str)]) -> (tempfile::TempDir, Cgroup) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let cgroup = Cgroup::open(dir.path()).unwrap();
        (dir, cgroup)
    }

    #[test]
    fn version_1_counts_anonymous_and_shared_memory_but_not_cache() {
        let (_dir, cgroup) = cgroup(&[
            ("memory.limit_in_bytes", "1000000\n"),
            ("memory.usage_in_bytes", "700000\n"),
            (
                "memory.stat",
                "cache 1\nhierarchical_memory_limit 1000000\ntotal_cache 300000\n\
                 total_shmem 100000\ntotal_swap 4096\n",
            ),
        ]);
        let reading = cgroup.read().unwrap();
        assert_eq!(
            reading,
            Reading { total: Bytes(1_000_000), used: Bytes(500_000), swap_used: Bytes(4096) }
        );
    }

    #[test]
    fn version_2_takes_the_lowest_limit_above_it() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("inner");
        fs::create_dir(&inner).unwrap();
        fs::write(dir.path().join("memory.max"), "900000\n").unwrap();
        for (name, text) in [
            ("memory.max", "max\n"),
            ("memory.current", "500000\n"),
            ("memory.swap.current", "8192\n"),
            ("memory.stat", "anon 1\nfile 200000\nshmem 50000\nslab_reclaimable 10000\n"),
        ] {
            fs::write(inner.join(name), text).unwrap();
        }
        let reading = Cgroup::open(&inner).unwrap().read().unwrap();
        assert_eq!(
            reading,
            Reading { total: Bytes(900_000), used: Bytes(340_000), swap_used: Bytes(8192) }
        );
    }

    #[test]
    fn a_directory_that_is_no_memory_cgroup_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Cgroup::open(dir.path()).unwrap_err().to_string().contains("no memory controller"));
        let gone = dir.path().join("gone");
        assert!(Cgroup::open(&gone).unwrap_err().to_string().contains("does not exist"));
    }
}
