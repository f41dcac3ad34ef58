//! `aquifer guest-load`, hidden: the first process of the guest of `aquifer demo migrate`.

use std::process::ExitCode;

use clap::Args;

use crate::demo::churn::Load;
use crate::demo::migrate::be_a_guest;
use crate::failure::{OrFail, Result};

/// Checks and rewrites memory all the time, and answers on standard output what is asked on standard input
#[derive(Debug, Args)]
pub struct GuestLoad {
    /// Memory that it fills
    mib: usize,
    /// Percent of that which nine of ten writes go to
    hot: usize,
    /// MiB that it rewrites a second at most
    rate: usize,
}

impl GuestLoad {
    /// Rewrites memory for ever.
    ///
    /// # Errors
    /// If the memory or the console fails.
    pub fn run(self) -> Result<ExitCode> {
        let Self { mib, hot, rate } = self;
        be_a_guest(Load { mib, hot, rate, seed: 0 }).or_fail(|| "being busy")?;
        Ok(ExitCode::SUCCESS)
    }
}
