//! `aquifer agent`.

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_agent::config::Config;
use clap::Args;

use crate::failure::{Failure, OrFail, Result};
use crate::logging;
use crate::manual::Manual;

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
    /// Reads and checks the configuration, and does nothing else
    #[arg(long)]
    check: bool,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer agent", "With the configuration in /etc/aquifer"),
        ("aquifer agent --config a.toml --check", "Only says whether the configuration is right"),
        ("AQUIFER_LOG=debug aquifer agent", "Tells more"),
    ],
    notes: &[(
        "Signals",
        "INT (^C) first gives back what was borrowed; once more to leave it on. TERM leaves borrowed and lent memory as it is \
         for the next agent, as a restart or an upgrade wants; volumes go on without an agent, and lent pages outlive it. \
         HUP changes nothing: to have the agent read its configuration again, end it by TERM and start it.",
    )],
    files: &[
        ("/etc/aquifer/agent.toml", "the configuration"),
        ("/etc/aquifer/tls", "this host's certificate and key, and the authority's certificate"),
        ("/run/aquifer/agent.sock", "the socket for 'aquifer status', 'borrow' and 'return'"),
        ("/dev/shm/aquifer/HOST", "lent pages"),
    ],
    see_also: &["aquifer-init(1)", "aquifer-status(1)", "aquifer-borrow(1)", "aquifer-return(1)"],
    ..Manual::NONE
};

impl Agent {
    /// Runs until a signal ends it.
    ///
    /// # Errors
    /// If the configuration is refused, or the agent cannot start.
    pub fn run(self) -> Result<ExitCode> {
        let config = Config::load(&self.config).map_err(|error| {
            let failure = Failure::new("starting the agent", error);
            if self.config.exists() { failure } else { failure.help("make one with 'aquifer init'") }
        })?;
        if self.check {
            return Ok(ExitCode::SUCCESS);
        }
        logging::start()?;
        let exe = std::env::current_exe().or_fail(|| "finding this program")?;
        aquifer_agent::run(config, exe).map_err(|error| Failure::new("running the agent", error))?;
        Ok(ExitCode::SUCCESS)
    }
}
