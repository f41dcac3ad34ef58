//! Total and used memory: M_t, M_u and S_u of \[Ge23\].
//!
//! The source is the whole host (`/proc/meminfo`) or, for an agent that manages just that, one
//! cgroup (v1 or v2). M_u leaves out buffers, page cache and reclaimable slabs (\[Ge23\], Table 1).
//! M_u includes shared memory, which the kernel counts as cache but cannot drop.

mod cgroup;
pub mod gate;
mod meminfo;
pub mod pacer;
pub mod pressure;

use std::io;
use std::path::Path;

use aquifer_page::Bytes;
pub use aquifer_procfs::Cgroup;
use aquifer_procfs::{field, read};

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
    Host,
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
            Some(path) => Self::Cgroup(cgroup::open(path)?),
            None => Self::Host,
        })
    }

    /// Reads the current figures.
    ///
    /// # Errors
    /// Names the file that cannot be read or parsed.
    pub fn read(&self) -> io::Result<Reading> {
        match self {
            Self::Host => meminfo::read(),
            Self::Cgroup(cgroup) => cgroup::read(cgroup),
        }
    }

    /// Returns how many programs the kernel has killed here for lack of memory; `None` if it does
    /// not count them.
    pub fn oom_kills(&self) -> Option<u64> {
        match self {
            Self::Host => field(&read("/proc/vmstat").ok()?, "oom_kill"),
            Self::Cgroup(cgroup) => cgroup.oom_kills().ok()?,
        }
    }

    /// Returns the source's name for people.
    pub fn name(&self) -> String {
        match self {
            Self::Host => "host".to_owned(),
            Self::Cgroup(cgroup) => cgroup.path.display().to_string(),
        }
    }

    /// Tells whether the watched memory includes this process. If not, the caller must add the
    /// pages that the process holds for borrowers to M_u.
    pub fn contains_self(&self) -> bool {
        match self {
            Self::Host => true,
            Self::Cgroup(cgroup) => {
                cgroup.processes().is_ok_and(|all| all.contains(&std::process::id()))
            }
        }
    }
}
