//! `aquifer cluster token`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use aquifer_agent::cluster::{ClusterDir, Token as ClusterToken};
use aquifer_agent::config::Config;
use clap::Args;
use serde::Serialize;

use crate::commands::Common;
use crate::commands::serve::CONFIG;
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;

/// The life of a token, unless the operator chooses another.
pub(super) const LIFE: &str = "24h";

/// Make a token with which hosts can join
///
/// Prints the command to type on each host that shall join. Run it on a signer: the host on which
/// 'aquifer cluster create' ran.
#[derive(Debug, Args)]
pub struct Token {
    /// How long the token admits hosts
    #[arg(long, value_name = "TIME", default_value = LIFE, value_parser = life)]
    life: Duration,
    /// Configuration file of this host's agent
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[("aquifer cluster token --life 1h", "Admit hosts for an hour")],
    see_also: &["aquifer-cluster-create(1)", "aquifer-cluster-join(1)"],
    ..Manual::NONE
};

/// The longest life of a token.
const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);

#[derive(Debug, Serialize)]
struct Made {
    token: String,
    /// Seconds until the token's end.
    token_s: u64,
    /// Admits another host.
    join: String,
}

impl Token {
    /// Makes a token and prints it.
    ///
    /// # Errors
    /// If this host cannot admit others.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let what = "making a token";
        let (config, cluster) = signer(what, &self.config)?;
        let _locked = cluster.lock().or_fail(|| what)?;
        let token = cluster.new_token(self.life).or_fail(|| what)?;
        let made = Made {
            token: token.to_string(),
            token_s: self.life.as_secs(),
            join: join_command(config.listen, &token),
        };
        output::answer(common.json, &made, |made| {
            format!(
                "on each host that shall join, within {}:\n  {}",
                until(made.token_s),
                made.join
            )
        })?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Loads the configuration of a host that can admit others, and names its cluster's directory.
pub(super) fn signer(what: &str, path: &Path) -> Result<(Config, ClusterDir)> {
    let config = Config::load(path).or_fail(|| what)?;
    let cluster = ClusterDir::new(&config.cluster);
    if cluster.admits() {
        return Ok((config, cluster));
    }
    let why = format!("{} cannot admit hosts to a cluster", config.host);
    let help = "run this on the host on which 'aquifer cluster create' ran; 'aquifer cluster \
                status' shows the hosts that admit others";
    Err(Failure::new(what, why).help(help))
}

/// Parses the life of a token. A secret that lives for ever is none.
pub(super) fn life(text: &str) -> std::result::Result<Duration, String> {
    let life = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if life <= LONGEST { Ok(life) } else { Err("use at most 30 days".to_owned()) }
}

/// Returns the command that makes a host join through the signer at `address`.
pub(super) fn join_command(address: SocketAddr, token: &ClusterToken) -> String {
    format!("aquifer cluster join {address} --token {token}")
}

/// Returns a number of seconds in larger units.
pub(super) fn until(seconds: u64) -> String {
    match seconds {
        0..7200 => humantime::format_duration(Duration::from_secs(seconds)).to_string(),
        _ => format!("{} hours", seconds / 3600),
    }
}
