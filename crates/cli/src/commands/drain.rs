//! `aquifer drain`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use aquifer_api::client::{CallError, Client};
use aquifer_api::order::{Drain as Order, Draining, Left};
use aquifer_api::path;
use aquifer_page::Bytes;
use clap::Args;

use super::Common;
use crate::agent_call::Socket;
use crate::failure::{Failure, Result};
use crate::manual::Manual;
use crate::output;
use crate::progress::Progress;

/// Take back all memory that this host lends
///
/// Lending stops. Borrowers move what they stored here to other lenders or to a file of their own, while their programs run.
/// The command ends when nothing is lent any more. Lending stays off until the agent starts again, or 'aquifer drain --end'.
#[derive(Debug, Args)]
pub struct Drain {
    /// Lends again; what was asked back already still comes back
    #[arg(long, conflicts_with = "timeout")]
    end: bool,
    /// Gives up waiting after this long; the agent goes on
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    #[command(flatten)]
    socket: Socket,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer drain", "Before this host is shut down"),
        (
            "aquifer drain --timeout 10m --json",
            "In a script: one object a second, exit status 1 if memory is left",
        ),
        ("aquifer drain --end", "Lend again"),
    ],
    notes: &[(
        "Exit status",
        "0 when nothing is lent any more. 1 when the time is over, or the agent does not answer: what is left, and why, is told. \
         The command may be stopped at any time; the agent goes on.",
    )],
    see_also: &["aquifer-agent(1)", "aquifer-status(1)", "aquifer-return(1)"],
    ..Manual::NONE
};

/// How long the agent may take to answer.
const LIMIT: Duration = Duration::from_secs(10);

/// How often the command asks for the progress.
const LOOK: Duration = Duration::from_millis(300);

/// How often the command prints the progress.
const TELL: Duration = Duration::from_secs(1);

impl Drain {
    /// Drains this host, or ends a drain with --end.
    ///
    /// # Errors
    /// If the agent does not answer, if memory is still lent when the time is over, or if another
    /// command ends the drain.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let agent = self.socket.agent(common)?;
        let order = Order { on: !self.end };
        let begun: Draining =
            agent.call("draining", LIMIT, async |client| client.post(path::DRAIN, &order).await)?;
        if self.end {
            output::answer(common.json, &begun, |_| "this host lends again".to_owned())?;
            return Ok(ExitCode::SUCCESS);
        }
        let total = stored(&begun);
        let progress = Progress::bytes("taking back", total);
        let (began, mut told) = (Instant::now(), None::<Instant>);
        let mut now = begun;
        while !now.left.is_empty() {
            let left = stored(&now);
            progress.set(total.max(left).saturating_sub(left), total.max(left));
            if told.is_none_or(|told| told.elapsed() >= TELL) {
                told = Some(Instant::now());
                tell(common.json, &now)?;
            }
            if self.timeout.is_some_and(|timeout| began.elapsed() >= timeout) {
                drop(progress);
                let why = now.left.iter().map(line).collect::<Vec<_>>().join("; ");
                return Err(Failure::new("draining", format!("{left} are still lent: {why}")).help(
                    "the agent goes on; wait with 'aquifer drain', or lend again with 'aquifer drain --end'",
                ));
            }
            std::thread::sleep(LOOK);
            now = agent.call("draining", LIMIT, get)?;
            if !now.on {
                return Err(Failure::new("draining", "this host was told to lend again meanwhile"));
            }
        }
        drop(progress);
        output::answer(common.json, &now, |_| match total {
            Bytes::ZERO => "nothing is lent, and nothing will be".to_owned(),
            total => format!("all {total} are back, and nothing is lent any more"),
        })?;
        Ok(ExitCode::SUCCESS)
    }
}

async fn get(client: Client) -> Result<Draining, CallError> {
    client.get(path::DRAIN).await
}

fn stored(draining: &Draining) -> Bytes {
    draining.left.iter().map(|left| left.bytes).sum()
}

fn line(left: &Left) -> String {
    let Left { lease, borrower, bytes, why, .. } = left;
    format!("{bytes} of {borrower} in lease {lease}: {why}")
}

/// Prints one object, or one line for each lease.
fn tell(json: bool, now: &Draining) -> Result<()> {
    match json {
        true => output::json(now),
        false => now.left.iter().try_for_each(|left| output::line(line(left))),
    }
}
