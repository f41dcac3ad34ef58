//! `aquifer serve volume`, hidden: the process that serves a volume, and its helper for swapoff.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Args;

use crate::failure::{Failure, Result};
use crate::logging;

/// Serve one volume; 'volume attach', 'run' and the agent start it
///
/// Reads its orders from standard input and reports on standard output.
#[derive(Debug, Args)]
#[command(name = aquifer_blockdev::process::SUBCOMMAND[1])]
pub struct VolumeServe {}

impl VolumeServe {
    /// Serves until the volume is detached.
    ///
    /// # Errors
    /// If standard input is a terminal, or if AQUIFER_LOG is invalid. The reason why it cannot
    /// serve goes to the program that started it.
    pub fn run(self) -> Result<ExitCode> {
        if std::io::stdin().is_terminal() {
            let failure = Failure::new("serving a volume", "standard input names no volume");
            return Err(failure.help("use 'aquifer volume attach', which starts this process"));
        }
        logging::start()?;
        Ok(aquifer_blockdev::process::run())
    }
}
