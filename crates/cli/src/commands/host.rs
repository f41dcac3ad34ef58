//! `aquifer host`.

mod borrow;
mod drain;
mod return_;
mod rotate_keys;
mod undrain;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::Common;
use crate::failure::Result;
use crate::manual::Manual;

/// Borrow and return memory, and drain this host, through the agent
///
/// The agent borrows, returns and recalls automatically as memory use changes, and replaces keys as
/// they get old. These commands do it now. Only 'drain' stops lending, and moves VMs away;
/// 'undrain' ends that.
#[derive(Debug, Args)]
pub struct Host {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Borrow(borrow::Borrow),
    Return(return_::Return),
    RotateKeys(rotate_keys::RotateKeys),
    Drain(drain::Drain),
    Undrain(undrain::Undrain),
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer host borrow --size 2G", "Borrow 2 GiB before a large job"),
        ("aquifer host return", "Give back all that this host borrowed"),
        ("aquifer host drain", "Take back all memory and move all VMs away, before a shutdown"),
    ],
    see_also: &["aquifer-serve-agent(1)", "aquifer-status(1)"],
    ..Manual::NONE
};

/// One manual for each subcommand, by its name.
pub(super) const MANUALS: &[(&str, &Manual)] = &[
    ("borrow", &borrow::MANUAL),
    ("return", &return_::MANUAL),
    ("rotate-keys", &rotate_keys::MANUAL),
    ("drain", &drain::MANUAL),
    ("undrain", &undrain::MANUAL),
];

impl Host {
    /// Runs the subcommand.
    ///
    /// # Errors
    /// See the subcommands.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        match self.what {
            What::Borrow(borrow) => borrow.run(common),
            What::Return(order) => order.run(common),
            What::RotateKeys(order) => order.run(common),
            What::Drain(drain) => drain.run(common),
            What::Undrain(undrain) => undrain.run(common),
        }
    }
}
