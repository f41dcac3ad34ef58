//! The files of a memory cgroup, v1 or v2 (cgroups(7)).

use std::io;
use std::path::PathBuf;

use aquifer_page::Bytes;
use serde::Serialize;

use crate::{field, number, read};

/// The two interfaces to cgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Version {
    /// One hierarchy for each controller; the limit is `memory.limit_in_bytes`.
    V1,
    /// One hierarchy for all controllers; the limit is `memory.max`.
    V2,
}

/// A memory cgroup.
#[derive(Debug, Clone)]
pub struct Cgroup {
    /// Its directory.
    pub path: PathBuf,
    /// The version of its interface.
    pub version: Version,
}

impl Cgroup {
    /// Returns the memory in use, with page cache and tmpfs pages.
    pub fn memory_used(&self) -> io::Result<Bytes> {
        self.size(match self.version {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        })
    }

    /// Returns the swap in use. It is zero if v1 does not count it.
    pub fn swap_used(&self) -> io::Result<Bytes> {
        match self.version {
            Version::V1 => Ok(Bytes(self.field("memory.stat", "total_swap")?.unwrap_or(0))),
            Version::V2 => self.size("memory.swap.current"),
        }
    }

    /// Returns how many of its processes the kernel has killed for lack of memory, if it counts
    /// them.
    pub fn oom_kills(&self) -> io::Result<Option<u64>> {
        let file = match self.version {
            Version::V1 => "memory.oom_control",
            Version::V2 => "memory.events",
        };
        self.field(file, "oom_kill")
    }

    /// Returns the ids of the processes in it.
    pub fn processes(&self) -> io::Result<Vec<u32>> {
        let text = read(self.path.join("cgroup.procs"))?;
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }

    /// Returns the size in one of its files.
    pub fn size(&self, file: &str) -> io::Result<Bytes> {
        number(self.path.join(file)).map(Bytes)
    }

    /// Returns the number after `name` in one of its files.
    pub fn field(&self, file: &str, name: &str) -> io::Result<Option<u64>> {
        Ok(field(&read(self.path.join(file))?, name))
    }
}
