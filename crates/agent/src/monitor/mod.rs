//! How much memory there is and how much is used: the paper's M_t, M_u and S_u.
//!
//! Either of the whole host, from `/proc/meminfo`, or of one cgroup (v1 or v2), from its limit and usage, so that an
//! agent can manage just that. M_u leaves out buffers, page cache and reclaimable slabs (Sharing, Table 1), but not
//! shared memory, which the kernel counts as cache although it can't be dropped.

mod cgroup;
pub mod gate;
mod meminfo;
pub mod pressure;

use std::io;
use std::path::Path;

use aquifer_page::Bytes;

pub use cgroup::Cgroup;
pub use meminfo::Meminfo;

/// One reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// M_t: all the memory there is.
    pub total: Bytes,
    /// M_u: used, without buffers, page cache and reclaimable slabs.
    pub used: Bytes,
    /// S_u: swapped out by the programs on this host or in this cgroup.
    pub swap_used: Bytes,
}

/// What is watched.
#[derive(Debug)]
pub enum Source {
    /// The whole host.
    Host(Meminfo),
    /// One memory cgroup.
    Cgroup(Cgroup),
}

impl Source {
    /// The host, or the cgroup at `path` where one is given.
    ///
    /// # Errors
    /// Says what is missing: no such cgroup, or one without the memory controller.
    pub fn open(cgroup: Option<&Path>) -> io::Result<Self> {
        Ok(match cgroup {
            Some(path) => Self::Cgroup(Cgroup::open(path)?),
            None => Self::Host(Meminfo),
        })
    }

    /// Reads the figures now.
    ///
    /// # Errors
    /// Names the file that could not be read or understood.
    pub fn read(&self) -> io::Result<Reading> {
        match self {
            Self::Host(meminfo) => meminfo.read(),
            Self::Cgroup(cgroup) => cgroup.read(),
        }
    }

    /// How many programs the kernel has killed here for lack of memory; nothing where it does not count them.
    pub fn oom_kills(&self) -> Option<u64> {
        match self {
            Self::Host(_) => field(&read_file(Path::new("/proc/vmstat")).ok()?, "oom_kill"),
            Self::Cgroup(cgroup) => cgroup.oom_kills(),
        }
    }

    /// What people call it.
    pub fn name(&self) -> String {
        match self {
            Self::Host(_) => "host".to_owned(),
            Self::Cgroup(cgroup) => cgroup.path().display().to_string(),
        }
    }

    /// Whether this process' own memory is part of what is watched. If not, the pages that it holds for borrowers must
    /// be added to M_u.
    pub fn contains_self(&self) -> bool {
        match self {
            Self::Host(_) => true,
            Self::Cgroup(cgroup) => cgroup.contains_self(),
        }
    }
}

fn read_file(path: &Path) -> io::Result<String> {
    std::fs::read_to_string(path).map_err(|error| {
        io::Error::new(error.kind(), format!("cannot read {}: {error}", path.display()))
    })
}

/// The number after `key` in lines of `key value` or `key: value kB`.
fn field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(|c: char| c == ':' || c.is_whitespace())?;
        (name == key).then(|| value.split_whitespace().next()?.parse().ok())?
    })
}
