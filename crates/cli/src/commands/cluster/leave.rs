//! `aquifer cluster leave`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use aquifer_agent::cluster::ClusterDir;
use aquifer_agent::config::Config;
use aquifer_api::order::{Departed, Leave as Order};
use aquifer_api::path;
use aquifer_transport::tls::{CA_CERTIFICATE, HOST_CERTIFICATE, HOST_KEY, REVOCATIONS};
use clap::Args;

use crate::agent_call::{Agent, Socket};
use crate::commands::Common;
use crate::commands::serve::CONFIG;
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;

/// Leave the cluster for good
///
/// The other hosts forget this one, its name is free, and its agent ends. The command removes the
/// certificate, its key, and all that this host knows of the cluster; the configuration stays.
/// First run 'aquifer host drain', which also moves the VMs away, and 'aquifer host return'.
#[derive(Debug, Args)]
pub struct Leave {
    /// Configuration file of this host's agent
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
    /// Leave although this host's agent does not run
    ///
    /// Only if it cannot run. Pages that this host has at others, or others have here, are lost.
    /// The name stays taken: run 'aquifer cluster forget NAME' on a signer.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    socket: Socket,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer host drain", "First take back all memory and move all VMs away"),
        ("aquifer host return", "Give back all memory"),
        ("aquifer cluster leave", "Leave"),
    ],
    files: super::create::FILES,
    see_also: &["aquifer-cluster-join(1)", "aquifer-host-drain(1)", "aquifer-host-return(1)"],
    ..Manual::NONE
};

/// How long the agent may take: it calls the signers.
const LIMIT: Duration = Duration::from_secs(90);

impl Leave {
    /// Leaves the cluster.
    ///
    /// # Errors
    /// If the agent does not answer, if memory is lent or borrowed, if a VM has memory at lenders,
    /// or if this host is the only one that can admit others. If a file cannot be removed.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let what = "leaving the cluster";
        let config = Config::load(&self.config).or_fail(|| what)?;
        let agent = self.socket.agent(common)?;
        let departed = match self.force {
            true => stay_silent(what, &agent)?,
            false => ask(what, &agent, &self.config, &config)?,
        };
        // The certificate goes first: without it, this host belongs to no cluster.
        for file in [HOST_CERTIFICATE, HOST_KEY, CA_CERTIFICATE, REVOCATIONS] {
            remove(&config.tls.join(file)).or_fail(|| what)?;
        }
        ClusterDir::new(config.cluster).remove().or_fail(|| what)?;
        output::answer(common.json, &departed, |departed| text(&config.host, departed))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Lets the agent leave, and end.
fn ask(what: &str, agent: &Agent, path: &Path, config: &Config) -> Result<Departed> {
    let status = agent.status(what).map_err(|failure| failure.help(UNREACHABLE))?;
    if status.host != config.host {
        let (found, here) = (status.host, &config.host);
        let why = format!("the agent is of {found}, and {} of {here}", path.display());
        return Err(Failure::new(what, why).help("name the right one with --config or --socket"));
    }
    agent.call(what, LIMIT, async |client| client.post(path::LEAVE, &Order {}).await)
}

/// The remedy if no agent answers.
const UNREACHABLE: &str = "start it with 'aquifer serve agent'; if it cannot run, use --force";

/// Refuses if the agent runs, which could still tell the others.
fn stay_silent(what: &str, agent: &Agent) -> Result<Departed> {
    match agent.status(what) {
        Ok(status) => {
            let why = format!("the agent of {} runs, and can tell the others", status.host);
            Err(Failure::new(what, why).help("leave without --force"))
        }
        Err(_) => Ok(Departed { name_taken: Some("no agent told the others".to_owned()) }),
    }
}

fn remove(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn text(host: &aquifer_page::HostName, departed: &Departed) -> String {
    match &departed.name_taken {
        None => format!("{host} has left the cluster"),
        Some(why) => format!("{host} has left the cluster, but its name stays taken: {why}"),
    }
}
