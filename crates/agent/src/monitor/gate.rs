//! The switch that lets a managed cgroup swap.
//!
//! Swap devices belong to the whole kernel: every cgroup would swap to the device that one cgroup's
//! agent borrowed. An agent that manages one cgroup can therefore keep that cgroup from swapping,
//! except while the agent has a device of its own.

use std::io;
use std::path::{Path, PathBuf};

/// The swap switch of one cgroup.
#[derive(Debug)]
pub struct SwapGate {
    file: PathBuf,
    open: &'static str,
    shut: Shut,
}

#[derive(Debug)]
enum Shut {
    /// v1: the limit of memory and swap together equals the limit of memory alone.
    AsMuchAs(PathBuf),
    /// v2: the limit of swap is zero.
    Zero,
}

impl SwapGate {
    /// Returns the switch of the cgroup at `path`.
    ///
    /// # Errors
    /// If the kernel does not account swap.
    pub fn new(path: &Path) -> io::Result<Self> {
        let v1 = path.join("memory.memsw.limit_in_bytes");
        let v2 = path.join("memory.swap.max");
        if v1.exists() {
            return Ok(Self {
                file: v1,
                open: "-1",
                shut: Shut::AsMuchAs(path.join("memory.limit_in_bytes")),
            });
        }
        if v2.exists() {
            return Ok(Self { file: v2, open: "max", shut: Shut::Zero });
        }
        let why = format!(
            "the kernel does not count the swap of {}: boot it with swapaccount=1, \
             or remove gate_swap",
            path.display()
        );
        Err(io::Error::new(io::ErrorKind::Unsupported, why))
    }

    /// Lets the cgroup swap.
    ///
    /// # Errors
    /// Names the file that cannot be written.
    pub fn open(&self) -> io::Result<()> {
        self.write(self.open)
    }

    /// Keeps the cgroup from swapping.
    ///
    /// # Errors
    /// Names the file that cannot be read or written. In v1 the kernel refuses while the cgroup's
    /// memory and swap together exceed the limit of memory.
    pub fn shut(&self) -> io::Result<()> {
        match &self.shut {
            Shut::AsMuchAs(limit) => self.write(aquifer_procfs::read(limit)?.trim()),
            Shut::Zero => self.write("0"),
        }
    }

    fn write(&self, value: &str) -> io::Result<()> {
        std::fs::write(&self.file, value).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("cannot write {value} to {}: {error}", self.file.display()),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn version_1_is_shut_by_a_limit_on_memory_and_swap_together() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("memory.limit_in_bytes"), "1000\n").unwrap();
        fs::write(dir.path().join("memory.memsw.limit_in_bytes"), "5").unwrap();
        let gate = SwapGate::new(dir.path()).unwrap();
        gate.shut().unwrap();
        assert_eq!(fs::read_to_string(&gate.file).unwrap(), "1000");
        gate.open().unwrap();
        assert_eq!(fs::read_to_string(&gate.file).unwrap(), "-1");
    }

    #[test]
    fn version_2_is_shut_by_no_swap_at_all() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("memory.swap.max"), "max").unwrap();
        let gate = SwapGate::new(dir.path()).unwrap();
        gate.shut().unwrap();
        assert_eq!(fs::read_to_string(&gate.file).unwrap(), "0");
    }

    #[test]
    fn a_kernel_without_swap_accounting_is_told_as_such() {
        let dir = tempfile::tempdir().unwrap();
        assert!(SwapGate::new(dir.path()).unwrap_err().to_string().contains("swapaccount=1"));
    }
}
