//! `aquifer status`.

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use aquifer_api::status::Status;
use clap::Args;
use serde::Serialize;

use super::Common;
use super::region::{Listed, listed};
use crate::agent_call::Socket;
use crate::failure::Result;
use crate::manual::Manual;
use crate::output;
use crate::view;

/// Show what this host's agent lends and borrows
///
/// Shows the agent's role and memory, what that memory is promised to, and the leases, volumes and
/// peers. Also shows the latest decisions with their numbers, the regions of this host, and
/// programs that wait for lenders.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Show it again in every period of the agent, until stopped
    #[arg(long, short)]
    watch: bool,
    #[command(flatten)]
    socket: Socket,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer status", "Show the status once"),
        ("aquifer status --watch", "Show it again in each period"),
        ("aquifer status --json | jq -r .role", "Print only the role"),
    ],
    see_also: &["aquifer-why(1)", "aquifer-serve-agent(1)"],
    ..Manual::NONE
};

/// The answer of `aquifer status`.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    report: Status,
    regions: Vec<Listed>,
}

fn text(shown: &Shown) -> String {
    let report = view::status(&shown.report);
    if shown.regions.is_empty() {
        report
    } else {
        format!("{report}\n\nRegions\n{}", listed(&shown.regions))
    }
}

impl StatusArgs {
    /// Shows the agent's status, with --watch once in each of its periods.
    ///
    /// # Errors
    /// If the agent does not answer, or if the regions cannot be listed.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let agent = self.socket.agent(common)?;
        loop {
            let report = agent.status("asking for the status")?;
            if self.watch && !common.json && std::io::stdout().is_terminal() {
                // ECMA-48: cursor to the top left corner (CUP), then erase the screen below it
                // (ED).
                output::line("\x1b[H\x1b[J")?;
            }
            let shown = Shown { report, regions: Listed::all(common)? };
            output::answer(common.json, &shown, text)?;
            if !self.watch {
                return Ok(ExitCode::SUCCESS);
            }
            thread::sleep(Duration::from_secs_f64(shown.report.period_s.clamp(0.05, 60.0)));
        }
    }
}
