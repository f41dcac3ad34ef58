//! `aquifer serve vm`, hidden: the supervisor of a VM.

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_page::RegionName;
use clap::Args;

use crate::failure::Result;
use crate::logging;

/// Supervise one VM; 'aquifer vm start' starts it
#[derive(Debug, Args)]
#[command(name = aquifer_vm::process::SUBCOMMAND[1])]
pub struct VmServe {
    /// Run directory
    directory: PathBuf,
    /// Name of the VM
    name: RegionName,
}

impl VmServe {
    /// Runs until the VM's QEMU has ended.
    ///
    /// # Errors
    /// If AQUIFER_LOG is invalid. The reason why it cannot run goes to the program that started it.
    pub fn run(self) -> Result<ExitCode> {
        logging::start()?;
        Ok(aquifer_vm::process::run(&self.directory, &self.name))
    }
}
