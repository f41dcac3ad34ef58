//! `aquifer borrow`.

use std::process::ExitCode;
use std::time::Duration;

use aquifer_api::order::{Borrow as Order, Borrowed};
use aquifer_api::path;
use aquifer_page::Bytes;
use clap::Args;

use super::Common;
use crate::agent_call::Socket;
use crate::failure::Result;
use crate::manual::Manual;
use crate::output;
use crate::progress::Progress;

/// Borrows memory from other hosts now, whatever the thresholds say
///
/// Asks this host's agent, which asks its peers, most spare memory first. The command ends when the memory is swapped on,
/// or with the reason why nobody lends any. What is granted may be less than what was asked for.
#[derive(Debug, Args)]
pub struct Borrow {
    /// How much, rounded up to whole extents of 64MiB
    #[arg(value_name = "SIZE")]
    bytes: Bytes,
    #[command(flatten)]
    socket: Socket,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer borrow 2G", "Have 2 GiB more before a large job"),
        ("aquifer return", "Give it back after"),
    ],
    see_also: &["aquifer-return(1)", "aquifer-status(1)"],
    ..Manual::NONE
};

/// How long the agent may take: it asks lenders one after the other and makes a device.
const LIMIT: Duration = Duration::from_secs(120);

impl Borrow {
    /// Borrows memory through the agent, and prints the device.
    ///
    /// # Errors
    /// If the agent does not answer, or no host lends.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let agent = self.socket.agent(common)?;
        let progress = Progress::spinner(format!("borrowing {}", self.bytes));
        let order = Order { bytes: self.bytes, priority: None };
        let what = format!("borrowing {}", self.bytes);
        let borrowed: Borrowed =
            agent.call(&what, LIMIT, async |client| client.post(path::BORROW, &order).await)?;
        drop(progress);
        output::answer(common.json, &borrowed, |borrowed| {
            let leases = borrowed.leases.len();
            let plural = if leases == 1 { "lease" } else { "leases" };
            format!(
                "borrowed {} by {leases} {plural}: {} is swap now",
                borrowed.bytes, borrowed.device
            )
        })?;
        Ok(ExitCode::SUCCESS)
    }
}
