//! Memory cgroups, version 1 or 2, as `aquifer run` and `aquifer demo` need them: a limit, swap allowed or not, what is
//! used, and an end that leaves nothing behind.

mod hierarchy;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::Bytes;
use rustix::process::{Pid, Signal, kill_process};

pub use hierarchy::{Hierarchy, Version};

/// What a cgroup may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// RAM.
    pub memory: Bytes,
    /// Swap beside it.
    pub swap: Swap,
}

/// How much a cgroup may swap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swap {
    /// As much as there is.
    Unlimited,
    /// At most this much.
    AtMost(Bytes),
    /// Not at all: beyond its limit it is out of memory.
    Forbidden,
}

/// Why a cgroup cannot do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The kernel has no memory cgroups, or they are not mounted.
    #[error(
        "this host has no memory cgroups: neither is a version 1 'memory' hierarchy mounted, nor does a version 2 one offer 'memory'"
    )]
    NoMemoryController,
    /// The kernel was built or booted without swap accounting.
    #[error("the kernel does not count swap by cgroup ('{0}' is missing): boot with swapaccount=1")]
    NoSwapAccounting(PathBuf),
    /// A file of the cgroup file system refused.
    #[error("{action} {path}: {source}")]
    File {
        /// What was tried.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file of the cgroup file system says something unexpected.
    #[error("{0} does not hold a number: '{1}'")]
    Strange(PathBuf, String),
    /// Processes of the cgroup do not die.
    #[error("{count} processes of {path} are still there after being killed")]
    Undead {
        /// The cgroup.
        path: PathBuf,
        /// How many are left.
        count: usize,
    },
}

/// How long processes that were killed get to be gone. Generous: a process that exits may have to free swapped pages.
const DEATH: Duration = Duration::from_secs(20);

/// A memory cgroup made by this program. Dropping it kills what runs in it and removes it.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    version: Version,
    removed: bool,
}

impl Cgroup {
    /// Makes the cgroup `name` right below the root of the memory hierarchy.
    ///
    /// # Errors
    /// If it exists already, the limits are refused, or the caller may not (it takes root).
    pub fn create(hierarchy: &Hierarchy, name: &str, limits: Limits) -> Result<Self, CgroupError> {
        let path = hierarchy.root().join(name);
        fs::create_dir(&path).map_err(|source| failed("making", &path, source))?;
        // From here on dropping it removes the half-made cgroup.
        let cgroup = Self { path, version: hierarchy.version(), removed: false };
        cgroup.limit(limits)?;
        Ok(cgroup)
    }

    /// Takes over a cgroup that a dead process made, to remove it; `None` if it is gone.
    pub fn adopt(hierarchy: &Hierarchy, name: &str) -> Option<Self> {
        let path = hierarchy.root().join(name);
        path.is_dir().then(|| Self { path, version: hierarchy.version(), removed: false })
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn limit(&self, limits: Limits) -> Result<(), CgroupError> {
        let memory = limits.memory.0;
        match self.version {
            Version::V1 => {
                self.write("memory.limit_in_bytes", &memory.to_string())?;
                // Version 1 limits memory and swap together.
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

    /// RAM in use: what its processes hold, and the page cache and tmpfs pages charged to it.
    ///
    /// # Errors
    /// If the kernel does not tell.
    pub fn memory_used(&self) -> Result<Bytes, CgroupError> {
        match self.version {
            Version::V1 => self.read_number("memory.usage_in_bytes"),
            Version::V2 => self.read_number("memory.current"),
        }
    }

    /// Swap in use.
    ///
    /// # Errors
    /// If the kernel does not tell.
    pub fn swap_used(&self) -> Result<Bytes, CgroupError> {
        match self.version {
            Version::V1 => self.read_field("memory.stat", "total_swap"),
            Version::V2 => self.read_number("memory.swap.current"),
        }
    }

    /// How many of its processes the kernel has killed for lack of memory.
    ///
    /// # Errors
    /// If the kernel does not tell.
    pub fn oom_kills(&self) -> Result<u64, CgroupError> {
        let file = match self.version {
            Version::V1 => "memory.oom_control",
            Version::V2 => "memory.events",
        };
        self.read_field(file, "oom_kill").map(|count| count.0)
    }

    /// Whether a process of it wanted more swap than it may have, or than there was.
    ///
    /// # Errors
    /// If the kernel does not tell.
    pub fn swap_ran_out(&self) -> Result<bool, CgroupError> {
        let failures = match self.version {
            Version::V1 => self.read_number("memory.memsw.failcnt"),
            Version::V2 => self.read_field("memory.swap.events", "fail"),
        };
        failures.map(|count| count > Bytes::ZERO)
    }

    /// Moves a running process into the cgroup. Memory that it has already stays charged where it was.
    ///
    /// # Errors
    /// If the process is gone or may not be moved.
    pub fn add(&self, pid: u32) -> Result<(), CgroupError> {
        self.write("cgroup.procs", &pid.to_string())
    }

    /// The file that takes in a process which writes `0` to it.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn entrance(&self) -> Result<File, CgroupError> {
        let path = self.path.join("cgroup.procs");
        OpenOptions::new()
            .write(true)
            .open(&path)
            .map_err(|source| failed("opening", &path, source))
    }

    /// The processes in it.
    ///
    /// # Errors
    /// If they cannot be listed.
    pub fn processes(&self) -> Result<Vec<Pid>, CgroupError> {
        let text = self.read("cgroup.procs")?;
        Ok(text.lines().filter_map(|line| line.parse().ok().and_then(Pid::from_raw)).collect())
    }

    /// Kills what runs in it and waits until that is gone, also from swap.
    ///
    /// # Errors
    /// If processes are still there after 20 s: the kernel waits for something on their behalf.
    pub fn kill_all(&self) -> Result<(), CgroupError> {
        let deadline = Instant::now() + DEATH;
        loop {
            let processes = self.processes()?;
            if processes.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(CgroupError::Undead {
                    path: self.path.clone(),
                    count: processes.len(),
                });
            }
            for pid in processes {
                // One that is gone by now is as dead as wanted; new ones are seen in the next round.
                let _ = kill_process(pid, Signal::KILL);
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills what runs in it and removes it.
    ///
    /// # Errors
    /// If a process does not die or the kernel does not let the cgroup go.
    pub fn remove(mut self) -> Result<(), CgroupError> {
        self.removed = true;
        self.kill_and_remove()
    }

    fn kill_and_remove(&self) -> Result<(), CgroupError> {
        self.kill_all()?;
        let deadline = Instant::now() + DEATH;
        loop {
            match fs::remove_dir(&self.path) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                // A zombie that its parent has not waited for is in no list and still holds the cgroup for a moment.
                Err(error)
                    if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline =>
                {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(source) => return Err(failed("removing", &self.path, source)),
            }
        }
    }

    fn write(&self, file: &str, text: &str) -> Result<(), CgroupError> {
        let path = self.path.join(file);
        let write =
            || OpenOptions::new().write(true).open(&path).and_then(|file| write_whole(&file, text));
        write().map_err(|source| failed("writing", &path, source))
    }

    /// Writes a file that is there only if the kernel counts swap by cgroup.
    fn write_swap(&self, file: &str, text: &str) -> Result<(), CgroupError> {
        let path = self.path.join(file);
        if path.exists() {
            self.write(file, text)
        } else {
            Err(CgroupError::NoSwapAccounting(path))
        }
    }

    fn read(&self, file: &str) -> Result<String, CgroupError> {
        let path = self.path.join(file);
        fs::read_to_string(&path).map_err(|source| failed("reading", &path, source))
    }

    fn read_number(&self, file: &str) -> Result<Bytes, CgroupError> {
        let text = self.read(file)?;
        let number = text.trim().parse().map(Bytes);
        number.map_err(|_| CgroupError::Strange(self.path.join(file), text.trim().to_owned()))
    }

    /// The number behind `field` in a file of lines `field number`; zero where the kernel does not list it.
    fn read_field(&self, file: &str, field: &str) -> Result<Bytes, CgroupError> {
        let text = self.read(file)?;
        let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(' '));
        value.map_or(Ok(Bytes::ZERO), |number| {
            let strange = |_| CgroupError::Strange(self.path.join(file), number.to_owned());
            number.trim().parse().map(Bytes).map_err(strange)
        })
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if !self.removed {
            // Nobody is left to tell; stale cgroups are removed by the next command that makes one.
            let _ = self.kill_and_remove();
        }
    }
}

/// Writes `text` with one call: the cgroup file system takes a value in one piece or not at all.
fn write_whole(mut file: &File, text: &str) -> io::Result<()> {
    io::Write::write(&mut file, text.as_bytes()).map(drop)
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> CgroupError {
    CgroupError::File { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests;
