//! `aquifer volume`.

mod attach;
mod detach;
mod list;

use std::process::ExitCode;

use clap::{Args, Subcommand};

pub(crate) use attach::direct_failure;

use super::Common;
use crate::failure::Result;
use crate::manual::Manual;

/// Attach lent memory as a block device or as swap
///
/// This works without agents: an agent attaches and detaches its own volumes.
#[derive(Debug, Args)]
pub struct Volume {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Attach(Box<attach::Attach>),
    Detach(detach::Detach),
    List(list::List),
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        (
            "aquifer volume attach nbds://b.example.org/ --tls /etc/aquifer/tls --swap",
            "Swap to host b's memory over TLS",
        ),
        ("aquifer volume detach --all", "Give it back"),
    ],
    see_also: &["aquifer-host(1)", "aquifer-serve-export(1)"],
    ..Manual::NONE
};

/// One manual for each subcommand, by its name.
pub(super) const MANUALS: &[(&str, &Manual)] =
    &[("attach", &attach::MANUAL), ("detach", &detach::MANUAL), ("list", &list::MANUAL)];

impl Volume {
    /// Runs the subcommand.
    ///
    /// # Errors
    /// See the subcommands.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        match self.what {
            What::Attach(attach) => attach.run(common),
            What::Detach(detach) => detach.run(common),
            What::List(list) => list.run(common),
        }
    }
}
