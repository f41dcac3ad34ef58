//! The arguments of commands that look at VMs in each period.

use std::time::Duration;

use clap::Args;

/// Whether, how often and for how long it acts.
#[derive(Debug, Args)]
pub(super) struct Turns {
    /// Print decisions and reasons, but change nothing
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Time between two checks of the VMs
    #[arg(long, value_name = "TIME", default_value = "1s",
        value_parser = humantime::parse_duration)]
    pub(super) period: Duration,
    /// End after this many periods; default never
    #[arg(long, value_name = "N")]
    pub(super) periods: Option<u64>,
}
