//! The command line of `aquifer-demo`: arguments, manual and implementation.

mod guest;
mod guest_load;
mod guest_memory;
mod manuals;
pub(crate) mod worker;

use std::ffi::OsString;
use std::fmt::Display;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_cli::commands::{Common, demo, parse_as};
use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_cli::manual::Manual;
use aquifer_cli::output;
use aquifer_page::Bytes;
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use serde::Serialize;

use crate::{Outcome, cluster, groups, migrate, region, resize, sharing};
use guest::Guest;
use manuals::MANUALS;

/// Demonstrate Aquifer on this machine, at small scale
///
/// The demos run real processes, kernels and swap. They check every byte, and remove all that they
/// create but the picture.
#[derive(Debug, Parser)]
#[command(
    name = "aquifer-demo",
    bin_name = "aquifer demo",
    version,
    disable_help_subcommand = true,
    max_term_width = 100
)]
pub(crate) struct Demo {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Cluster(Cluster),
    Sharing(Sharing),
    Region(Region),
    Migrate(Migrate),
    Resize(Resize),
    Groups(Groups),
}

/// Join four hosts and keep a guest's memory at them
///
/// Each host is a network namespace with its own agent, which manages a memory cgroup as its
/// machine. One command joins each, and no file is edited. A VM starts on host A, and no lender is
/// named: A's agent finds one for the cold pages.
///
/// A program on that lender then needs the memory. The lender recalls it, and the pages move to
/// another host, which drains and leaves the cluster. Then A stays overloaded: its agent moves the
/// VM. Then the VM's new host drains, too: the VM moves back, and the host leaves.
///
/// The VM is of a group, which one command on A created for all hosts. At last a second VM of the
/// group starts on A. The scanner of A's agent finds pages of both that are equal, and A keeps them
/// once, until a guest writes to them.
///
/// The guests rewrite their memory, and verify every byte. Takes 40 seconds.
#[derive(Debug, Args)]
struct Cluster {
    #[command(flatten)]
    guest: Guest,
    /// Save the picture (PNG) as FILE; default none
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

/// Move memory between two hosts that overload in turn
///
/// Each host is a network namespace with its own agent, which manages a memory cgroup as its
/// machine. A process fills 1.5 times host A's memory with checked content. A borrows from B, and
/// swap on A grows as RAM use on B grows.
///
/// The load ends and A returns the memory. Then B is overloaded. Every byte is verified while pages
/// are on both hosts. Takes about 40 s.
#[derive(Debug, Args)]
struct Sharing {
    /// RAM of each host, at least 192MiB
    #[arg(long, value_name = "SIZE", default_value = "384M")]
    memory: Bytes,
    /// Save the picture (PNG) as FILE; default none
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

/// Run memcached with its items in a region
///
/// The region is four times as large as its local cache. A client writes values, reads all back and
/// compares every byte, while a lender holds three quarters of memcached's memory. The same run
/// measures memcached with all memory in local RAM. Takes about a minute.
#[derive(Debug, Args)]
struct Region {
    /// Local RAM of the region, at least 32MiB
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    cache: Bytes,
    /// Save the picture (PNG) as FILE; default none
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

/// Migrate a busy guest and compare with QEMU's pre-copy
///
/// Each host is a network namespace with its own agent. The guest checks and rewrites 200 MiB of
/// its 512 MiB without pause, and answers over its serial port. First QEMU alone migrates it from
/// host a to host b. Then 'aquifer vm migrate' moves the same guest there and back, with part of
/// its memory in local RAM and the rest in the pool. Takes about a minute, less with KVM.
#[derive(Debug, Args)]
struct Migrate {
    /// Percent of the guest's used memory in local RAM
    #[arg(long, value_name = "PERCENT", default_value_t = 30,
        value_parser = clap::value_parser!(u64).range(10..=100))]
    local: u64,
    #[command(flatten)]
    guest: Guest,
    /// Save the picture (PNG) as FILE; default none
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

/// Grow a guest from 512 MiB to 2 GiB and shrink it again
///
/// It grows in steps of 512 MiB, by virtio-mem, while it runs. The guest's agent reports when its
/// programs can use the memory. A process in the guest then fills and checks nearly all of it. The
/// demo prints the times of all stages, on this host and in the guest's kernel. Takes about a
/// minute, less with KVM.
#[derive(Debug, Args)]
struct Resize {
    /// Put the guest's memory into the pool with 512 MiB of cache
    ///
    /// By default all of it is in RAM of this host.
    #[arg(long)]
    pool: bool,
    #[command(flatten)]
    guest: Guest,
    /// Save the picture (PNG) as FILE; default none
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

/// Share pages in two groups and give savings to a guest
///
/// Each group has two guests, all four of the same image. Each guest has 256 MiB and holds 112 MiB
/// of content that all four have. 'aquifer serve dedup' runs for each group, and 'aquifer serve
/// reprovision' for the host.
///
/// One guest needs more memory and swaps. It gets 10 MiB a second of its group's savings until it
/// swaps no more. Then the other guest of its group writes to shared pages, and the lost savings
/// are taken back. The other group is not affected. Takes about a minute.
#[derive(Debug, Args)]
struct Groups {
    #[command(flatten)]
    guest: Guest,
    /// Save the picture (PNG) as FILE; default none
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

/// A smaller host would have no extent to lend beside its own work.
const LEAST: Bytes = Bytes::mib(192);

/// memcached does not start with less.
const LEAST_CACHE: Bytes = Bytes::mib(32);

impl Demo {
    /// Parses a command line.
    ///
    /// # Errors
    /// With the exit code, if help is printed, or if the line is invalid and the reason is printed.
    pub(crate) fn parse(line: Vec<OsString>) -> Result<Self, ExitCode> {
        parse_as(command(), line)
    }

    /// Runs a demo to its end.
    ///
    /// # Errors
    /// If this machine lacks a requirement, if a step fails, or if pages are lost.
    pub(crate) fn run(self) -> Result<ExitCode> {
        let common = &self.common;
        match self.what {
            What::Cluster(demo) => demo.run(common),
            What::Sharing(demo) => demo.run(common),
            What::Region(demo) => demo.run(common),
            What::Migrate(demo) => demo.run(common),
            What::Resize(demo) => demo.run(common),
            What::Groups(demo) => demo.run(common),
        }
    }
}

impl Cluster {
    fn run(self, common: &Common) -> Result<ExitCode> {
        let Self { guest, picture } = self;
        let options = cluster::Options { machine: guest.machine()?, run_dir: run_dir(common)? };
        let outcome = cluster::run(&options)?;
        let (wrong, edited) = (outcome.summary.tally.wrong, outcome.summary.files_edited);
        let violations = outcome.summary.ledger_violations;
        show(common, &outcome, picture)?;
        is_zero(wrong, "keeping a guest's memory", || format!("{wrong} pages are wrong"))?;
        is_zero(edited, "joining a cluster", || format!("{edited} files changed"))?;
        is_zero(violations, "accounting for memory", || {
            format!("{violations} readings do not add up")
        })
    }
}

impl Sharing {
    fn run(self, common: &Common) -> Result<ExitCode> {
        let Self { memory, picture } = self;
        if memory < LEAST {
            return Err(Failure::new(
                format!("playing hosts of {memory}"),
                format!("the least is {LEAST}"),
            ));
        }
        let outcome = sharing::run(&sharing::Options { memory, run_dir: common.run_dir.clone() })?;
        let lost = outcome.summary.figures.pages_lost;
        show(common, &outcome, picture)?;
        is_zero(lost, "sharing memory", || format!("{lost} pages were lost"))
    }
}

impl Region {
    fn run(self, common: &Common) -> Result<ExitCode> {
        let Self { cache, picture } = self;
        if cache < LEAST_CACHE {
            return Err(Failure::new(
                format!("a cache of {cache}"),
                format!("the least is {LEAST_CACHE}"),
            ));
        }
        let outcome = region::run(&region::Options { cache, run_dir: run_dir(common)? })?;
        let wrong = outcome.summary.values_wrong;
        show(common, &outcome, picture)?;
        is_zero(wrong, "keeping values in a region", || format!("{wrong} are wrong"))
    }
}

impl Migrate {
    fn run(self, common: &Common) -> Result<ExitCode> {
        let Self { local, guest, picture } = self;
        let options =
            migrate::Options { local, machine: guest.machine()?, run_dir: run_dir(common)? };
        let outcome = migrate::run(&options)?;
        let wrong = outcome.summary.guest_errors;
        show(common, &outcome, picture)?;
        is_zero(wrong, "moving a guest", || format!("it found {wrong} pages wrong"))
    }
}

impl Resize {
    fn run(self, common: &Common) -> Result<ExitCode> {
        let Self { pool, guest, picture } = self;
        let options =
            resize::Options { pool, machine: guest.machine()?, run_dir: run_dir(common)? };
        let outcome = resize::run(&options)?;
        let errors = outcome.summary.guest_errors;
        show(common, &outcome, picture)?;
        is_zero(errors, "resizing a guest", || format!("it had {errors} errors"))
    }
}

impl Groups {
    fn run(self, common: &Common) -> Result<ExitCode> {
        let Self { guest, picture } = self;
        let options = groups::Options { machine: guest.machine()?, run_dir: run_dir(common)? };
        let outcome = groups::run(&options)?;
        let (errors, across) = (outcome.summary.guest_errors, outcome.summary.cross_group_merges);
        show(common, &outcome, picture)?;
        is_zero(across, "keeping groups apart", || {
            format!("{across} pages were shared across them")
        })?;
        is_zero(errors, "sharing within groups", || format!("the guests had {errors} errors"))
    }
}

fn run_dir(common: &Common) -> Result<PathBuf> {
    std::path::absolute(&common.run_dir).or_fail(|| "finding the run directory")
}

/// Fails if the demo counted errors.
fn is_zero(wrong: u64, doing: &str, why: impl FnOnce() -> String) -> Result<ExitCode> {
    if wrong == 0 { Ok(ExitCode::SUCCESS) } else { Err(Failure::new(doing, why())) }
}

/// Saves the picture if the user wants one, and prints the figures.
fn show(
    common: &Common,
    outcome: &Outcome<impl Serialize + Display>,
    picture: Option<PathBuf>,
) -> Result<()> {
    if let Some(path) = &picture {
        fs::write(path, &outcome.picture)
            .or_fail(|| format!("saving the picture as {}", path.display()))?;
    }
    output::answer(common.json, &outcome.summary, |summary| match &picture {
        Some(path) => format!("{summary}Picture: {}", path.display()),
        None => summary.to_string().trim_end().to_owned(),
    })
}

/// Returns the whole command line, with every manual in its place.
fn command() -> clap::Command {
    let manual = |name: &str| MANUALS.iter().find(|(known, _)| *known == name);
    demo::MANUAL.attach(Demo::command()).mut_subcommands(|part| {
        manual(part.get_name()).map_or(&Manual::NONE, |(_, manual)| manual).attach(part)
    })
}

#[cfg(test)]
mod tests;
