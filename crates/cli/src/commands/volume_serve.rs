//! `aquifer volume-serve`, hidden: the process that serves a volume, and its helper for swapoff.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Args;

use crate::failure::{Failure, Result};
use crate::logging;

/// Serves one volume; started by 'aquifer attach', 'aquifer run' and the agent
///
/// Reads what it is to do from standard input, and says on standard output how that went.
#[derive(Debug, Args)]
#[command(name = aquifer_blockdev::process::SUBCOMMAND)]
pub struct VolumeServe {}

impl VolumeServe {
    /// Serves until the volume is detached.
    ///
    /// # Errors
    /// If standard input is a terminal, or if AQUIFER_LOG is invalid. The reason why it cannot
    /// serve goes to the program that started it.
    pub fn run(self) -> Result<ExitCode> {
        if std::io::stdin().is_terminal() {
            let failure = Failure::new("serving a volume", "nobody tells which");
            return Err(failure.help("this is for other commands: use 'aquifer attach'"));
        }
        logging::start()?;
        Ok(aquifer_blockdev::process::run())
    }
}
