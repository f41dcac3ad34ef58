//! `aquifer cluster`.

mod init;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::Common;
use crate::failure::Result;
use crate::manual::Manual;

/// Set up the hosts that trust each other
#[derive(Debug, Args)]
pub struct Cluster {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Init(init::Init),
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[(
        "aquifer cluster init --dir cluster --host a --address 192.0.2.1 \
         --host b --address 192.0.2.2",
        "Create a cluster of two hosts",
    )],
    see_also: &["aquifer-serve-agent(1)"],
    ..Manual::NONE
};

/// One manual for each subcommand, by its name.
pub(super) const MANUALS: &[(&str, &Manual)] = &[("init", &init::MANUAL)];

impl Cluster {
    /// Runs the subcommand.
    ///
    /// # Errors
    /// See the subcommand.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        match self.what {
            What::Init(init) => init.run(common),
        }
    }
}
