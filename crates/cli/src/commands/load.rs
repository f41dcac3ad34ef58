//! `aquifer load`, hidden: the process that needs memory in demos, tests and measurements.

use std::process::ExitCode;

use aquifer_page::Bytes;
use clap::Args;

use crate::failure::Result;
use crate::load::{self, Plan};

/// Fill memory with checked content and verify it
///
/// Reports JSON lines. With --hold it then obeys 'verify', 'rewrite', 'free' and 'quit' on standard
/// input, one a line, until end of file. Without --hold it verifies once, and exits with 1 if a
/// page is lost.
#[derive(Debug, Args)]
pub struct Load {
    /// Memory to fill
    #[arg(long, value_name = "SIZE")]
    bytes: Bytes,
    /// Memory to fill a second; default as fast as possible
    #[arg(long, value_name = "SIZE")]
    rate: Option<Bytes>,
    /// Seed of the content
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Hold the memory and obey standard input
    #[arg(long)]
    hold: bool,
}

impl Load {
    /// Runs the load.
    ///
    /// # Errors
    /// If it cannot report.
    pub fn run(self) -> Result<ExitCode> {
        let Self { bytes, rate, seed, hold } = self;
        let verdict = load::run(Plan { bytes, rate, seed, hold })?;
        Ok(if verdict.pages_lost == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
