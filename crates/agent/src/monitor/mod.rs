//! Total and used memory: M_t, M_u and S_u of \[Ge23\].
//!
//! The source is the whole host (`/proc/meminfo`) or, for an agent that manages just that, one
//! cgroup (v1 or v2). M_u leaves out buffers, page cache and reclaimable slabs (\[Ge23\], Table 1).
//! M_u includes shared memory, which the kernel counts as cache but cannot drop.

mod cgroup;
pub mod gate;
mod meminfo;
pub mod pressure;

use std::io;
use std::path::Path;

use aquifer_page::Bytes;

pub use cgroup::Cgroup;
pub use meminfo::Meminfo;

/// One reading of the memory figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// M_t: all memory.
    pub total: Bytes,
    /// M_u: used memory, without buffers, page cache and reclaimable slabs.
    pub used: Bytes,
    /// S_u: memory that the programs of this host or cgroup have swapped out.
    pub swap_used: Bytes,
}

/// The watched memory.
#[derive(Debug)]
pub enum Source {
    /// The whole host.
    Host(Meminfo),
    /// One memory cgroup.
    Cgroup(Cgroup),
}

impl Source {
    /// Opens the cgroup at `cgroup`, or the host if there is none.
    ///
    /// # Errors
    /// If the cgroup does not exist or has no memory controller; says which.
    pub fn open(cgroup: Option<&Path>) -> io::Result<Self> {
        Ok(match cgroup {
            Some(path) => Self::Cgroup(Cgroup::open(path)?),
            None => Self::Host(Meminfo),
        })
    }

    /// Reads the current figures.
    ///
    /// # Errors
    /// Names the file that cannot be read or parsed.
    pub fn read(&self) -> io::Result<Reading> {
        match self {
            Self::Host(meminfo) => meminfo.read(),
            Self::Cgroup(cgroup) => cgroup.read(),
        }
    }

    /// Returns how many programs the kernel has killed here for lack of memory; `None` if it does
    /// not count them.
    pub fn oom_kills(&self) -> Option<u64> {
        match self {
            Self::Host(_) => field(&read_file(Path::new("/proc/vmstat")).ok()?, "oom_kill"),
            Self::Cgroup(cgroup) => cgroup.oom_kills(),
        }
    }

    /// Returns the source's name for people.
    pub fn name(&self) -> String {
        match self {
            Self::Host(_) => "host".to_owned(),
            Self::Cgroup(cgroup) => cgroup.path().display().to_string(),
        }
    }

    /// Tells whether the watched memory includes this process. If not, the caller must add the
    /// pages that the process holds for borrowers to M_u.
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

/// Returns the number after `key` in lines of `key value` or `key: value kB`.
fn field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(|c: char| c == ':' || c.is_whitespace())?;
        (name == key).then(|| value.split_whitespace().next()?.parse().ok())?
    })
}
