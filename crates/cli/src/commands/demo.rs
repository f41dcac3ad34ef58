//! `aquifer demo`.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_page::Bytes;
use clap::{Args, Subcommand};

use super::Common;
use crate::demo::sharing::{self, Options};
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;

/// Shows what Aquifer does, for real and at small scale, on this machine
#[derive(Debug, Args)]
pub struct Demo {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Sharing(Sharing),
}

/// Two hosts, one overloaded: memory moves between them, then the roles switch
///
/// Each host is a network namespace with an agent of its own, which manages a memory cgroup as its machine. A real process
/// fills 1.5 times host A's memory with checked content; A borrows from B, and swap on A grows as RAM on B grows. The load
/// ends, A returns what it borrowed. Then B is overloaded. Every byte is verified while it is spread over both hosts.
/// Takes about 40 s and leaves nothing behind but the picture.
#[derive(Debug, Args)]
struct Sharing {
    /// RAM of each host
    #[arg(long, value_name = "SIZE", default_value = "384M")]
    memory: Bytes,
    /// Where to save the picture (PNG)
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        (
            "aquifer demo sharing --picture sharing.png",
            "With the picture of RAM and swap of both hosts over time",
        ),
        ("aquifer demo sharing --json", "One object with the figures"),
    ],
    notes: &[(
        "Needs",
        "Root, FUSE and loop devices (or nbd or ublk), memory cgroups with swap accounting, and ip(8). Swap devices belong to \
         the whole kernel: while the demo runs, other programs of this machine may swap to them too.",
    )],
    see_also: &["aquifer-agent(1)"],
    ..Manual::NONE
};

/// The smallest host that has an extent to lend and something to do with it.
const LEAST: Bytes = Bytes::mib(192);

impl Demo {
    /// Runs a demo to its end.
    ///
    /// # Errors
    /// What this machine lacks, or which step failed. Lost pages are a failure too.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let What::Sharing(Sharing { memory, picture }) = self.what;
        if memory < LEAST {
            return Err(Failure::new(format!("playing hosts of {memory}"), format!("the least is {LEAST}")));
        }
        let outcome = sharing::run(&Options { memory, run_dir: common.run_dir.clone() })?;
        if let Some(path) = &picture {
            fs::write(path, &outcome.picture)
                .or_fail(|| format!("saving the picture as {}", path.display()))?;
        }
        output::answer(common.json, &outcome.summary, |summary| match &picture {
            Some(path) => format!("{summary}Picture: {}", path.display()),
            None => summary.to_string().trim_end().to_owned(),
        })?;
        let lost = outcome.summary.pages_lost;
        if lost > 0 {
            return Err(Failure::new("sharing memory", format!("{lost} pages were lost")));
        }
        Ok(ExitCode::SUCCESS)
    }
}
