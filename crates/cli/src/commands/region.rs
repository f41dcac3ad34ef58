//! `aquifer region`.

mod exec;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_page::{Bytes, EXTENT_SIZE, VolumeId};
use aquifer_pool::VolumeConfig;
use aquifer_region::process::{Files, RegionSpec, Status, client};
use aquifer_region::{PolicyKind, Scheme};
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::Common;
use crate::failure::{Failure, OrFail, Result};
use crate::lender::{Lender, Trust};
use crate::lender_uri::LenderUri;
use crate::manual::Manual;
use crate::output;
use crate::progress::Progress;
use exec::Exec;
pub(crate) use exec::with_shim;
use show::{Listed, listed};

/// Memory of programs that is in the pool, with local RAM as its cache
///
/// A region is a file under RUN_DIR/regions that a program maps: QEMU by 'memory-backend-file,share=on', memcached by '-e'. What
/// the program touches is brought from lenders, what does not fit into the local cache goes back to them. 'aquifer region exec'
/// runs an unmodified program so that it can.
#[derive(Debug, Args)]
pub struct Region {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Create(Create),
    List(List),
    /// What is where in a region, who maps it, and how long faults took
    Show(Which),
    ResizeCache(ResizeCache),
    /// Makes all of a region read as zeroes, and gives back what it took, here and with lenders
    Drop(Which),
    /// Takes a region away that nobody maps, with all that is in it
    Rm(Which),
    Exec(Exec),
}

/// Makes a region and starts its engine; prints the file to map
#[derive(Debug, Args)]
pub struct Create {
    /// The region's name, and that of its file
    name: String,
    /// Its size
    #[arg(long, value_name = "SIZE")]
    size: Bytes,
    /// How much of it may be in local RAM
    #[arg(long, value_name = "SIZE")]
    cache: Bytes,
    /// Where its pages go, as in 'aquifer attach'; can be given several times
    #[arg(long = "lender", value_name = "URI", required = true)]
    lenders: Vec<LenderUri>,
    /// Which pages leave: round-robin, clock, fifo, random or sieve
    #[arg(long, value_name = "POLICY", default_value_t = PolicyKind::default())]
    policy: PolicyKind,
    /// When they leave
    #[arg(long, value_name = "SCHEME", default_value = "pre-evict")]
    scheme: SchemeName,
    /// Faults that are served at a time
    #[arg(long, value_name = "N", default_value_t = RegionSpec::DEFAULT_WORKERS)]
    workers: usize,
    #[command(flatten)]
    trust: Trust,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SchemeName {
    /// When a page needs the frame
    OnDemand,
    /// Before: a few frames are kept free, so that a fetch does not wait for a page that leaves
    PreEvict,
}

/// The regions of this host
#[derive(Debug, Args)]
pub struct List {}

// Its help is that of the command that takes it.
#[derive(Debug, Args)]
#[expect(missing_docs, reason = "a text here would take the place of the commands' own")]
pub struct Which {
    /// The region
    name: String,
}

/// Changes how much of a region may be in local RAM, while it is in use
///
/// Returns when the cache is within the new limit.
#[derive(Debug, Args)]
pub struct ResizeCache {
    /// The region
    name: String,
    /// The new limit
    cache: Bytes,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        (
            "aquifer region create items --size 4G --cache 1G --lender nbds://b.example.org/ --tls /etc/aquifer/tls",
            "4 GiB of memory, of which 1 GiB at most is local RAM",
        ),
        (
            "aquifer region exec -- memcached -u root -m 4096 -e /run/aquifer/regions/items",
            "memcached with its items there",
        ),
        ("aquifer region show items", "What is where, and how long faults take"),
        ("aquifer region resize-cache items 512M", "Gives half of the RAM back, now"),
        ("aquifer region rm items", "Takes it away, with what was in it"),
    ],
    notes: &[
        (
            "What is kept",
            "A region and what is in it outlive the programs that map it, until 'rm' or a reboot. An engine that dies is followed by \
             another, which goes on where it was; programs wait meanwhile. A lender that cannot be reached has the programs \
             wait that touch its pages.",
        ),
        (
            "Needs",
            "Root, and Linux 6.7 or later (userfaultfd with asynchronous write-protection, PAGEMAP_SCAN). Programs must map the \
             region shared. Their children do not see it. They must not do direct I/O (O_DIRECT) to it.",
        ),
    ],
    files: &[
        ("/run/aquifer/regions/NAME", "what programs map"),
        ("/run/aquifer/regions/.NAME/log", "what its engines had to say"),
    ],
    see_also: &["aquifer-export(1)", "aquifer-attach(1)", "userfaultfd(2)"],
    ..Manual::NONE
};

/// The region that was made.
#[derive(Debug, Serialize)]
struct Created {
    /// What to map.
    file: PathBuf,
    #[serde(flatten)]
    status: Status,
}

/// What was done to which region.
#[derive(Debug, Serialize)]
struct Done {
    region: String,
    done: &'static str,
}

/// Where regions are.
pub(crate) fn directory(common: &Common) -> Result<PathBuf> {
    Ok(std::path::absolute(&common.run_dir).or_fail(|| "finding the regions")?.join("regions"))
}

impl Region {
    /// Runs it.
    ///
    /// # Errors
    /// Where there is no such region, its engine does not answer, or says why not.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        match self.what {
            What::Create(create) => create.run(common)?,
            What::List(_) => {
                let all = client::list(&directory(common)?).or_fail(|| "listing regions")?;
                let all: Vec<_> = all.iter().map(Listed::of).collect();
                output::answer(common.json, &all, |all| listed(all))?;
            }
            What::Show(which) => {
                let files = which.files(common)?;
                let status =
                    client::status(&files).or_fail(|| format!("asking for region '{}'", which.name))?;
                output::answer(common.json, &status, |status| show::text(&files, status))?;
            }
            What::ResizeCache(ResizeCache { name, cache }) => {
                let files = Which { name: name.clone() }.files(common)?;
                let _progress = Progress::spinner(format!("resizing the cache of '{name}'"));
                client::resize_cache(&files, cache).or_fail(|| format!("resizing the cache of '{name}'"))?;
                done(common, name, "resized")?;
            }
            What::Drop(which) => {
                client::drop_pages(&which.files(common)?).or_fail(|| format!("dropping '{}'", which.name))?;
                done(common, which.name, "dropped")?;
            }
            What::Rm(which) => {
                client::remove(&which.files(common)?).or_fail(|| format!("removing '{}'", which.name))?;
                done(common, which.name, "removed")?;
            }
            What::Exec(exec) => return exec.run(),
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn done(common: &Common, region: String, done: &'static str) -> Result<()> {
    output::answer(common.json, &Done { region, done }, |is| format!("{} {}", is.region, is.done))
}

impl Which {
    fn files(&self, common: &Common) -> Result<Files> {
        Files::new(&directory(common)?, &self.name).or_fail(|| format!("finding region '{}'", self.name))
    }
}

impl Create {
    fn run(self, common: &Common) -> Result<()> {
        let what = || format!("making region '{}'", self.name);
        let _progress = Progress::spinner(what());
        let mut lenders = Vec::new();
        let mut missing = self.size.0.next_multiple_of(EXTENT_SIZE);
        for uri in &self.lenders {
            let lender = Lender::find(uri, &self.trust, None)?;
            missing = missing.saturating_sub(lender.lease.capacity.0);
            lenders.push(lender);
        }
        if missing > 0 {
            let why = format!("its lenders have {} less than it could need", Bytes(missing));
            return Err(Failure::new(what(), why).help("name another --lender, or a smaller --size"));
        }
        let spec = RegionSpec {
            name: self.name.clone(),
            size: self.size,
            cache: self.cache,
            policy: self.policy,
            scheme: match self.scheme {
                SchemeName::OnDemand => Scheme::OnDemand,
                SchemeName::PreEvict => Scheme::PreEvict,
            },
            workers: self.workers.max(1),
            volume: VolumeId::random(),
            identity: lenders.iter().find_map(|lender| lender.identity.clone()),
            leases: lenders.into_iter().map(|lender| lender.lease).collect(),
            patience: VolumeConfig::DEFAULT_PATIENCE,
        };
        let directory = directory(common)?;
        let exe = std::env::current_exe().or_fail(what)?;
        let status = client::create(&exe, &directory, &spec).or_fail(what)?;
        let file = Files::new(&directory, &self.name).or_fail(what)?.region();
        output::answer(common.json, &Created { file, status }, |created| created.file.display().to_string())
    }
}
