//! `aquifer cluster forget`.

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_api::status::Standing;
use aquifer_page::HostName;
use clap::Args;
use serde::Serialize;

use super::token::signer;
use crate::agent_call::Socket;
use crate::commands::Common;
use crate::commands::serve::CONFIG;
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;

/// Free the name of a host that is gone
///
/// Run it on a signer, for a host that was lost without 'aquifer cluster leave'. A new machine can
/// then join under the name. The hosts list the lost one as down for another day, or until then.
#[derive(Debug, Args)]
pub struct Forget {
    /// Name of the host that is gone
    #[arg(value_name = "NAME")]
    name: HostName,
    /// Configuration file of this host's agent
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
    #[command(flatten)]
    socket: Socket,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[(
        "aquifer cluster forget c",
        "Let a new machine join under the name of a lost one",
    )],
    notes: &[(
        "Security",
        "The certificate of the lost host stays valid. If its disk may be in wrong hands, create a \
         new cluster.",
    )],
    see_also: &["aquifer-cluster-leave(1)", "aquifer-cluster-join(1)"],
    ..Manual::NONE
};

#[derive(Debug, Serialize)]
struct Forgotten {
    host: HostName,
}

impl Forget {
    /// Frees the name.
    ///
    /// # Errors
    /// If this host cannot admit others, or its agent does not answer. If the host is up, or the
    /// name is free.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let what = "forgetting a host";
        let (_, cluster) = signer(what, &self.config)?;
        let status = self.socket.agent(common)?.status(what)?;
        let is_up = status.peers.iter().any(|peer| {
            peer.host == self.name && matches!(peer.standing, Standing::Up | Standing::Listed)
        });
        if is_up || status.host == self.name {
            let why = format!("{} is up", self.name);
            return Err(Failure::new(what, why).help("run 'aquifer cluster leave' there"));
        }
        let _locked = cluster.lock().or_fail(|| what)?;
        if !cluster.free(&self.name).or_fail(|| what)? {
            let why = format!("no host {} has joined, or it has left: the name is free", self.name);
            return Err(Failure::new(what, why).help("'aquifer cluster status' lists the hosts"));
        }
        let forgotten = Forgotten { host: self.name };
        output::answer(common.json, &forgotten, |forgotten| {
            format!("a new machine can join under the name {}", forgotten.host)
        })?;
        Ok(ExitCode::SUCCESS)
    }
}
