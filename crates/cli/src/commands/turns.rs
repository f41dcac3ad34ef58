//! The arguments of commands that look at VMs in each period.

use std::time::Duration;

use clap::Args;

/// Whether, how often and for how long it acts.
#[derive(Debug, Args)]
pub(super) struct Turns {
    /// Says what it would do, and why it would do nothing, and does nothing
    #[arg(long)]
    pub(super) dry_run: bool,
    /// How often it looks
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = humantime::parse_duration)]
    pub(super) period: Duration,
    /// Looks so often and ends
    #[arg(long, value_name = "N")]
    pub(super) periods: Option<u64>,
}
