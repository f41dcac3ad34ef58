//! `aquifer cluster forget`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use aquifer_api::order::{Forget as Order, Forgotten};
use aquifer_api::path;
use aquifer_api::status::Standing;
use aquifer_page::HostName;
use clap::Args;

use super::token::signer;
use crate::agent_call::Socket;
use crate::commands::Common;
use crate::commands::serve::CONFIG;
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;

/// End the membership of a host that is gone or hostile
///
/// Run it on a signer, for a host that was lost without 'aquifer cluster leave'. Within seconds,
/// all hosts refuse its certificates, close its connections, and free the memory that they lent
/// it. A host that is away does so when it is back. A new machine can then join under the name.
#[derive(Debug, Args)]
pub struct Forget {
    /// Name of the host that is gone
    #[arg(value_name = "NAME")]
    name: HostName,
    /// Configuration file of this host's agent
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
    /// Shut out a host that is up
    ///
    /// Its pages at other hosts are lost to it, and the pages that it lends are lost to others,
    /// except those with a second copy. The tokens that it knows end, too.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    socket: Socket,
}

/// How long the agent may take to tell all hosts.
const LIMIT: Duration = Duration::from_secs(30);

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer cluster forget c", "Let a new machine join under the name of a lost one"),
        ("aquifer cluster forget c --force", "Shut out a host that may be in wrong hands"),
    ],
    notes: &[(
        "Security",
        "The signer signs the end of all certificates that the host has until now, and a new key \
         for the gossip. Nothing takes that back: to return, the host must join again. With \
         --force, the tokens end by which the host joined.",
    )],
    see_also: &["aquifer-cluster-leave(1)", "aquifer-cluster-join(1)"],
    ..Manual::NONE
};

impl Forget {
    /// Ends the membership.
    ///
    /// # Errors
    /// If this host cannot admit others, or its agent does not answer. If the host is up, or the
    /// name is free.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let what = "forgetting a host";
        let (_, cluster) = signer(what, &self.config)?;
        let agent = self.socket.agent(common)?;
        let status = agent.status(what)?;
        let is_up = status.peers.iter().any(|peer| {
            peer.host == self.name && matches!(peer.standing, Standing::Up | Standing::Listed)
        });
        if (is_up && !self.force) || status.host == self.name {
            let why = format!("{} is up", self.name);
            let help = "run 'aquifer cluster leave' there, or shut it out with --force";
            return Err(Failure::new(what, why).help(help));
        }
        // The agent locks the directory: it alone changes what is there.
        if !self.force && !cluster.admitted().or_fail(|| what)?.contains(&self.name) {
            let why = format!("no host {} has joined, or it has left: the name is free", self.name);
            // A signer that was restored on another host has no record of the former one.
            let help = "'aquifer cluster status' lists the hosts; add --force for one that did not \
                        join here, such as a former signer";
            return Err(Failure::new(what, why).help(help));
        }
        let order = Order { host: self.name, force: self.force };
        let forgotten: Forgotten =
            agent.call(what, LIMIT, async |client| client.post(path::FORGET, &order).await)?;
        let force = order.force;
        output::answer(common.json, &forgotten, |forgotten| text(forgotten, force))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn text(Forgotten { host, told, untold, older }: &Forgotten, force: bool) -> String {
    let names =
        |hosts: &[HostName]| hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let mut text = match untold.is_empty() {
        true => format!("no host accepts {host} any more"),
        false => format!("{host} is out of the cluster, and not all hosts know it yet"),
    };
    text += "; a new machine can join under the name";
    if !told.is_empty() {
        text += &format!("\nknown to {}", names(told));
    }
    if !untold.is_empty() {
        text += &format!("\nnot yet known to {}: they learn it when they are back", names(untold));
    }
    if !older.is_empty() {
        let older = names(older);
        text += &match force {
            true => format!("\nout of gossip until they run this version of aquifer: {older}"),
            false => format!(
                "\n{host} can still hear gossip: {older} must first run this version of aquifer, \
                 or add --force"
            ),
        };
    }
    text
}
