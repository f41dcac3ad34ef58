//! `aquifer-demo guest-load`, hidden: the first process of the guest of `aquifer demo migrate`.

use std::process::ExitCode;

use aquifer_cli::failure::{OrFail, Result};
use clap::Args;

use crate::churn::Load;
use crate::migrate::be_a_guest;

/// Check and rewrite memory without end
///
/// Reads requests from standard input and answers on standard output.
#[derive(Debug, Args)]
pub(super) struct GuestLoad {
    /// Memory to fill, in MiB
    mib: usize,
    /// Percent of the memory that gets nine of ten writes
    hot: usize,
    /// Most MiB to rewrite a second
    rate: usize,
}

impl GuestLoad {
    /// Rewrites memory for ever.
    ///
    /// # Errors
    /// If the memory or the console fails.
    pub(super) fn run(self) -> Result<ExitCode> {
        let Self { mib, hot, rate } = self;
        be_a_guest(Load { mib, hot, rate, seed: 0 }).or_fail(|| "being busy")?;
        Ok(ExitCode::SUCCESS)
    }
}
