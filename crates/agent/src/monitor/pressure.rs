//! Pressure stall information (PSI) as an early signal: tasks wait for memory before M_u is high.
//!
//! The kernel counts in `memory.pressure` (cgroup v2) or `/proc/pressure/memory` how long at least
//! one task waited ("some"). A trigger wakes the agent within its period; the share of time since
//! the last look decides.
//!
//! That count includes tasks that wait in an inner cgroup at its own limit, where memory of other
//! hosts does not help. The signal therefore counts only while the kernel reclaims for the watched
//! memory. `/proc/vmstat` leaves out reclaim at a cgroup's limit, and `memory.events.local` of a
//! cgroup counts only its own limits.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aquifer_procfs::{arm_trigger, fields, pressure, read};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::sys::watch;

/// A watcher of one pressure file.
#[derive(Debug)]
pub struct Pressure {
    path: PathBuf,
    threshold: f64,
    last: (Instant, Duration),
    shortage: Shortage,
    trigger: Option<AsyncFd<OwnedFd>>,
}

impl Pressure {
    /// Watches the pressure of the cgroup, or of the host if there is no cgroup. `threshold` is a
    /// share of time. Returns `None` if `threshold` is 0, the cgroup is v1, or the kernel has no
    /// PSI.
    pub fn open(cgroup: Option<&Path>, threshold: f64) -> Option<Self> {
        let of_cgroup =
            cgroup.map(|path| path.join("memory.pressure")).filter(|path| path.exists());
        // A v1 cgroup has no pressure file, and the host's file includes the stalls of its
        // neighbours.
        let path = match (of_cgroup, cgroup) {
            (Some(path), _) => path,
            (None, Some(_)) => return None,
            (None, None) => PathBuf::from("/proc/pressure/memory"),
        };
        Self::watch(path, Shortage::of(cgroup), threshold)
    }

    fn watch(path: PathBuf, shortage: Shortage, threshold: f64) -> Option<Self> {
        if threshold <= 0.0 {
            return None;
        }
        let stalled = stalled(&path).ok()?;
        let trigger = arm(&path, threshold).ok();
        Some(Self { path, threshold, last: (Instant::now(), stalled), shortage, trigger })
    }

    /// Tells whether tasks waited for more than the threshold's share of the time since the last
    /// call. Stalls only at the limits of inner cgroups do not count.
    pub fn is_high(&mut self) -> bool {
        let Ok(stalled) = stalled(&self.path) else { return false };
        let now = Instant::now();
        let share = (stalled.saturating_sub(self.last.1)).as_secs_f64()
            / (now - self.last.0).as_secs_f64().max(1e-3);
        self.last = (now, stalled);
        let is_short = self.shortage.has_grown();
        is_short && share > self.threshold
    }

    /// Waits until the kernel's trigger fires; forever if there is none.
    pub async fn fired(&self) {
        match &self.trigger {
            Some(trigger) => match trigger.ready(Interest::PRIORITY).await {
                Ok(mut ready) => ready.clear_ready(),
                Err(_) => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }
}

/// The kernel's reclaim because the watched memory itself was short.
#[derive(Debug)]
struct Shortage {
    vmstat: PathBuf,
    /// `memory.events.local` of the watched cgroup and its ancestors.
    events: Vec<PathBuf>,
    last: u64,
}

impl Shortage {
    fn of(cgroup: Option<&Path>) -> Self {
        let above =
            cgroup.into_iter().flat_map(Path::ancestors).map(|dir| dir.join("memory.events.local"));
        Self::at("/proc/vmstat".into(), above.filter(|path| path.exists()).collect())
    }

    fn at(vmstat: PathBuf, events: Vec<PathBuf>) -> Self {
        let mut shortage = Self { vmstat, events, last: 0 };
        shortage.last = shortage.count();
        shortage
    }

    /// Tells whether the count has grown since the last call.
    fn has_grown(&mut self) -> bool {
        let before = self.last;
        self.last = self.count();
        self.last > before
    }

    fn count(&self) -> u64 {
        let of_host = |name: &str| {
            name.starts_with("allocstall") || matches!(name, "pgscan_kswapd" | "pgscan_direct")
        };
        let of_cgroup = |name: &str| matches!(name, "high" | "max");
        let host = sum(&self.vmstat, of_host);
        self.events.iter().map(|path| sum(path, of_cgroup)).sum::<u64>() + host
    }
}

/// Sums the numbers in lines of `name number` for which `is_meant` accepts the name.
fn sum(path: &Path, is_meant: impl Fn(&str) -> bool) -> u64 {
    let text = read(path).unwrap_or_default();
    fields(&text).filter(|(name, _)| is_meant(name)).map(|(_, number)| number).sum()
}

/// Arms a trigger for `threshold` of a 2 s window.
fn arm(path: &Path, threshold: f64) -> io::Result<AsyncFd<OwnedFd>> {
    const WINDOW: Duration = Duration::from_secs(2);
    watch(arm_trigger(path, WINDOW.mul_f64(threshold), WINDOW)?, Interest::PRIORITY)
}

fn stalled(path: &Path) -> io::Result<Duration> {
    pressure(&read(path)?, "some", "total").map(Duration::from_micros).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{} has no 'some' line", path.display()))
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::thread;

    use super::*;

    #[tokio::test]
    async fn stalls_at_limits_of_cgroups_within_are_no_pressure() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        let stall = |us: u64| {
            fs::write(file("psi"), format!("some avg10=0.00 avg60=0.00 avg300=0.00 total={us}\n"))
                .unwrap()
        };
        let scan = |pages: u64| {
            fs::write(file("vmstat"), format!("pgscan_direct {pages}\npgscan_direct_throttle 9\n"))
                .unwrap()
        };
        stall(0);
        scan(5);
        let shortage = Shortage::at(file("vmstat"), Vec::new());
        let mut pressure = Pressure::watch(file("psi"), shortage, 0.1).unwrap();
        thread::sleep(Duration::from_millis(20));
        stall(1_000_000);
        assert!(!pressure.is_high(), "tasks wait, but the host reclaims nothing");
        thread::sleep(Duration::from_millis(20));
        stall(2_000_000);
        scan(6);
        assert!(pressure.is_high(), "the host reclaims");
        thread::sleep(Duration::from_millis(20));
        scan(7);
        assert!(!pressure.is_high(), "no task waits");
    }

    #[test]
    fn a_cgroup_is_short_at_its_own_limit_and_at_those_above_it() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("inner");
        fs::create_dir(&inner).unwrap();
        let at = |dir: &Path, max: u64| {
            fs::write(dir.join("memory.events.local"), format!("low 9\nmax {max}\n")).unwrap()
        };
        at(&inner, 1);
        at(dir.path(), 1);
        let mut shortage = Shortage::of(Some(&inner));
        shortage.vmstat = dir.path().join("none");
        shortage.has_grown();
        assert!(!shortage.has_grown());
        at(&inner, 2);
        assert!(shortage.has_grown());
        at(dir.path(), 2);
        assert!(shortage.has_grown());
    }
}
