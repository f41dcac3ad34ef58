//! `aquifer guest-memory`, hidden: the first process of the guest of `aquifer demo resize`.

use std::process::ExitCode;

use clap::Args;

use crate::demo::resize::be_a_guest;
use crate::failure::{OrFail, Result};

/// Holds as many MiB as it is told on standard input, and says on standard output whether they are what they must be
#[derive(Debug, Args)]
#[command(hide = true)]
pub struct GuestMemory {}

impl GuestMemory {
    /// Does so for ever.
    ///
    /// # Errors
    /// If it cannot begin, or say anything any more.
    pub fn run(self) -> Result<ExitCode> {
        be_a_guest().or_fail(|| "holding memory")?;
        Ok(ExitCode::SUCCESS)
    }
}
