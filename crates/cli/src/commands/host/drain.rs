//! `aquifer host drain`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use aquifer_api::client::{CallError, Client};
use aquifer_api::order::{Drain as Order, Draining, Left};
use aquifer_api::path;
use aquifer_page::Bytes;
use clap::Args;

use crate::agent_call::Socket;
use crate::commands::Common;
use crate::failure::{Failure, Result};
use crate::manual::Manual;
use crate::output;
use crate::progress::Progress;

/// Take back all memory that this host lends
///
/// Lending stops. Borrowers move their pages to other lenders or to a local file, while their
/// programs keep running. The command ends when this host lends nothing. Lending stays off until
/// the agent restarts or 'aquifer host drain --end'.
#[derive(Debug, Args)]
pub struct Drain {
    /// Lend again; recalls that have started still finish
    #[arg(long, conflicts_with = "timeout")]
    end: bool,
    /// Stop waiting after this long; the agent keeps draining
    ///
    /// By default the command waits indefinitely.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    #[command(flatten)]
    socket: Socket,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer host drain", "Drain this host before a shutdown"),
        (
            "aquifer host drain --timeout 10m --json",
            "In a script: print one object a second, exit with 1 if memory is left",
        ),
        ("aquifer host drain --end", "Lend again"),
    ],
    notes: &[(
        "Interruption",
        "You may stop the command at any time: the agent keeps draining. On failure the command \
         prints which leases are left, and why.",
    )],
    exit: &[("1", "also: memory is still lent after --timeout, or the agent does not answer")],
    see_also: &["aquifer-serve-agent(1)", "aquifer-status(1)", "aquifer-host-return(1)"],
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
                return Err(Failure::new("draining", format!("{left} is still lent: {why}")).help(
                    "the agent keeps draining; wait with 'aquifer host drain', \
                     or lend again with 'aquifer host drain --end'",
                ));
            }
            std::thread::sleep(LOOK);
            now = agent.call("draining", LIMIT, get)?;
            if !now.on {
                return Err(Failure::new("draining", "another command ended the drain"));
            }
        }
        drop(progress);
        output::answer(common.json, &now, |_| match total {
            Bytes::ZERO => "this host lends nothing; lending is off".to_owned(),
            total => format!("took back all {total}; this host lends nothing"),
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
