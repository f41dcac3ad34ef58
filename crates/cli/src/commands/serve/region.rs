//! `aquifer serve region`, hidden: the processes of a region.

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_page::RegionName;
use clap::Args;

use crate::failure::Result;
use crate::logging;

/// Serve one region; 'aquifer region create' starts it
#[derive(Debug, Args)]
#[command(name = aquifer_region::process::SUBCOMMAND[1])]
pub struct RegionServe {
    /// Role: supervisor or engine
    role: String,
    /// Directory of the regions
    directory: PathBuf,
    /// Name of the region
    name: RegionName,
}

impl RegionServe {
    /// Serves until the region is removed.
    ///
    /// # Errors
    /// If AQUIFER_LOG is invalid. The reason why it cannot serve goes to the program that started
    /// it.
    pub fn run(self) -> Result<ExitCode> {
        logging::start()?;
        Ok(aquifer_region::process::run(&self.role, &self.directory, &self.name))
    }
}
