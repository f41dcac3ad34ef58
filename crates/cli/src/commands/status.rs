//! `aquifer status`.

mod cluster;

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use aquifer_api::client::Client;
use aquifer_api::cluster::ClusterHost;
use aquifer_api::path;
use aquifer_api::status::Status;
use clap::Args;
use serde::Serialize;

use super::Common;
use super::region::{Listed, listed};
use crate::agent_call::{Agent, Socket};
use crate::failure::Result;
use crate::manual::Manual;
use crate::output;
use crate::view;

/// Show what this host's agent lends and borrows
///
/// Shows the agent's role and memory, what that memory is promised to, and the leases, volumes and
/// peers. Also shows the latest decisions with their numbers, the regions of this host, and
/// programs that wait for lenders.
///
/// With --cluster it shows all hosts of the cluster in one table, from any of them. The agent calls
/// each host. A host that does not answer within 2 seconds is a row that says so.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Show it again in every period of the agent, until stopped
    #[arg(long, short)]
    watch: bool,
    /// Show all hosts of the cluster, a row each
    #[arg(long)]
    cluster: bool,
    #[command(flatten)]
    socket: Socket,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer status", "Show the status once"),
        ("aquifer status --watch", "Show it again in each period"),
        ("aquifer status --json | jq -r .role", "Print only the role"),
        ("aquifer status --cluster", "Show all hosts and their memory in one table"),
        (
            "aquifer status --cluster --json | jq -r '.[] | select(.summary | not) | .host'",
            "Print the hosts that do not answer",
        ),
    ],
    see_also: &["aquifer-why(1)", "aquifer-cluster-status(1)", "aquifer-serve-agent(1)"],
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

/// How long the agent may take to hear from all hosts.
const CLUSTER_LIMIT: Duration = Duration::from_secs(15);

/// How often --watch asks all hosts.
const CLUSTER_PERIOD: Duration = Duration::from_secs(2);

impl StatusArgs {
    /// Shows the agent's status, with --watch once in each of its periods; with --cluster that of
    /// all hosts.
    ///
    /// # Errors
    /// If the agent does not answer, or if the regions cannot be listed.
    pub fn run(&self, common: &Common) -> Result<ExitCode> {
        let agent = self.socket.clone().agent(common)?;
        loop {
            let period = match self.cluster {
                true => self.show_cluster(&agent, common)?,
                false => self.show_host(&agent, common)?,
            };
            if !self.watch {
                return Ok(ExitCode::SUCCESS);
            }
            thread::sleep(period);
        }
    }

    /// Shows this host; returns its period.
    fn show_host(&self, agent: &Agent, common: &Common) -> Result<Duration> {
        let report = agent.status("asking for the status")?;
        let shown = Shown { report, regions: Listed::all(common)? };
        self.clear(common)?;
        output::answer(common.json, &shown, text)?;
        Ok(Duration::from_secs_f64(shown.report.period_s.clamp(0.05, 60.0)))
    }

    fn show_cluster(&self, agent: &Agent, common: &Common) -> Result<Duration> {
        let ask = async |client: Client| client.get::<Vec<ClusterHost>>(path::CLUSTER).await;
        let hosts = agent.call("asking for all hosts", CLUSTER_LIMIT, ask)?;
        self.clear(common)?;
        output::answer(common.json, &hosts, |hosts| cluster::text(hosts, output::width()))?;
        Ok(CLUSTER_PERIOD)
    }

    /// Clears the screen before --watch shows the next answer.
    fn clear(&self, common: &Common) -> Result<()> {
        if self.watch && !common.json && std::io::stdout().is_terminal() {
            // ECMA-48: cursor to the top left corner (CUP), then erase the screen below it (ED).
            output::line("\x1b[H\x1b[J")?;
        }
        Ok(())
    }
}
