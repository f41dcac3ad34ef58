//! `aquifer-demo guest-memory`, hidden: the first process of the guests of `aquifer demo resize`
//! and `aquifer demo groups`.

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_cli::failure::{OrFail, Result};
use clap::Args;

use crate::be_a_guest;

/// Hold memory as standard input asks, and check it
///
/// Reports on standard output whether the content is right.
#[derive(Debug, Args)]
pub(super) struct GuestMemory {
    /// Device to which the guest's kernel swaps
    #[arg(long, value_name = "DEVICE")]
    swap: Option<PathBuf>,
}

impl GuestMemory {
    /// Serves its standard input for ever.
    ///
    /// # Errors
    /// If it cannot start, or if the console fails.
    pub(super) fn run(self) -> Result<ExitCode> {
        be_a_guest(self.swap.as_deref()).or_fail(|| "holding memory")?;
        Ok(ExitCode::SUCCESS)
    }
}
