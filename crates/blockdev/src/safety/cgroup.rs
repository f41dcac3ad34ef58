//! Moving the process out of its memory cgroup.
//!
//! At the limit of its cgroup, a process waits until pages of the cgroup are swapped out. A server
//! in that cgroup would then wait for itself. It may be started from any cgroup, so it moves to the
//! root.

use std::fs;
use std::io;
use std::path::PathBuf;

use aquifer_procfs::mounts;

/// Moves the process to the root of the hierarchy that limits memory, v1 or v2.
pub(super) fn leave() -> io::Result<()> {
    let own = fs::read_to_string("/proc/self/cgroup")?;
    let mounted = fs::read_to_string("/proc/self/mounts")?;
    match memory_hierarchy(&own, &mounted) {
        Place::Root | Place::Unlimited => Ok(()),
        Place::Below(root) => fs::write(root.join("cgroup.procs"), "0"),
        Place::Hidden => Err(io::Error::new(
            io::ErrorKind::NotFound,
            "no cgroup file system with the memory controller is mounted",
        )),
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// In the root cgroup.
    Root,
    /// No hierarchy limits memory.
    Unlimited,
    /// In a cgroup below this root.
    Below(PathBuf),
    /// In a cgroup of a hierarchy that is not mounted here.
    Hidden,
}

/// Finds the process's memory cgroup in `/proc/self/cgroup` (`id:controllers:path`, without
/// controllers for v2), and the mount of its root in `/proc/self/mounts`.
fn memory_hierarchy(own: &str, mounted: &str) -> Place {
    let groups = || {
        own.lines().filter_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            Some((fields.next()?, fields.next()?))
        })
    };
    let v1 = groups().find(|(controllers, _)| controllers.split(',').any(|name| name == "memory"));
    let (group, mount) = match v1 {
        Some((_, group)) => {
            (group, mounts(mounted).find(|mount| mount.kind == "cgroup" && mount.has("memory")))
        }
        None => match groups().find(|(controllers, _)| controllers.is_empty()) {
            Some((_, group)) => (group, mounts(mounted).find(|mount| mount.kind == "cgroup2")),
            None => return Place::Unlimited,
        },
    };
    match (group, mount) {
        ("/", _) => Place::Root,
        (_, Some(mount)) => Place::Below(mount.path),
        (_, None) => Place::Hidden,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
                          cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                          cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n\
                          cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";

    #[test]
    fn a_v1_memory_group_is_left_by_its_own_hierarchy() {
        let place = memory_hierarchy("3:memory:/job\n2:cpu:/\n0::/\n", MOUNTS);
        assert_eq!(place, Place::Below("/sys/fs/cgroup/memory".into()));
    }

    #[test]
    fn a_v2_group_is_left_by_the_unified_hierarchy() {
        let place = memory_hierarchy("0::/system.slice/agent.service\n", MOUNTS);
        assert_eq!(place, Place::Below("/sys/fs/cgroup/unified".into()));
    }

    #[test]
    fn nothing_is_done_in_the_root_group() {
        assert_eq!(memory_hierarchy("3:memory:/\n0::/job\n", MOUNTS), Place::Root);
        assert_eq!(memory_hierarchy("0::/\n", MOUNTS), Place::Root);
        assert_eq!(memory_hierarchy("", MOUNTS), Place::Unlimited);
    }

    #[test]
    fn a_group_whose_root_is_not_mounted_is_reported() {
        assert_eq!(memory_hierarchy("0::/job\n", "proc /proc proc rw 0 0\n"), Place::Hidden);
    }
}
