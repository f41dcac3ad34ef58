//! The commands that no operator types: the first processes of the demos' guests.
//!
//! They have a parser of their own, so that help and "did you mean" never name one.

use std::ffi::OsString;
use std::process::ExitCode;

use aquifer_cli::failure::Result;
use clap::{CommandFactory as _, Parser, Subcommand};

use super::{guest_load, guest_memory};

/// A first process of a guest.
#[derive(Debug, Parser)]
#[command(name = "aquifer-demo", disable_help_subcommand = true)]
pub(crate) struct Worker {
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, Subcommand)]
enum Role {
    GuestLoad(guest_load::GuestLoad),
    GuestMemory(guest_memory::GuestMemory),
}

impl Worker {
    /// Returns the worker that a command line starts; `None` if its first word names none.
    ///
    /// # Errors
    /// With the exit code, if its arguments are invalid; the reason is printed.
    pub(crate) fn of(line: &[OsString]) -> Result<Option<Self>, ExitCode> {
        let word = line.get(1).and_then(|word| word.to_str());
        if word.is_none_or(|word| Self::command().find_subcommand(word).is_none()) {
            return Ok(None);
        }
        aquifer_cli::commands::parse_as(Self::command(), line.to_vec()).map(Some)
    }

    /// Runs the worker.
    ///
    /// # Errors
    /// See the commands.
    pub(crate) fn run(self) -> Result<ExitCode> {
        match self.role {
            Role::GuestLoad(load) => load.run(),
            Role::GuestMemory(memory) => memory.run(),
        }
    }
}
