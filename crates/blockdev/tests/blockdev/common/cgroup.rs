//! A memory cgroup for a test.

use std::fs;
use std::path::{Path, PathBuf};

use super::wait_until;

const V1: &str = "/sys/fs/cgroup/memory";
const V2: &str = "/sys/fs/cgroup";

/// A memory cgroup (v1 or v2) with a limit. Dropping it kills its processes and removes it.
pub struct Cgroup {
    path: PathBuf,
    limit: &'static str,
}

impl Cgroup {
    pub fn new(name: &str, limit: u64) -> Self {
        let v1 = Path::new(V1).join("memory.limit_in_bytes").exists();
        let path =
            Path::new(if v1 { V1 } else { V2 }).join(format!("{name}-{}", std::process::id()));
        if !v1 {
            fs::write(Path::new(V2).join("cgroup.subtree_control"), "+memory").unwrap();
        }
        fs::create_dir(&path).unwrap();
        let group = Self { path, limit: if v1 { "memory.limit_in_bytes" } else { "memory.max" } };
        group.set_limit(limit);
        group
    }

    pub fn set_limit(&self, limit: u64) {
        fs::write(self.path.join(self.limit), limit.to_string()).unwrap();
    }

    /// Returns the file to which a process writes `0` to enter the cgroup.
    pub fn procs(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    fn processes(&self) -> Vec<i32> {
        let text = fs::read_to_string(self.procs()).unwrap_or_default();
        text.lines().map(|line| line.parse().unwrap()).collect()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        wait_until("the end of the control group", || {
            for pid in self.processes() {
                if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
            }
            fs::remove_dir(&self.path).is_ok()
        });
    }
}
