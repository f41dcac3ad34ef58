//! `aquifer cluster`.

mod create;
mod forget;
mod init;
mod join;
mod leave;
mod own;
mod status;
mod token;

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
    Create(create::Create),
    Join(join::Join),
    Leave(leave::Leave),
    Forget(forget::Forget),
    Token(token::Token),
    Status(status::Status),
    Init(init::Init),
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer cluster create", "Create a cluster on its first host"),
        ("aquifer cluster join 192.0.2.1:7070 --token TOKEN", "Join another host to it"),
        ("aquifer cluster status", "Show its hosts"),
    ],
    see_also: &["aquifer-serve-agent(1)"],
    ..Manual::NONE
};

/// One manual for each subcommand, by its name.
pub(super) const MANUALS: &[(&str, &Manual)] = &[
    ("create", &create::MANUAL),
    ("join", &join::MANUAL),
    ("leave", &leave::MANUAL),
    ("forget", &forget::MANUAL),
    ("token", &token::MANUAL),
    ("status", &status::MANUAL),
    ("init", &init::MANUAL),
];

impl Cluster {
    /// Runs the subcommand.
    ///
    /// # Errors
    /// See the subcommand.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        match self.what {
            What::Create(create) => create.run(common),
            What::Join(join) => join.run(common),
            What::Leave(leave) => leave.run(common),
            What::Forget(forget) => forget.run(common),
            What::Token(token) => token.run(common),
            What::Status(status) => status.run(common),
            What::Init(init) => init.run(common),
        }
    }
}
