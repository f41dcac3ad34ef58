//! `aquifer serve agent`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use aquifer_agent::config::Config;
use clap::Args;

use crate::commands::Common;
use crate::commands::doctor::listed;
use crate::doctor::Report;
use crate::doctor::agent::checks;
use crate::failure::{Failure, OrFail, Result};
use crate::logging;
use crate::manual::Manual;
use crate::output;

/// The default of --config.
pub(in crate::commands) const CONFIG: &str = "/etc/aquifer/agent.toml";

/// Run this host's agent, which lends and borrows memory
///
/// Runs in the foreground and logs on standard error. Above the upper threshold the agent borrows
/// memory from other hosts and swaps to it. Below the lower threshold it returns that memory.
///
/// The agent lends to other hosts while this host has memory to spare. It recalls that memory
/// when this host runs short.
#[derive(Debug, Args)]
pub struct Agent {
    /// Configuration file: the agent.toml that 'cluster create' or 'join' made
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
    /// Check the configuration and exit
    ///
    /// Checks certificate and key, cgroup, addresses, directories, peers and groups, and lists
    /// every problem. Exits with 1 if the agent could not run.
    #[arg(long)]
    check: bool,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer serve agent", "Run with the configuration in /etc/aquifer"),
        ("aquifer serve agent --config a.toml --check", "Check a configuration and exit"),
        ("AQUIFER_LOG=debug aquifer serve agent", "Log more"),
    ],
    notes: &[(
        "Signals",
        "INT (^C) recalls all leases as 'aquifer host drain' does, then returns what it borrowed, \
         and reports progress. A second INT during the drain ends the agent at once with \
         exit status 1: borrowers lose their pages here, unless another agent starts within their \
         io_timeout. A second INT after the drain leaves what was borrowed to the next agent. TERM \
         keeps borrowed and lent memory for the next agent, as a restart or upgrade needs, and \
         reports how long borrowers wait for it. Volumes keep serving without an agent, and lent \
         pages outlive it. HUP does nothing. To apply a changed configuration, stop the agent with \
         TERM and start it again.",
    )],
    files: &[
        ("/etc/aquifer/agent.toml", "the configuration"),
        ("/etc/aquifer/tls", "this host's certificate and key, and the authority's certificate"),
        ("/run/aquifer/agent.sock", "the socket for 'aquifer status' and 'aquifer host'"),
        ("/dev/shm/aquifer/HOST", "lent pages"),
    ],
    see_also: &[
        "aquifer.toml(5)",
        "aquifer-cluster-init(1)",
        "aquifer-status(1)",
        "aquifer-host-borrow(1)",
        "aquifer-host-return(1)",
        "aquifer-host-drain(1)",
    ],
    ..Manual::NONE
};

impl Agent {
    /// Runs the agent until a signal ends it, or only checks the configuration.
    ///
    /// # Errors
    /// If the configuration is refused, or the agent cannot start.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let config = Config::load(&self.config).map_err(|error| {
            let failure = Failure::new("starting the agent", error);
            if self.config.exists() {
                failure
            } else {
                failure.help("create one with 'aquifer cluster create' or 'aquifer cluster join'")
            }
        })?;
        if self.check {
            let report = Report::of(checks(&config));
            output::answer(common.json, &report, |report| text(&self.config, report))?;
            return Ok(if report.able { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        logging::start()?;
        let exe = std::env::current_exe().or_fail(|| "finding this program")?;
        aquifer_agent::run(config, exe)
            .map_err(|error| Failure::new("running the agent", error))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn text(config: &Path, report: &Report) -> String {
    let verdict = match report.able {
        true => format!("The agent can run with {}.", config.display()),
        false => format!("The agent cannot run with {}.", config.display()),
    };
    format!("{}\n{verdict}", listed(report, output::colours()))
}
