//! The checks of memory: its limits, its accounting, and the memory that lends.

use aquifer_page::Bytes;
use aquifer_procfs::swaps::swaps;
use rustix::fs::StatFs;
use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;

use super::{Check, read};
use crate::cgroup::{Hierarchy, Version};

pub(super) fn checks() -> Vec<Check> {
    vec![
        cgroup(),
        swap_accounting(),
        pressure(),
        shm(),
        locked_memory(),
        overcommit(),
        swap(),
        regions(),
    ]
}

fn cgroup() -> Check {
    const NAME: &str = "memory cgroup";
    match Hierarchy::find() {
        Ok(hierarchy) => {
            let version = if hierarchy.version() == Version::V1 { 1 } else { 2 };
            Check::ok(NAME, format!("version {version} at {}", hierarchy.root().display()))
        }
        Err(error) => Check::missing(
            NAME,
            error.to_string(),
            "needed for 'aquifer run', 'aquifer demo' and agents that manage a cgroup; \
             mount cgroup2 on /sys/fs/cgroup",
        ),
    }
}

fn swap_accounting() -> Check {
    const NAME: &str = "swap accounting";
    match Hierarchy::find() {
        Ok(hierarchy) if hierarchy.counts_swap() => {
            Check::ok(NAME, "the kernel counts swap by cgroup")
        }
        _ => Check::warn(
            NAME,
            "the kernel does not count swap by cgroup: 'aquifer run --remote' cannot limit it",
            "boot with swapaccount=1",
        ),
    }
}

/// Checks userfaultfd, which regions need.
fn regions() -> Check {
    match aquifer_region_client::Userfault::new() {
        Ok(_) => Check::ok("regions", "this process can serve page faults (userfaultfd)"),
        Err(error) => Check::missing(
            "regions",
            format!("this process cannot serve page faults as 'aquifer region' must: {error}"),
            "use Linux 6.7 or later, as root",
        ),
    }
}

fn pressure() -> Check {
    match read("/proc/pressure/memory") {
        Some(_) => Check::ok("pressure", "/proc/pressure/memory exists (PSI)"),
        None => Check::warn(
            "pressure",
            "no /proc/pressure/memory: agents notice overload only by their thresholds",
            "boot with psi=1, or use a kernel built with CONFIG_PSI",
        ),
    }
}

/// tmpfs's magic number in statfs(2); devtmpfs on /dev has the same.
pub(super) const TMPFS_MAGIC: i64 = 0x0102_1994;

fn shm() -> Check {
    const NAME: &str = "/dev/shm";
    let remedy = "mount -t tmpfs -o size=80% tmpfs /dev/shm, or give --dir another tmpfs";
    match rustix::fs::statfs(NAME) {
        Err(error) => Check::missing(
            NAME,
            format!("a lender keeps its leases there, but it does not exist: {error}"),
            remedy,
        )
        .essential(),
        Ok(fs) if fs.f_type != TMPFS_MAGIC || !is_mount_point(NAME) => {
            Check::missing(NAME, "a lender keeps its leases there, but it is not a tmpfs", remedy)
                .essential()
        }
        Ok(fs) => shm_size(&fs),
    }
}

fn is_mount_point(path: &str) -> bool {
    let device = |path: &str| rustix::fs::stat(path).map(|stat| stat.st_dev);
    device(path) != device(&format!("{path}/.."))
}

/// Checks the size of /dev/shm: container runtimes default to 64 MiB, the kernel to half of RAM.
fn shm_size(fs: &StatFs) -> Check {
    let bytes = |blocks: u64| Bytes(blocks * u64::try_from(fs.f_bsize).unwrap_or(0));
    let (size, free) = (bytes(fs.f_blocks), bytes(fs.f_bavail));
    // Root's lenders mount a tmpfs of their own below it, as large as 80 % of RAM.
    let found =
        format!("tmpfs of {size}, {free} free: the most that users other than root can lend");
    let host = rustix::system::sysinfo();
    let total = Bytes(host.totalram * u64::from(host.mem_unit));
    if size.pages() < total.pages() / 2 {
        Check::warn("/dev/shm", found, "mount -o remount,size=80% /dev/shm")
    } else {
        Check::ok("/dev/shm", found)
    }
}

fn locked_memory() -> Check {
    const NAME: &str = "locked memory";
    let held = rustix::thread::capabilities(None);
    if held.is_ok_and(|held| held.effective.contains(CapabilitySet::IPC_LOCK)) {
        return Check::ok(NAME, "this process may lock all memory");
    }
    match getrlimit(Resource::Memlock).current {
        None => Check::ok(NAME, "no limit"),
        Some(limit) => Check::warn(
            NAME,
            format!(
                "limited to {}: the kernel could swap out lent pages and the swap path itself",
                Bytes(limit)
            ),
            "run with CAP_IPC_LOCK, or raise RLIMIT_MEMLOCK (systemd: LimitMEMLOCK=infinity)",
        ),
    }
}

fn overcommit() -> Check {
    match read("/proc/sys/vm/overcommit_memory").as_deref() {
        Some("2") => Check::warn(
            "overcommit",
            "vm.overcommit_memory = 2: the kernel refuses allocations that pool swap could hold",
            "sysctl vm.overcommit_memory=0",
        ),
        Some(mode) => Check::ok("overcommit", format!("vm.overcommit_memory = {mode}")),
        None => Check::warn("overcommit", "vm.overcommit_memory cannot be read", "mount /proc"),
    }
}

fn swap() -> Check {
    match swaps() {
        Err(_) => Check::missing(
            "swap",
            "the kernel has no /proc/swaps",
            "use a kernel built with CONFIG_SWAP",
        )
        .essential(),
        Ok(swaps) => {
            let devices: Vec<_> =
                swaps.iter().map(|swap| swap.path.display().to_string()).collect();
            let found = if devices.is_empty() {
                "none in use".to_owned()
            } else {
                format!("in use: {}", devices.join(", "))
            };
            Check::ok("swap", found)
        }
    }
}
