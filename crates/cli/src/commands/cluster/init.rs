//! `aquifer cluster init`.

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_page::HostName;
use clap::Args;

use crate::commands::Common;
use crate::failure::{Failure, Result};
use crate::init::{Cluster, Made, Member};
use crate::manual::Manual;
use crate::output;

/// Create certificates and configurations for a cluster
///
/// Run it once, on any machine. It creates a certificate authority if the directory lacks one. For
/// each host it creates a directory with certificate, key and a commented configuration that lists
/// the other hosts. Copy each directory to /etc/aquifer on its host.
///
/// To admit more hosts, run it again, add the peers that it prints to the configurations of the
/// earlier hosts, and restart their agents. It overwrites nothing without --force, and never the
/// authority.
#[derive(Debug, Args)]
pub struct Init {
    /// Directory of the authority, created if missing
    #[arg(long, value_name = "DIR", default_value = "cluster")]
    dir: PathBuf,
    /// Name of the cluster in the authority's certificate
    #[arg(long, value_name = "NAME", default_value = "aquifer")]
    cluster: String,
    /// Host to admit; repeat for more, each with its --address
    #[arg(long = "host", value_name = "NAME", required = true)]
    hosts: Vec<HostName>,
    /// Address at which other hosts reach the preceding --host
    #[arg(long = "address", value_name = "IP|DNS", required = true)]
    addresses: Vec<String>,
    /// Replace certificates, keys and configurations of these hosts
    ///
    /// The old keys are lost: copy the new directories to their hosts.
    #[arg(long)]
    force: bool,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        (
            "aquifer cluster init --dir cluster --host a --address 192.0.2.1 \
             --host b --address 192.0.2.2",
            "Create a cluster of two hosts",
        ),
        ("scp -r cluster/a/. root@192.0.2.1:/etc/aquifer/", "Copy a host's directory to it"),
        ("aquifer cluster init --dir cluster --host c --address 192.0.2.3", "Admit a third host"),
    ],
    notes: &[(
        "Security",
        "The holder of ca.key can admit hosts. Keep the directory where no host can read it, and \
         copy only a host's own directory to it. There is no revocation list. To bar a host, \
         create a new authority and new certificates.",
    )],
    files: &[
        ("DIR/ca.pem", "the authority's certificate, public"),
        ("DIR/ca.key", "the authority's key: its holder can admit hosts"),
        ("DIR/HOST/agent.toml", "the host's configuration"),
        ("DIR/HOST/tls/", "the host's certificate and key, and a copy of ca.pem"),
    ],
    see_also: &["aquifer-serve-agent(1)"],
    ..Manual::NONE
};

impl Init {
    /// Makes the missing files and lists them. Exits with 2 if hosts and addresses do not pair up.
    ///
    /// # Errors
    /// If an address cannot be resolved, or if two hosts have the same name or address. If a file
    /// exists already or cannot be written. Then the command makes nothing.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        if self.hosts.len() != self.addresses.len() {
            let why = format!("{} hosts and {} addresses", self.hosts.len(), self.addresses.len());
            let failure = Failure::new("reading the command line", why);
            failure.help("write --host NAME --address IP for each host").report(common.json);
            return Ok(ExitCode::from(2));
        }
        let members = self
            .hosts
            .iter()
            .zip(&self.addresses)
            .map(|(host, address)| Member::new(host, address));
        let members = members.collect::<Result<Vec<_>>>()?;
        let cluster = Cluster { dir: self.dir, name: self.cluster };
        let made = cluster.make(&members, self.force)?;
        output::answer(common.json, &made, text)?;
        Ok(ExitCode::SUCCESS)
    }
}

fn text(made: &Made) -> String {
    let mut lines = Vec::new();
    let authority = made.authority.display();
    lines.push(if made.authority_is_new {
        format!("created the authority in {authority}; the holder of its ca.key can admit hosts")
    } else {
        format!("used the authority in {authority}")
    });
    for host in &made.hosts {
        lines.push(format!(
            "created {}: copy it to /etc/aquifer on {}",
            host.dir.display(),
            host.name
        ));
    }
    if !made.to_be_told.is_empty() {
        let names: Vec<_> = made.to_be_told.iter().map(ToString::to_string).collect();
        lines.push(format!(
            "add to agent.toml on {}:\n{}",
            names.join(", "),
            made.peers.trim_end()
        ));
    }
    lines.join("\n")
}
