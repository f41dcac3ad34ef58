//! `aquifer vm-serve`, hidden: the keeper of a VM.

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_page::RegionName;
use clap::Args;

use super::volume_serve::log_to_standard_error;
use crate::failure::Result;

/// Keeps one VM; started by 'aquifer vm start'
#[derive(Debug, Args)]
#[command(name = aquifer_guest::process::SUBCOMMAND, hide = true)]
pub struct VmServe {
    /// Where what runs has its files
    directory: PathBuf,
    /// Which one
    name: RegionName,
}

impl VmServe {
    /// Runs until its QEMU has ended.
    ///
    /// # Errors
    /// None: why it cannot run goes to the program that started it.
    pub fn run(self) -> Result<ExitCode> {
        log_to_standard_error();
        Ok(aquifer_guest::process::run(&self.directory, &self.name))
    }
}
