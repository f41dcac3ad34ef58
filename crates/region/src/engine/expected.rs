//! Programs that an engine before this one took care of: until they have come back or are gone, they may write to pages that they have
//! mapped without this one knowing, so none may leave.

use std::fs;
use std::io;
use std::path::PathBuf;

use aquifer_page::file;
use serde::{Deserialize, Serialize};

/// A mapping of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Mapped {
    pid: u32,
    /// When the program started, in ticks since the machine did: another one may come to have its number.
    started: u64,
    address: u64,
}

/// All mappings, in a file that outlives the engine.
#[derive(Debug)]
pub(super) struct Expected {
    path: PathBuf,
    here: Vec<Mapped>,
    missing: Vec<Mapped>,
}

impl Mapped {
    pub(super) fn new(pid: u32, address: u64) -> io::Result<Self> {
        let started = started(pid).ok_or(io::ErrorKind::NotFound)?;
        Ok(Self { pid, started, address })
    }

    /// Whether the program still has something mapped there.
    fn is_there(&self) -> bool {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid)).unwrap_or_default();
        let start = format!("{:x}-", self.address);
        started(self.pid) == Some(self.started) && maps.lines().any(|line| line.starts_with(&start))
    }
}

/// The twenty-second field of proc_pid_stat(5); the second is a name that may have anything in it but ends with the last bracket.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

impl Expected {
    /// What the engine before this one has left there.
    pub(super) fn open(path: PathBuf) -> io::Result<Self> {
        let missing = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => serde_json::from_slice(&read?)?,
        };
        Ok(Self { path, here: Vec::new(), missing })
    }

    /// Programs that should come back.
    pub(super) fn missing(&self) -> usize {
        self.missing.len()
    }

    /// Forgets those that will not come back. Says whether there were any.
    pub(super) fn look(&mut self) -> bool {
        let before = self.missing.len();
        self.missing.retain(Mapped::is_there);
        self.missing.len() < before
    }

    pub(super) fn add(&mut self, mapped: Mapped) -> io::Result<()> {
        self.missing.retain(|other| *other != mapped);
        self.here.push(mapped);
        self.write()
    }

    /// It is not here any more, and will come back or be gone.
    pub(super) fn is_away(&mut self, mapped: Mapped) {
        self.here.retain(|other| *other != mapped);
        if !self.missing.contains(&mapped) {
            self.missing.push(mapped);
        }
        // What is still listed is looked for in vain.
        let _ = self.write();
    }

    pub(super) fn remove(&mut self, mapped: &Mapped) {
        self.here.retain(|other| other != mapped);
        // What is still listed is looked for in vain.
        let _ = self.write();
    }

    fn write(&self) -> io::Result<()> {
        let all: Vec<_> = self.here.iter().chain(&self.missing).collect();
        file::replace(&self.path, &serde_json::to_vec(&all)?)
    }
}
