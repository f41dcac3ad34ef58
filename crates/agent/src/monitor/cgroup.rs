//! Memory figures of one cgroup, v1 or v2 (cgroups(7)).

use std::io;
use std::path::Path;

use aquifer_page::Bytes;
use aquifer_procfs::{Cgroup, Version, line};

use super::{Reading, meminfo};

/// Opens the cgroup at `path`, which must have the memory controller.
pub(super) fn open(path: &Path) -> io::Result<Cgroup> {
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
    Ok(Cgroup { path: path.to_owned(), version })
}

pub(super) fn read(cgroup: &Cgroup) -> io::Result<Reading> {
    let file = cgroup.path.join("memory.stat");
    let stat = aquifer_procfs::read(&file)?;
    let stat = |key: &str| line(&file, &stat, key).map(Bytes);
    let (limit, unused) = match cgroup.version {
        Version::V1 => (
            stat("hierarchical_memory_limit")?,
            // In v1 `cache` also counts shared memory, which the kernel cannot drop.
            stat("total_cache")?.saturating_sub(stat("total_shmem").unwrap_or_default()),
        ),
        Version::V2 => (
            limit_v2(cgroup)?,
            stat("file")?.saturating_sub(stat("shmem")?) + stat("slab_reclaimable")?,
        ),
    };
    let total = limit.min(meminfo::read()?.total);
    let used = cgroup.memory_used()?.saturating_sub(unused);
    Ok(Reading { total, used, swap_used: cgroup.swap_used().unwrap_or_default() })
}

/// Returns the lowest `memory.max` from this cgroup up to the root: v2 has no file that holds it.
fn limit_v2(cgroup: &Cgroup) -> io::Result<Bytes> {
    let mut limit = u64::MAX;
    for dir in cgroup.path.ancestors() {
        match aquifer_procfs::number(dir.join("memory.max")) {
            Ok(max) => limit = limit.min(max),
            Err(error) if dir == cgroup.path => return Err(error),
            Err(_) => break,
        }
    }
    Ok(Bytes(limit))
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
        let cgroup = open(dir.path()).unwrap();
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
        let reading = read(&cgroup).unwrap();
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
        let reading = read(&open(&inner).unwrap()).unwrap();
        assert_eq!(
            reading,
            Reading { total: Bytes(900_000), used: Bytes(340_000), swap_used: Bytes(8192) }
        );
    }

    #[test]
    fn a_directory_that_is_no_memory_cgroup_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(open(dir.path()).unwrap_err().to_string().contains("no memory controller"));
        let gone = dir.path().join("gone");
        assert!(open(&gone).unwrap_err().to_string().contains("does not exist"));
    }
}
