//! Definitions of VMs: files from which a host starts its VMs, also after a reboot.
//!
//! A directory has a file `NAME.toml` for each VM. A command that changes a definition or starts
//! its VM holds the definition's lock ([`Held`]) meanwhile. A file is replaced as a whole, and
//! survives a loss of power.
//!
//! A VM that moves takes its definition with it. At each moment at most one host has a definition
//! that is not marked [`Elsewhere`], and only such a definition starts its VM:
//!
//! 1. The destination writes the definition, marked as arriving.
//! 2. The source marks its own as moved, and only then records the hand-over.
//! 3. The destination takes the VM over, and only then removes its mark.
//! 4. The source removes its definition.

mod file;
mod held;
mod moves;
#[cfg(test)]
mod tests;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use aquifer_control::restart::Policy;
use aquifer_page::{HostName, MigrationId, OwnerId, RegionName};
use serde::{Deserialize, Serialize};

pub use held::Held;
pub(crate) use moves::{hold, remove_moved, settle, text};

/// The directory of definitions by default.
pub const DIRECTORY: &str = "/var/lib/aquifer/vms";

/// The version of the file's format.
const VERSION: u32 = 1;

/// The definition of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    /// The version of the file's format.
    pub version: u32,
    /// Name of the VM.
    pub name: RegionName,
    /// Whether the agent starts the VM when the host boots.
    #[serde(default = "yes")]
    pub autostart: bool,
    /// When the agent starts the VM again after an end.
    #[serde(default)]
    pub restart: Policy,
    /// The owner of the VM's pages at lenders, by which they know the VM again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<OwnerId>,
    /// The number of times that the VM was to move to another host. Lenders refuse an owner that
    /// comes with a lower number than it had before.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub moves: u32,
    /// The options of `aquifer vm start`, which says what they mean. Their names have `_` for `-`.
    #[serde(default)]
    pub vm: toml::Table,
    /// Set while another host may own the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elsewhere: Option<Elsewhere>,
}

/// The mark of a definition whose VM another host may own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Elsewhere {
    /// The attempt to move the VM.
    pub migration: MigrationId,
    /// The direction.
    pub direction: Direction,
    /// The other host.
    pub host: HostName,
}

/// The direction of a move, as this host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// The VM went to the other host.
    To,
    /// The VM is to come from the other host, which owns it until then.
    From,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

fn yes() -> bool {
    true
}

impl Elsewhere {
    /// Describes where the VM is.
    pub fn describe(&self) -> String {
        match self.direction {
            Direction::To => format!("moved to {}", self.host),
            Direction::From => format!("to come from {}", self.host),
        }
    }
}

/// An error of a definition.
#[derive(Debug, thiserror::Error)]
pub enum DefinitionError {
    /// An operation on a file failed.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file does not hold the definition of a VM.
    #[error("{} is not the definition of VM '{name}': {why}", path.display())]
    Malformed {
        /// The VM.
        name: RegionName,
        /// The file.
        path: PathBuf,
        /// The problem.
        why: String,
    },
    /// The VM is defined already.
    #[error(
        "{} defines VM '{name}' already: start it with 'aquifer vm start {name}', change it with \
         'aquifer vm set {name}', or remove it with 'aquifer vm rm {name}'",
        path.display()
    )]
    Exists {
        /// The VM.
        name: RegionName,
        /// The file.
        path: PathBuf,
    },
    /// No file defines the VM.
    #[error(
        "VM '{name}' is not defined: there is no {}. Define it with 'aquifer vm create {name}'",
        path.display()
    )]
    Unknown {
        /// The VM.
        name: RegionName,
        /// The file that is missing.
        path: PathBuf,
    },
    /// Another process has held the definition's lock for too long.
    #[error(
        "another command has changed or started VM '{name}' for {seconds} s: wait for it, or end \
         it ('fuser {}' names it)",
        path.display()
    )]
    Locked {
        /// The VM.
        name: RegionName,
        /// The lock.
        path: PathBuf,
        /// How long this process waited.
        seconds: u64,
    },
}

impl Definition {
    /// Makes the definition of a VM that starts at boot and after failures.
    pub fn new(name: RegionName, vm: toml::Table) -> Self {
        let restart = Policy::default();
        let (version, autostart, owner, moves, elsewhere) = (VERSION, true, None, 0, None);
        Self { version, name, autostart, restart, owner, moves, vm, elsewhere }
    }

    /// Returns the text of the file.
    ///
    /// # Errors
    /// If a value has no form in TOML.
    pub fn text(&self) -> Result<String, toml::ser::Error> {
        file::text(self)
    }

    /// Reads the text of a VM's definition.
    ///
    /// # Errors
    /// Says what is wrong, with line and key.
    pub fn parse(name: &RegionName, text: &str) -> Result<Self, String> {
        file::parse(name, text)
    }
}

/// The definitions of a host.
#[derive(Clone, Debug)]
pub struct Definitions {
    dir: PathBuf,
}

/// A VM's name, and its definition or the error in reading it.
pub type NamedDefinition = (RegionName, Result<Definition, DefinitionError>);

impl Definitions {
    /// Takes the definitions in this directory, which need not exist.
    pub fn of(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// Takes the definitions in the directory of this file.
    pub fn beside(file: &Path) -> Self {
        Self::of(file.parent().unwrap_or(Path::new("/")))
    }

    /// Returns the directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the path of a VM's definition.
    pub fn file(&self, name: &RegionName) -> PathBuf {
        self.dir.join(format!("{name}.toml"))
    }

    fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DefinitionError {
        let path = path.to_owned();
        move |source| DefinitionError::Io { what, path, source }
    }

    /// Reads the definition of a VM; returns `None` if there is none.
    ///
    /// # Errors
    /// [`DefinitionError::Io`] if the file cannot be read; [`DefinitionError::Malformed`] if it
    /// holds no definition of this VM.
    pub fn find(&self, name: &RegionName) -> Result<Option<Definition>, DefinitionError> {
        let path = self.file(name);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(Self::io("cannot read", &path))?,
        };
        let malformed = |why| DefinitionError::Malformed { name: name.clone(), path, why };
        Definition::parse(name, &text).map(Some).map_err(malformed)
    }

    /// Reads the definition of a VM that must be defined.
    ///
    /// # Errors
    /// Those of [`Self::find`], and [`DefinitionError::Unknown`].
    pub fn get(&self, name: &RegionName) -> Result<Definition, DefinitionError> {
        let unknown = || DefinitionError::Unknown { name: name.clone(), path: self.file(name) };
        self.find(name)?.ok_or_else(unknown)
    }

    /// Returns the names of all VMs that are defined here, in order.
    ///
    /// # Errors
    /// [`DefinitionError::Io`] if the directory cannot be listed.
    pub fn names(&self) -> Result<Vec<RegionName>, DefinitionError> {
        let fail = || Self::io("cannot list", &self.dir);
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(fail())?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let file = entry.map_err(fail())?.file_name();
            let name = file.to_str().and_then(|file| file.strip_suffix(".toml")?.parse().ok());
            names.extend(name);
        }
        names.sort();
        Ok(names)
    }

    /// Reads each definition, in order of the names, or returns its error.
    ///
    /// # Errors
    /// [`DefinitionError::Io`] if the directory cannot be listed.
    pub fn each(&self) -> Result<Vec<NamedDefinition>, DefinitionError> {
        let read = |name: RegionName| {
            let found = self.find(&name).transpose()?;
            Some((name, found))
        };
        Ok(self.names()?.into_iter().filter_map(read).collect())
    }
}
