//! `aquifer host return`.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use aquifer_api::client::{CallError, Client};
use aquifer_api::order::{Return as Order, Returned};
use aquifer_api::path;
use aquifer_api::status::{LeaseHealth, Status, Volume};
use aquifer_page::{Bytes, HostName, VolumeId};
use clap::Args;

use crate::agent_call::Socket;
use crate::commands::Common;
use crate::failure::Result;
use crate::manual::Manual;
use crate::output;
use crate::progress::Progress;

/// Give borrowed memory back
///
/// This host's agent swaps the pages back into RAM, removes the swap device and tells the lenders.
/// A volume whose pages do not fit into RAM stays in use, and the command fails.
#[derive(Debug, Args)]
pub struct Return {
    /// Give back only this volume; default all of the agent's
    ///
    /// 'aquifer status' lists the volumes.
    #[arg(long, value_name = "ID")]
    volume: Option<VolumeId>,
    #[command(flatten)]
    socket: Socket,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer host return", "Give everything back"),
        ("aquifer host return --volume 0123456789abcdef0123456789abcdef", "Give back one volume"),
    ],
    see_also: &["aquifer-host-borrow(1)", "aquifer-status(1)"],
    ..Manual::NONE
};

/// How long swapping back may take.
const LIMIT: Duration = Duration::from_secs(1800);

/// How long the agent may take to send the status that precedes the order.
const FIRST_LOOK: Duration = Duration::from_secs(2);

/// How often the command asks for the progress.
const LOOK: Duration = Duration::from_millis(300);

impl Return {
    /// Gives memory back through the agent.
    ///
    /// # Errors
    /// If the agent does not answer, or if RAM is too small for the swapped pages.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let agent = self.socket.agent(common)?;
        let order = Order { volume: self.volume };
        let returned: Returned = agent.call("giving memory back", LIMIT, async |client| {
            post_with_progress(&client, &order, common.json).await
        })?;
        output::answer(common.json, &returned, |returned| match returned.volumes.as_slice() {
            [] => "nothing was borrowed".to_owned(),
            volumes => format!(
                "gave back {}",
                volumes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            ),
        })?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The messages for a person while the agent carries out an order.
struct Telling<'a> {
    order: &'a Order,
    /// Whether to print no messages, because a program reads the output.
    quiet: bool,
    progress: Progress,
    total: Bytes,
    lenders: BTreeSet<HostName>,
}

impl Telling<'_> {
    /// Shows how much is still swapped out. Names each unreachable lender once.
    fn tell(&mut self, status: &Status) {
        let left = swapped(status, self.order.volume);
        if self.total == Bytes::ZERO && left > self.total {
            let limit = humantime::format_duration(LIMIT);
            self.note(&format!(
                "waiting for {left} to be swapped back into memory, at most {limit}"
            ));
        }
        self.total = self.total.max(left);
        self.progress.set(self.total.saturating_sub(left), self.total);
        for held in meant(status, self.order.volume).flat_map(|volume| &volume.leases) {
            if held.health == LeaseHealth::Unreachable && self.lenders.insert(held.lender.clone()) {
                self.note(&format!(
                    "waiting for lender {}, {}: borrow.io_timeout limits the wait for each page",
                    held.lender, held.state
                ));
            }
        }
    }

    fn note(&self, text: &str) {
        if !self.quiet {
            self.progress.note(text);
        }
    }
}

/// Sends the order and reports its progress. The first report precedes the order, and names the
/// lenders that the order waits for.
async fn post_with_progress(
    client: &Client,
    order: &Order,
    quiet: bool,
) -> Result<Returned, CallError> {
    let progress = Progress::bytes("swapping back", Bytes::ZERO);
    let mut telling =
        Telling { order, quiet, progress, total: Bytes::ZERO, lenders: BTreeSet::new() };
    // An agent that is too busy for the status can still carry out the order.
    if let Ok(status) = client.clone().with_timeout(FIRST_LOOK).get(path::STATUS).await {
        telling.tell(&status);
    }
    let answer = client.post(path::RETURN, order);
    tokio::pin!(answer);
    loop {
        let look = async {
            tokio::time::sleep(LOOK).await;
            client.get(path::STATUS).await
        };
        tokio::select! {
            answer = &mut answer => return answer,
            status = look => {
                let _ = status.map(|status| telling.tell(&status));
            }
        }
    }
}

/// Returns the volumes that an order is about.
fn meant(status: &Status, volume: Option<VolumeId>) -> impl Iterator<Item = &Volume> {
    let borrowed = status.loans.borrowed.iter();
    borrowed.filter(move |held| volume.is_none_or(|volume| held.volume == volume))
}

/// Returns the bytes swapped out to the volume, or to all volumes.
fn swapped(status: &Status, volume: Option<VolumeId>) -> Bytes {
    meant(status, volume).map(|held| held.swap_used).sum()
}
