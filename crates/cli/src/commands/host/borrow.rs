//! `aquifer host borrow`.

use std::process::ExitCode;
use std::time::Duration;

use aquifer_api::order::{Borrow as Order, Borrowed};
use aquifer_api::path;
use aquifer_page::Bytes;
use clap::Args;

use crate::agent_call::Socket;
use crate::commands::Common;
use crate::failure::Result;
use crate::manual::Manual;
use crate::output;
use crate::progress::Progress;

/// Borrow memory from other hosts now
///
/// Ignores the agent's thresholds. This host's agent first asks the peers with the most spare
/// memory. The command ends when the kernel swaps to the memory, or with the reason why no host
/// lends. Hosts may grant less than SIZE.
#[derive(Debug, Args)]
pub struct Borrow {
    /// Amount, rounded up to whole extents of 64MiB
    #[arg(long, value_name = "SIZE")]
    size: Bytes,
    #[command(flatten)]
    socket: Socket,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer host borrow --size 2G", "Borrow 2 GiB before a large job"),
        ("aquifer host return", "Give it back afterwards"),
    ],
    see_also: &["aquifer-host-return(1)", "aquifer-status(1)"],
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
        let progress = Progress::spinner(format!("borrowing {}", self.size));
        let order = Order { bytes: self.size, priority: None };
        let what = format!("borrowing {}", self.size);
        let borrowed: Borrowed =
            agent.call(&what, LIMIT, async |client| client.post(path::BORROW, &order).await)?;
        drop(progress);
        output::answer(common.json, &borrowed, |borrowed| {
            let leases = borrowed.leases.len();
            let plural = if leases == 1 { "lease" } else { "leases" };
            format!(
                "borrowed {} in {leases} {plural}: {} is swap now",
                borrowed.bytes, borrowed.device
            )
        })?;
        Ok(ExitCode::SUCCESS)
    }
}
