//! `aquifer cluster join`.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::SystemTime;

use aquifer_agent::cluster::{Key, Token};
use aquifer_api::client::{CallError, Client};
use aquifer_api::message::{Join as Message, Joined, Revoked};
use aquifer_api::path;
use aquifer_page::HostName;
use aquifer_transport::tls::{Request, Revocation, joining_config, keep_revocations};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use clap::Args;
use serde::Serialize;
use tokio::runtime::Builder;

use super::create::FILES;
use super::own::{Host, Own, secret_dir};
use crate::commands::Common;
use crate::failure::{Failure, OrFail, Result};
use crate::init::AGENT_PORT;
use crate::manual::Manual;
use crate::output;

/// Join this host to a cluster
///
/// The signer at HOST:PORT admits this host and gives it a certificate for the key that this host
/// makes. No file needs an edit, here or elsewhere: the hosts of a cluster tell each other which
/// hosts come and go. If the command fails, run it again.
#[derive(Debug, Args)]
pub struct Join {
    /// Address of a signer's agent, as 'aquifer cluster token' prints it
    #[arg(value_name = "HOST:PORT")]
    signer: String,
    /// Token that the signer made
    #[arg(
        long,
        value_name = "TOKEN",
        env = "AQUIFER_TOKEN",
        hide_env_values = true,
        allow_hyphen_values = true
    )]
    token: Token,
    #[command(flatten)]
    own: Own,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer cluster join 192.0.2.1:7070 --token TOKEN", "Join the cluster of 192.0.2.1"),
        (
            "AQUIFER_TOKEN=$(cat token) aquifer cluster join 192.0.2.1:7070",
            "Keep the token out of the list of processes",
        ),
    ],
    notes: &[(
        "Trust",
        "The token has the fingerprint of the cluster's authority, so that no other host can pose \
         as the signer. It proves to the signer that this host may join, and its secret never \
         leaves this host. The same holds for this host's key.",
    )],
    files: FILES,
    see_also: &["aquifer-cluster-create(1)", "aquifer-cluster-token(1)", "aquifer-serve-agent(1)"],
    ..Manual::NONE
};

const WHAT: &str = "joining the cluster";

#[derive(Debug, Serialize)]
struct Done {
    host: HostName,
    address: SocketAddr,
    config: PathBuf,
    /// Starts the agent.
    start: String,
    /// The hosts that the signer knows.
    members: BTreeMap<HostName, SocketAddr>,
}

impl Join {
    /// Joins this host to the cluster.
    ///
    /// # Errors
    /// If the signer does not answer, is of another cluster, or refuses. If a file cannot be
    /// written.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let signer = with_port(&self.signer);
        let host = self.own.host(WHAT, resolved(&signer)?)?;
        if self.token.left(SystemTime::now()).is_none() {
            return Err(Failure::new(WHAT, "the token has ended")
                .help(format!("run 'aquifer cluster token' on {} for another", self.signer)));
        }
        let _locked = host.lock(WHAT)?;
        if host.cluster.admits() {
            let why = format!("{} holds the key of a cluster", host.cluster.path().display());
            return Err(Failure::new(WHAT, why).help(
                "run 'aquifer cluster create' to complete that cluster, or remove the directory",
            ));
        }
        secret_dir(&host.tls)?;
        let request = Request::prepare(&host.tls, &host.name).or_fail(|| WHAT)?;
        let joined = call(&signer, &self.token, &host, &request)?;
        let key = Key::from_hex(&joined.key).ok_or_else(|| {
            Failure::new(WHAT, format!("{} sent a malformed key", self.signer))
                .help("install the same version of aquifer on both hosts")
        })?;
        let members = joined.members.into_iter().map(|member| (member.host, member.address));
        let members: BTreeMap<_, _> = members.filter(|(name, _)| *name != host.name).collect();
        let known = joined.revocations.unwrap_or_default();
        host.cluster.join(&key, &members, joined.life, known.key.as_ref()).or_fail(|| WHAT)?;
        host.configure()?;
        // The certificate is last: with it, this host belongs to the cluster.
        let authority = self.token.authority();
        let of =
            |Revoked { host, until, ends, signature }| Revocation { host, until, ends, signature };
        let revoked = known.revoked.into_iter().map(of).collect();
        keep_revocations(&host.tls, revoked, &joined.authority).or_fail(|| WHAT)?;
        request
            .keep(&host.name, &joined.certificate, &joined.authority, authority)
            .or_fail(|| WHAT)?;
        let done = Done {
            address: host.address,
            start: host.start(),
            host: host.name,
            config: host.config,
            members,
        };
        output::answer(common.json, &done, text)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Adds the port of agents to an address without one.
fn with_port(signer: &str) -> String {
    let port = signer.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    match (signer.parse::<IpAddr>(), port) {
        (Ok(ip), _) => SocketAddr::from((ip, AGENT_PORT)).to_string(),
        (Err(_), Some(_)) => signer.to_owned(),
        (Err(_), None) => format!("{signer}:{AGENT_PORT}"),
    }
}

fn resolved(signer: &str) -> Result<SocketAddr> {
    let found = signer.to_socket_addrs().or_fail(|| format!("resolving '{signer}'"))?.next();
    found.ok_or_else(|| Failure::new(format!("resolving '{signer}'"), "it has no address"))
}

fn call(signer: &str, token: &Token, host: &Host, request: &Request) -> Result<Joined> {
    let address = host.address.to_string();
    let message = Message {
        token: token.id(),
        host: host.name.clone(),
        address: host.address,
        request: BASE64_STANDARD.encode(request.der()),
        proof: token.proof(host.name.as_str(), &address, request.der()),
    };
    let config = joining_config(token.authority()).or_fail(|| WHAT)?;
    let client = Client::of_any_host(signer, Arc::new(config));
    let runtime = Builder::new_current_thread().enable_all().build().or_fail(|| WHAT)?;
    runtime.block_on(client.post(path::JOIN_AND_RENEW, &message)).map_err(|error: CallError| {
        if let CallError::Untrusted { .. } = error {
            let why = format!("the host at {signer} is not of the cluster that made this token");
            return Failure::new(WHAT, why)
                .help("use the address and the token that 'aquifer cluster token' prints");
        }
        let help = error.help();
        let failure = Failure::new(WHAT, &error);
        match (help, error) {
            (Some(help), _) => failure.help(help),
            (None, CallError::Unreachable { .. } | CallError::TimedOut { .. }) => failure
                .help("start the signer's agent with 'aquifer serve agent', and open its port"),
            (None, _) => failure,
        }
    })
}

fn text(done: &Done) -> String {
    let names: Vec<_> = done.members.keys().map(ToString::to_string).collect();
    format!(
        "this host is {} at {}, in a cluster with {}\n\nstart its agent:\n  {}",
        done.host,
        done.address,
        names.join(", "),
        done.start
    )
}

#[cfg(test)]
mod tests {
    use super::with_port;

    #[test]
    fn a_signer_without_a_port_has_that_of_agents() {
        for (given, meant) in [
            ("192.0.2.1", "192.0.2.1:7070"),
            ("192.0.2.1:9", "192.0.2.1:9"),
            ("2001:db8::1", "[2001:db8::1]:7070"),
            ("[2001:db8::1]", "[2001:db8::1]:7070"),
            ("[2001:db8::1]:9", "[2001:db8::1]:9"),
            ("a.example.org", "a.example.org:7070"),
        ] {
            assert_eq!(with_port(given), meant);
        }
    }
}
