//! The commands that no operator types: processes that this program starts itself.
//!
//! They have a parser of their own, so that completions and "did you mean" never name one.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

use super::load;
use super::serve::{region, vm, volume};
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
    #[command(subcommand)]
    Serve(Serve),
}

#[derive(Debug, Subcommand)]
enum Serve {
    Volume(volume::VolumeServe),
    Region(region::RegionServe),
    Vm(vm::VmServe),
}

impl Worker {
    /// Returns the worker that a command line starts; `None` if its first words name none.
    ///
    /// # Errors
    /// With the exit code, if its arguments are invalid; the reason is printed.
    pub fn of(line: &[OsString]) -> Result<Option<Self>, ExitCode> {
        let mut command = Self::command();
        let mut words = line.iter().skip(1).map(|word| word.to_str().unwrap_or_default());
        while command.has_subcommands() {
            match words.next().and_then(|word| command.find_subcommand(word)) {
                Some(part) => command = part.clone(),
                None => return Ok(None),
            }
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
            Role::Serve(Serve::Volume(serve)) => serve.run(),
            Role::Serve(Serve::Region(serve)) => serve.run(),
            Role::Serve(Serve::Vm(serve)) => serve.run(),
        }
    }
}
