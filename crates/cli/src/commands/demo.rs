//! `aquifer demo`: starts `aquifer-demo`, a binary of its own, as only the demos draw pictures.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Args;

use super::Common;
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;

/// Demonstrate Aquifer on this machine, at small scale
///
/// The demos run real processes, kernels and swap. They check every byte, and remove all that they
/// create but the picture.
///
/// The demos are cluster, sharing, region, migrate, resize and groups. 'aquifer demo --help' and
/// 'aquifer demo cluster --help' describe them. The program aquifer-demo runs them.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct Demo {
    /// Name of the demo and its options
    #[arg(
        value_name = "DEMO",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_hint = clap::ValueHint::Other
    )]
    arguments: Vec<OsString>,
}

/// The manual of the demos, also for `aquifer-demo` itself.
pub const MANUAL: Manual = Manual {
    examples: &[
        (
            "aquifer demo cluster --picture cluster.png",
            "Plot the memory of four hosts over time, with their decisions",
        ),
        ("aquifer demo sharing --picture sharing.png", "Plot RAM and swap of both hosts over time"),
        ("aquifer demo region --picture region.png", "Plot a histogram of fetch times"),
        ("aquifer demo migrate --picture migrate.png", "Plot times and bytes, beside QEMU's"),
        (
            "aquifer demo resize --picture resize.png",
            "Plot times, and memory in the guest and on this host",
        ),
        (
            "aquifer demo groups --picture groups.png",
            "Plot the savings of groups and the memory of their guests",
        ),
        ("aquifer demo cluster --json", "Print one object with the figures"),
    ],
    notes: &[(
        "Requirements",
        "Root. 'cluster': the requirements of 'aquifer vm', ip(8), memory cgroups, and those of \
         'resize'. 'sharing': FUSE and loop devices (or nbd or ublk), memory cgroups with swap \
         accounting, and ip(8). Swap devices belong to the whole kernel: other programs of this \
         machine may swap to them too while it runs. 'region': the requirements of 'aquifer \
         region', and memcached. 'migrate': those of 'aquifer vm', ip(8), and a kernel for the \
         guest. 'resize' and 'groups': QEMU, modprobe(8), xz(1), and a kernel for the guests with \
         its modules; 'groups' and 'resize --pool' also those of 'aquifer region'.",
    )],
    see_also: &["aquifer-serve-agent(1)"],
    ..Manual::NONE
};

const PROGRAM: &str = "aquifer-demo";

impl Demo {
    /// Replaces this process by `aquifer-demo`.
    ///
    /// # Errors
    /// If it is not installed, or cannot be run.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let mut command = Command::new(program()?);
        command.arg("--run-dir").arg(&common.run_dir);
        if common.json {
            command.arg("--json");
        }
        Err(refusal(&command.args(self.arguments).exec()))
    }
}

/// Returns `aquifer-demo` beside this program, else its name, for a search in `PATH`.
fn program() -> Result<PathBuf> {
    let own = std::env::current_exe().or_fail(|| "finding this program")?;
    let beside = own.with_file_name(PROGRAM);
    Ok(if beside.is_file() { beside } else { OsStr::new(PROGRAM).into() })
}

fn refusal(error: &io::Error) -> Failure {
    let what = format!("running '{PROGRAM}'");
    if error.kind() != io::ErrorKind::NotFound {
        return Failure::new(what, error);
    }
    Failure::new(what, "it is neither beside this program nor in PATH")
        .help(format!("install '{PROGRAM}' beside 'aquifer'; 'make install' installs both"))
}
