//! Pressure stall information as an early signal: tasks wait for memory before M_u says that it is short.
//!
//! The kernel counts in `memory.pressure` (cgroup v2) or `/proc/pressure/memory` for how long at least one task waited
//! ("some"). A trigger wakes the agent in the middle of its period; the share of time since the last look decides.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::read_file;
use crate::sys::watch_priority;

/// Watches one pressure file.
#[derive(Debug)]
pub struct Pressure {
    path: PathBuf,
    threshold: f64,
    last: (Instant, Duration),
    trigger: Option<AsyncFd<File>>,
}

impl Pressure {
    /// Watches the cgroup's own pressure where it has that (v2), else the host's. `threshold` is a share of time; `None`
    /// where it is 0 or the kernel has no PSI.
    pub fn open(cgroup: Option<&Path>, threshold: f64) -> Option<Self> {
        let of_cgroup = cgroup.map(|path| path.join("memory.pressure")).filter(|path| path.exists());
        // A v1 cgroup has no pressure of its own, and the host's would blame it for the stalls of its neighbours.
        let path = match (of_cgroup, cgroup) {
            (Some(path), _) => path,
            (None, Some(_)) => return None,
            (None, None) => PathBuf::from("/proc/pressure/memory"),
        };
        if threshold <= 0.0 {
            return None;
        }
        let stalled = stalled(&path).ok()?;
        let trigger = arm(&path, threshold).ok();
        Some(Self { path, threshold, last: (Instant::now(), stalled), trigger })
    }

    /// Whether tasks have waited for more than the threshold's share of the time since the last call.
    pub fn is_high(&mut self) -> bool {
        let Ok(stalled) = stalled(&self.path) else { return false };
        let now = Instant::now();
        let share =
            (stalled.saturating_sub(self.last.1)).as_secs_f64() / (now - self.last.0).as_secs_f64().max(1e-3);
        self.last = (now, stalled);
        share > self.threshold
    }

    /// Returns when the kernel's trigger fires; never where there is none.
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

/// A trigger for `threshold` of a window of 2 s: without CAP_SYS_RESOURCE windows must be multiples of that.
fn arm(path: &Path, threshold: f64) -> io::Result<AsyncFd<File>> {
    const WINDOW_US: u32 = 2_000_000;
    let mut file = OpenOptions::new().read(true).write(true).open(path)?;
    let stall_us = (f64::from(WINDOW_US) * threshold) as u32;
    file.write_all(format!("some {stall_us} {WINDOW_US}\0").as_bytes())?;
    watch_priority(file)
}

fn stalled(path: &Path) -> io::Result<Duration> {
    let text = read_file(path)?;
    let total =
        text.lines().find(|line| line.starts_with("some ")).and_then(|line| line.rsplit_once("total="));
    let total = total.and_then(|(_, us)| us.trim().parse().ok());
    total.map(Duration::from_micros).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{} has no 'some' line", path.display()))
    })
}
