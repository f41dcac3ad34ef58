//! `aquifer demo`.

mod manuals;

use std::fmt::Display;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_page::Bytes;
use clap::{Args, Subcommand};
use serde::Serialize;

use super::Common;
use super::vm::AcceleratorName;
use crate::demo::machine::{MACHINE, Machine};
use crate::demo::{Outcome, groups, migrate, region, resize, sharing};
use crate::failure::{Failure, OrFail, Result};
use crate::manual::Manual;
use crate::output;
pub(super) use manuals::MANUALS;

/// Shows what Aquifer does, for real and at small scale, on this machine
#[derive(Debug, Args)]
pub struct Demo {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Sharing(Sharing),
    Region(Region),
    Migrate(Migrate),
    Resize(Resize),
    Groups(Groups),
}

/// Two hosts, one overloaded: memory moves between them, then the roles switch
///
/// Each host is a network namespace with an agent of its own, which manages a memory cgroup as its machine. A real process
/// fills 1.5 times host A's memory with checked content; A borrows from B, and swap on A grows as RAM on B grows. The load
/// ends, A returns what it borrowed. Then B is overloaded. Every byte is verified while it is spread over both hosts.
/// Takes about 40 s and leaves nothing behind but the picture.
#[derive(Debug, Args)]
struct Sharing {
    /// RAM of each host, at least 192MiB
    #[arg(long, value_name = "SIZE", default_value = "384M")]
    memory: Bytes,
    /// Where to save the picture (PNG)
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

/// memcached with its items in a region, four times as large as its local cache
///
/// A real client writes values and reads them all back, and compares every byte, while three quarters of memcached's memory
/// are with a lender. Beside it, in the same run, memcached with all of it in local RAM. Takes about a minute.
#[derive(Debug, Args)]
struct Region {
    /// Local RAM of the region, at least 32MiB
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    cache: Bytes,
    /// Where to save the picture (PNG)
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

/// A guest that is busy with its memory moves to another host and back; beside it, QEMU's own pre-copy of the same guest
///
/// Each host is a network namespace with an agent of its own. The guest checks and rewrites 200 MiB of its 512 all the time, and answers over its
/// serial port. QEMU by itself moves it from host a to host b; then the same guest, with a part of what it uses in local RAM and the rest in the pool, is
/// moved by 'aquifer vm migrate', and back. Takes about a minute, with KVM less, and leaves nothing behind but the picture.
#[derive(Debug, Args)]
struct Migrate {
    /// Percent of what the guest uses that is in local RAM
    #[arg(long, value_name = "PERCENT", default_value_t = 30, value_parser = clap::value_parser!(u64).range(10..=100))]
    local: u64,
    #[command(flatten)]
    guest: Guest,
    /// Where to save the picture (PNG)
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

/// What a demo's guest runs on.
#[derive(Debug, Args)]
struct Guest {
    /// The guest's kernel, with its modules, where it needs some, in lib/modules beside it; the newest in /boot, unless told
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// What runs the guest's code
    #[arg(long, value_name = "WHAT", default_value = "auto")]
    accel: AcceleratorName,
    /// QEMU itself
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    qemu: PathBuf,
}

impl Guest {
    fn machine(self) -> Result<Machine> {
        let Self { kernel, accel, qemu } = self;
        let kernel =
            kernel.map(std::path::absolute).transpose().or_fail(|| "finding the kernel")?;
        Ok(Machine { kernel, accelerator: accel.choose(&qemu, MACHINE), qemu })
    }
}

/// A guest that boots with 512 MiB grows to 2 GiB while it runs, uses that, and gives it back
///
/// In steps of 512 MiB, by virtio-mem. The guest's agent says when its programs can use what it got; a process in it then holds and checks nearly all of it. The
/// times of all stages are shown, of this host and of the guest's kernel (the paper's Table I). Takes about a minute, with KVM less, and leaves nothing behind but
/// the picture.
#[derive(Debug, Args)]
struct Resize {
    /// Its memory is in the pool, with 512 MiB of local RAM as its cache; otherwise all of it is in RAM of this host
    #[arg(long)]
    pool: bool,
    #[command(flatten)]
    guest: Guest,
    /// Where to save the picture (PNG)
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

/// Two tenants with two guests each, all of the same image: equal pages are kept once within a group, and what that saves goes to the guest in need
///
/// Each guest has 256 MiB of its own, and holds 112 MiB that all four have. 'aquifer group scan' runs for each group, and 'aquifer group balance' for the host. One guest
/// comes to need more, and swaps: it gets 10 MiB a second of what its group saves, until it swaps no more. Then the other guest of its group writes to what they shared, and
/// what is not saved any more is taken back. The other group sees nothing of it. All that guests hold is checked. Takes about a minute, and leaves nothing behind but the
/// picture.
#[derive(Debug, Args)]
struct Groups {
    #[command(flatten)]
    guest: Guest,
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
        ("aquifer demo region --picture region.png", "With a histogram of how long fetches took"),
        (
            "aquifer demo migrate --picture migrate.png",
            "With a picture of times and bytes, beside QEMU's",
        ),
        (
            "aquifer demo resize --picture resize.png",
            "With a picture of times, and of memory in the guest and of this host",
        ),
        (
            "aquifer demo groups --picture groups.png",
            "With a picture of what groups save and what their guests have",
        ),
        ("aquifer demo sharing --json", "One object with the figures"),
    ],
    notes: &[(
        "Needs",
        "Root. 'sharing': FUSE and loop devices (or nbd or ublk), memory cgroups with swap accounting, and ip(8). Swap devices belong to \
         the whole kernel: while it runs, other programs of this machine may swap to them too. 'region': what 'aquifer region' needs, and memcached. \
         'migrate': what 'aquifer vm' needs, ip(8), and a kernel for the guest. 'resize' and 'groups': QEMU, modprobe(8), xz(1), a kernel for the guests with its modules.",
    )],
    see_also: &["aquifer-agent(1)"],
    ..Manual::NONE
};

/// A smaller host would have no extent to lend beside its own work.
const LEAST: Bytes = Bytes::mib(192);

/// memcached does not start with less.
const LEAST_CACHE: Bytes = Bytes::mib(32);

impl Demo {
    /// Runs a demo to its end.
    ///
    /// # Errors
    /// If this machine lacks a requirement, if a step fails, or if pages are lost.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        match self.what {
            What::Sharing(demo) => demo.run(common),
            What::Region(demo) => demo.run(common),
            What::Migrate(demo) => demo.run(common),
            What::Resize(demo) => demo.run(common),
            What::Groups(demo) => demo.run(common),
        }
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
        let lost = outcome.summary.pages_lost;
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
