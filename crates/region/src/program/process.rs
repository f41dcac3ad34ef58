//! The process of a program.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use aquifer_page::Bytes;
use aquifer_procfs::process;
use aquifer_region_client::Connection;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The process of a program, and its number of mappings.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// Readable once the process has ended.
    pub(super) pidfd: OwnedFd,
    /// The shared pages that it has unshared by writes, and whether it had too many mappings at the
    /// last check.
    cow_breaks: AtomicU64,
    crowded: AtomicBool,
}

/// The interval between checks of the number of mappings, in unshared pages.
const LOOK: u64 = 256;

/// Returns how many mappings a process may add before it reaches `share` of the kernel's limit
/// (`vm.max_map_count`). Beyond the limit, each mmap(2) of the program fails.
pub fn mappings_left(pid: u32, share: f64) -> u64 {
    let most = aquifer_procfs::number("/proc/sys/vm/max_map_count").unwrap_or(65_530);
    let have = process::read(pid, "maps").map_or(0, |maps| maps.lines().count() as u64);
    ((most as f64 * share) as u64).saturating_sub(have)
}

impl Process {
    /// Finds the process at the other end of a connection.
    pub(super) fn of(orders: &Connection) -> io::Result<Self> {
        let (pid, pidfd) = (orders.peer()?, orders.peer_process()?);
        let (cow_breaks, crowded) = (AtomicU64::new(0), AtomicBool::new(false));
        Ok(Self { pid, pidfd, cow_breaks, crowded })
    }

    /// Counts a write to a shared page, and returns whether the program should get no more
    /// mappings.
    pub(crate) fn is_crowded(&self) -> bool {
        if self.cow_breaks.fetch_add(1, Ordering::Relaxed) % LOOK == LOOK - 1 {
            self.crowded.store(mappings_left(self.pid, 0.85) == 0, Ordering::Relaxed);
        }
        self.crowded.load(Ordering::Relaxed)
    }

    /// Returns the name that the kernel has for it, and its process id.
    pub(super) fn name(&self) -> String {
        format!("{} (process {})", process::name(self.pid), self.pid)
    }

    /// Returns whether its process has ended, or ends within this time.
    pub(super) fn has_ended(&self, within: Duration) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        poll(&mut fds, Some(&timespec(within))).is_ok_and(|ready| ready > 0)
    }

    /// Returns the size of its pinned memory, to which devices may write regardless of its page
    /// table: fixed buffers of io_uring, RDMA. The memory may be the region's.
    pub(crate) fn pinned(&self) -> Bytes {
        process::size(self.pid, "VmPin")
    }
}

pub(super) fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) }
}
