//! `aquifer cluster status`.

use std::process::ExitCode;

use aquifer_api::status::{Membership, Peer, Standing};
use aquifer_page::{Bytes, HostName, Zone};
use clap::Args;
use serde::Serialize;

use crate::agent_call::Socket;
use crate::commands::Common;
use crate::failure::Result;
use crate::manual::Manual;
use crate::output;
use crate::table::table;

/// Show the hosts of the cluster
///
/// Lists each host, its zone, whether it is up, and the memory that it could lend, rounded down.
/// The hosts tell each other: any of them knows all. A host that dies is known to be down within 5
/// seconds, and forgotten a day later.
///
/// 'aquifer status --cluster' calls each host, and shows what its memory is promised to.
#[derive(Debug, Args)]
pub struct Status {
    #[command(flatten)]
    socket: Socket,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer cluster status", "Show the hosts, from any of them"),
        ("aquifer cluster status --json", "The same for scripts: one object"),
    ],
    see_also: &["aquifer-status(1)", "aquifer-cluster-join(1)"],
    ..Manual::NONE
};

#[derive(Debug, Serialize)]
struct Cluster {
    host: HostName,
    hosts: Vec<Member>,
}

#[derive(Debug, Serialize)]
struct Member {
    host: HostName,
    address: String,
    standing: Standing,
    /// The memory that it could lend.
    #[serde(skip_serializing_if = "Option::is_none")]
    spare: Option<Bytes>,
    admits: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    zone: Option<Zone>,
}

impl Status {
    /// Shows the hosts of the cluster.
    ///
    /// # Errors
    /// If the agent does not answer.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let status = self.socket.agent(common)?.status("asking for the hosts")?;
        let Membership { address, admits, zone, .. } = status.membership;
        let own = Member {
            host: status.host.clone(),
            address,
            standing: Standing::Up,
            spare: Some(status.memory.spare),
            admits,
            zone,
        };
        let of = |peer: Peer| Member {
            host: peer.host,
            address: peer.address,
            standing: peer.standing,
            spare: peer.spare,
            admits: peer.admits,
            zone: peer.zone,
        };
        let mut hosts: Vec<_> = status.peers.into_iter().map(of).chain([own]).collect();
        hosts.sort_by(|a, b| a.host.cmp(&b.host));
        let cluster = Cluster { host: status.host, hosts };
        output::answer(common.json, &cluster, text)?;
        Ok(ExitCode::SUCCESS)
    }
}

fn text(cluster: &Cluster) -> String {
    let row = |member: &Member| {
        let state = match member.standing {
            Standing::Up => "up",
            Standing::Down => "down",
            Standing::Left => "left",
            Standing::Listed => "in the configuration",
            Standing::Former => "a former peer",
        };
        let mut notes = Vec::new();
        if member.host == cluster.host {
            notes.push("this host");
        }
        if member.admits {
            notes.push("admits hosts");
        }
        vec![
            member.host.to_string(),
            member.address.clone(),
            member.zone.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string),
            state.to_owned(),
            member.spare.map_or_else(|| "?".to_owned(), |spare| spare.to_string()),
            notes.join(", "),
        ]
    };
    table(["HOST", "ADDRESS", "ZONE", "STATE", "COULD LEND", "NOTE"], cluster.hosts.iter().map(row))
}
