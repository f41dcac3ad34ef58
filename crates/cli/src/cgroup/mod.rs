//! Memory cgroups, version 1 or 2, for `aquifer run` and `aquifer demo`.
//!
//! They bound memory and swap, measure usage, and leave nothing behind when they go.

mod hierarchy;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::Bytes;
use rustix::process::{Pid, Signal, kill_process};

pub use aquifer_procfs::Version;
pub use hierarchy::Hierarchy;

/// The limits of a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// RAM in bytes.
    pub memory: Bytes,
    /// Swap in addition to `memory`.
    pub swap: Swap,
}

/// The amount that a cgroup may swap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swap {
    /// All swap of the host.
    Unlimited,
    /// At most this many bytes.
    AtMost(Bytes),
    /// None: beyond its memory limit the cgroup is out of memory.
    Forbidden,
}

/// The reasons for which an operation on a cgroup fails.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The kernel has no memory cgroups, or they are not mounted.
    #[error(
        "this host has no memory cgroups: neither a version 1 'memory' hierarchy \
         nor a version 2 hierarchy with 'memory' is mounted"
    )]
    NoMemoryController,
    /// The kernel was built or booted without swap accounting.
    #[error("the kernel does not count swap by cgroup ('{0}' is missing): boot with swapaccount=1")]
    NoSwapAccounting(PathBuf),
    /// The kernel refused access to a file of the cgroup file system.
    #[error("{action} {path}: {source}")]
    File {
        /// The operation, as a participle: "reading".
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A file of the cgroup file system cannot be read, or does not hold a number.
    #[error(transparent)]
    Unreadable(#[from] io::Error),
    /// Processes of the cgroup live on after SIGKILL.
    #[error("{count} processes of {path} are still alive after SIGKILL")]
    Undead {
        /// The cgroup's directory.
        path: PathBuf,
        /// How many processes are left.
        count: usize,
    },
}

/// How long to wait for killed processes. An exiting process may first have to free swapped pages.
const DEATH: Duration = Duration::from_secs(20);

/// A memory cgroup made by this program; its drop kills the processes in it and removes it.
#[derive(Debug)]
pub struct Cgroup {
    files: aquifer_procfs::Cgroup,
    removed: bool,
}

impl Cgroup {
    /// Makes the cgroup `name` right below the root of the memory hierarchy.
    ///
    /// # Errors
    /// If it exists already, or if the kernel refuses the limits or the directory (it takes root).
    pub fn create(hierarchy: &Hierarchy, name: &str, limits: Limits) -> Result<Self, CgroupError> {
        let path = hierarchy.root().join(name);
        fs::create_dir(&path).map_err(|source| failed("making", &path, source))?;
        // If a limit fails, the drop of `cgroup` removes the directory.
        let cgroup = Self::at(hierarchy, path);
        cgroup.limit(limits)?;
        Ok(cgroup)
    }

    /// Takes over the cgroup of a dead process, to remove it; `None` if it is gone.
    pub fn adopt(hierarchy: &Hierarchy, name: &str) -> Option<Self> {
        let path = hierarchy.root().join(name);
        path.is_dir().then(|| Self::at(hierarchy, path))
    }

    fn at(hierarchy: &Hierarchy, path: PathBuf) -> Self {
        let files = aquifer_procfs::Cgroup { path, version: hierarchy.version() };
        Self { files, removed: false }
    }

    /// Returns its directory.
    pub fn path(&self) -> &Path {
        &self.files.path
    }

    fn limit(&self, limits: Limits) -> Result<(), CgroupError> {
        let memory = limits.memory.0;
        match self.files.version {
            Version::V1 => {
                self.write("memory.limit_in_bytes", &memory.to_string())?;
                // Version 1 limits the sum of memory and swap.
                let together = match limits.swap {
                    Swap::Unlimited => return Ok(()),
                    Swap::AtMost(swap) => memory.saturating_add(swap.0),
                    Swap::Forbidden => memory,
                };
                self.write_swap("memory.memsw.limit_in_bytes", &together.to_string())?;
                if limits.swap == Swap::Forbidden {
                    self.write("memory.swappiness", "0")?;
                }
                Ok(())
            }
            Version::V2 => {
                self.write("memory.max", &memory.to_string())?;
                match limits.swap {
                    Swap::Unlimited => self.write_swap("memory.swap.max", "max"),
                    Swap::AtMost(swap) => self.write_swap("memory.swap.max", &swap.0.to_string()),
                    Swap::Forbidden => self.write_swap("memory.swap.max", "0"),
                }
            }
        }
    }

    /// Returns the RAM in use: the memory of its processes, and the page cache and tmpfs pages
    /// charged to it.
    ///
    /// # Errors
    /// If the kernel's file cannot be read.
    pub fn memory_used(&self) -> Result<Bytes, CgroupError> {
        Ok(self.files.memory_used()?)
    }

    /// Returns the swap in use.
    ///
    /// # Errors
    /// If the kernel's file cannot be read.
    pub fn swap_used(&self) -> Result<Bytes, CgroupError> {
        Ok(self.files.swap_used()?)
    }

    /// Returns how many of its processes the kernel has killed for lack of memory.
    ///
    /// # Errors
    /// If the kernel's file cannot be read.
    pub fn oom_kills(&self) -> Result<u64, CgroupError> {
        Ok(self.files.oom_kills()?.unwrap_or(0))
    }

    /// Returns whether a process of the cgroup failed to get swap, by its limit or for lack of
    /// swap.
    ///
    /// # Errors
    /// If the kernel's file cannot be read.
    pub fn swap_ran_out(&self) -> Result<bool, CgroupError> {
        let failures = match self.files.version {
            Version::V1 => Some(self.files.size("memory.memsw.failcnt")?.0),
            Version::V2 => self.files.field("memory.swap.events", "fail")?,
        };
        Ok(failures.is_some_and(|count| count > 0))
    }

    /// Moves a running process into the cgroup; memory charged elsewhere stays charged there.
    ///
    /// # Errors
    /// If the process is gone or may not be moved.
    pub fn add(&self, pid: u32) -> Result<(), CgroupError> {
        self.write("cgroup.procs", &pid.to_string())
    }

    /// Opens the file that takes in a process which writes `0` to it.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn entrance(&self) -> Result<File, CgroupError> {
        let path = self.path().join("cgroup.procs");
        OpenOptions::new()
            .write(true)
            .open(&path)
            .map_err(|source| failed("opening", &path, source))
    }

    /// Returns the processes in the cgroup.
    ///
    /// # Errors
    /// If the kernel's list cannot be read.
    pub fn processes(&self) -> Result<Vec<Pid>, CgroupError> {
        let all = self.files.processes()?.into_iter();
        Ok(all.filter_map(|pid| Pid::from_raw(pid.cast_signed())).collect())
    }

    /// Kills the processes in the cgroup and waits until they are gone, also from swap.
    ///
    /// # Errors
    /// If the list cannot be read, or if processes are left after 20 s because the kernel waits on
    /// their behalf.
    pub fn kill_all(&self) -> Result<(), CgroupError> {
        let deadline = Instant::now() + DEATH;
        loop {
            let processes = self.processes()?;
            if processes.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(CgroupError::Undead {
                    path: self.path().to_owned(),
                    count: processes.len(),
                });
            }
            for pid in processes {
                // A failure means that the process is gone. The next round sees new processes.
                let _ = kill_process(pid, Signal::KILL);
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills the processes in the cgroup and removes it.
    ///
    /// # Errors
    /// If a process does not die, or if the kernel keeps the cgroup's directory.
    pub fn remove(mut self) -> Result<(), CgroupError> {
        self.removed = true;
        self.kill_and_remove()
    }

    fn kill_and_remove(&self) -> Result<(), CgroupError> {
        self.kill_all()?;
        let deadline = Instant::now() + DEATH;
        loop {
            match fs::remove_dir(self.path()) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                // A zombie that its parent has not waited for is in no list, but holds the cgroup
                // for a moment.
                Err(error)
                    if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline =>
                {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(source) => return Err(failed("removing", self.path(), source)),
            }
        }
    }

    fn write(&self, file: &str, text: &str) -> Result<(), CgroupError> {
        let path = self.path().join(file);
        let write =
            || OpenOptions::new().write(true).open(&path).and_then(|file| write_whole(&file, text));
        write().map_err(|source| failed("writing", &path, source))
    }

    /// Writes a file that exists only if the kernel counts swap by cgroup.
    fn write_swap(&self, file: &str, text: &str) -> Result<(), CgroupError> {
        let path = self.path().join(file);
        if path.exists() {
            self.write(file, text)
        } else {
            Err(CgroupError::NoSwapAccounting(path))
        }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if !self.removed {
            // A drop cannot report. The next command that makes a cgroup removes stale ones.
            let _ = self.kill_and_remove();
        }
    }
}

/// Writes `text` in one call: the cgroup file system takes a value in one piece or not at all.
fn write_whole(mut file: &File, text: &str) -> io::Result<()> {
    io::Write::write(&mut file, text.as_bytes()).map(drop)
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> CgroupError {
    CgroupError::File { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests;
