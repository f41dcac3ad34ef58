//! `aquifer agent`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use aquifer_agent::config::Config;
use clap::Args;

use super::Common;
use super::doctor::listed;
use crate::doctor::Report;
use crate::doctor::agent::checks;
use crate::failure::{Failure, OrFail, Result};
use crate::logging;
use crate::manual::Manual;
use crate::output;

/// Watches this host's memory, borrows for it and lends of it
///
/// Runs in the foreground and logs on standard error. Above the upper threshold it borrows memory of other hosts and swaps
/// to it; below the lower one it returns it. It grants what other hosts ask for while it has memory to spare, and asks for
/// it back when it runs short itself.
#[derive(Debug, Args)]
pub struct Agent {
    /// The configuration, as 'aquifer init' writes it
    #[arg(long, value_name = "FILE", default_value = "/etc/aquifer/agent.toml")]
    config: PathBuf,
    /// Checks the configuration and all that it names, says what it found, and does nothing else
    ///
    /// Checks certificate and key, cgroup, addresses, directories, peers and groups. Each fault is listed; the exit
    /// status is 1 if the agent could not do its work.
    #[arg(long)]
    check: bool,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer agent", "With the configuration in /etc/aquifer"),
        (
            "aquifer agent --config a.toml --check",
            "Only check the configuration and all that it names",
        ),
        ("AQUIFER_LOG=debug aquifer agent", "Tells more"),
    ],
    notes: &[(
        "Signals",
        "INT (^C) first takes back what is lent, as 'aquifer drain' does, and then gives back what was borrowed, and says how \
         far it is. Once more ends the agent at once: borrowers lose what they have here, unless another agent is started before \
         their io_timeout is over; the exit status is 1 then. TERM leaves borrowed and lent memory as it is \
         for the next agent, and says how long borrowers wait for it, as a restart or an upgrade wants; volumes go on without an agent, and lent pages outlive it. \
         HUP changes nothing: to have the agent read its configuration again, end it by TERM and start it.",
    )],
    files: &[
        ("/etc/aquifer/agent.toml", "the configuration"),
        ("/etc/aquifer/tls", "this host's certificate and key, and the authority's certificate"),
        ("/run/aquifer/agent.sock", "the socket for 'aquifer status', 'borrow' and 'return'"),
        ("/dev/shm/aquifer/HOST", "lent pages"),
    ],
    see_also: &[
        "aquifer-init(1)",
        "aquifer-status(1)",
        "aquifer-borrow(1)",
        "aquifer-return(1)",
        "aquifer-drain(1)",
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
                failure.help("make one with 'aquifer init'")
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
        true => format!("An agent can run with {}.", config.display()),
        false => format!("No agent can do its work with {}.", config.display()),
    };
    format!("{}\n{verdict}", listed(report, output::colours()))
}
