//! `aquifer cluster create`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use aquifer_page::HostName;
use clap::Args;
use serde::Serialize;

use super::own::Own;
use super::token::{LIFE, join_command, life, until};
use crate::commands::Common;
use crate::failure::{OrFail, Result};
use crate::manual::Manual;
use crate::output;

/// An address of nobody (RFC 5737): the route to it tells this host's own address.
const ELSEWHERE: ([u8; 4], u16) = ([192, 0, 2, 1], 9);

/// Create a cluster, with this host as its first
///
/// This host becomes the cluster's signer: it can admit others. The command prints the one to type
/// on each of them. It creates the authority, the cluster's key, this host's certificate, and a
/// commented configuration if there is none.
#[derive(Debug, Args)]
pub struct Create {
    /// Name of the cluster in the authority's certificate
    #[arg(long, value_name = "NAME", default_value = "aquifer")]
    name: String,
    /// How long the first token admits hosts
    #[arg(long, value_name = "TIME", default_value = LIFE, value_parser = life)]
    token_life: Duration,
    #[command(flatten)]
    own: Own,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer cluster create", "Create a cluster on its first host"),
        (
            "aquifer cluster create --host a --address 192.0.2.1",
            "Name the host and the address at which the others reach it",
        ),
    ],
    notes: &[(
        "Security",
        "The holder of ca.key can admit hosts, so only the signer has it. A token is a secret \
         until its end: its holder can join.",
    )],
    files: FILES,
    see_also: &["aquifer-cluster-join(1)", "aquifer-cluster-token(1)", "aquifer-serve-agent(1)"],
    ..Manual::NONE
};

/// The files that `create` and `join` write.
pub(super) const FILES: &[(&str, &str)] = &[
    ("/etc/aquifer/agent.toml", "the host's configuration"),
    ("/etc/aquifer/tls", "the host's certificate and key, and the authority's certificate"),
    ("/var/lib/aquifer/cluster", "the cluster's key and hosts; on a signer also the authority"),
];

#[derive(Debug, Serialize)]
struct Created {
    host: HostName,
    address: SocketAddr,
    config: PathBuf,
    /// Starts the agent.
    start: String,
    token: String,
    /// Seconds until the token's end.
    token_s: u64,
    /// Admits another host.
    join: String,
}

impl Create {
    /// Creates the cluster.
    ///
    /// # Errors
    /// If this host belongs to a cluster already, or a file cannot be written. The command may be
    /// given again then.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let what = "creating a cluster";
        let host = self.own.host(what, ELSEWHERE.into())?;
        let _locked = host.lock(what)?;
        let authority = host.cluster.create(&self.name).or_fail(|| what)?;
        let token = host.cluster.new_token(self.token_life).or_fail(|| what)?;
        host.configure()?;
        // The certificate is last: with it, this host belongs to the cluster.
        let names = [host.address.ip().to_string()];
        // A key without a certificate is of a call that was interrupted.
        authority.issue(&host.tls, &host.name, &names, true).or_fail(|| what)?;
        let created = Created {
            address: host.address,
            start: host.start(),
            token: token.to_string(),
            token_s: self.token_life.as_secs(),
            join: join_command(host.address, &token),
            host: host.name,
            config: host.config,
        };
        output::answer(common.json, &created, text)?;
        Ok(ExitCode::SUCCESS)
    }
}

fn text(created: &Created) -> String {
    let Created { host, address, start, join, token_s, .. } = created;
    format!(
        "created a cluster; this host is {host} at {address}, and admits others\n\n\
         start its agent:\n  {start}\n\n\
         then, on each other host, within {}:\n  {join}",
        until(*token_s)
    )
}
