//! The commands that no operator types: processes that this program starts itself.
//!
//! They have a parser of their own, so that completions and "did you mean" never name one.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

use super::{load, region_serve, vm_serve, volume_serve};
use crate::failure::Result;

/// A process that this program starts itself.
#[derive(Debug, Parser)]
#[command(name = "aquifer", disable_help_subcommand = true)]
pub struct Worker {
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, Subcommand)]
enum Role {
    Load(load::Load),
    VolumeServe(volume_serve::VolumeServe),
    RegionServe(region_serve::RegionServe),
    VmServe(vm_serve::VmServe),
}

impl Worker {
    /// Returns the worker that a command line starts; `None` if its first word names none.
    ///
    /// # Errors
    /// With the exit code, if its arguments are invalid; the reason is printed.
    pub fn of(line: &[OsString]) -> Result<Option<Self>, ExitCode> {
        let word = line.get(1).and_then(|word| word.to_str());
        if word.is_none_or(|word| Self::command().find_subcommand(word).is_none()) {
            return Ok(None);
        }
        Self::try_parse_from(line).map(Some).map_err(|error| super::refused(&error))
    }

    /// Runs the worker.
    ///
    /// # Errors
    /// See the commands.
    pub fn run(self) -> Result<ExitCode> {
        match self.role {
            Role::Load(load) => load.run(),
            Role::VolumeServe(serve) => serve.run(),
            Role::RegionServe(serve) => serve.run(),
            Role::VmServe(serve) => serve.run(),
        }
    }
}
