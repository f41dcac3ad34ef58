//! `aquifer region`.

mod cached;
mod exec;
mod limit;
mod manuals;
mod pages;
mod plan;
mod resize;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_page::{Bytes, RegionName};
use aquifer_region::process::{Files, RegionSpec, RegionStatus, client};
use clap::{Args, Subcommand};
use serde::Serialize;

use super::Common;
use crate::claim::Overcommit;
use crate::failure::{OrFail, Result};
use crate::manual::Manual;
use crate::output;
use crate::progress::Progress;
pub(crate) use cached::{CacheSize, Cached, MaybeCached, has_cache};
use exec::Exec;
pub use exec::{preload_library, with_preload};
use limit::{SetLimit, ShowLimits};
pub(super) use manuals::MANUALS;
use pages::Part;
pub use resize::Resize;
pub(crate) use resize::set_cache;
pub(crate) use show::{Listed, cells, copied, listed, text};

/// Manage memory regions that are kept in the pool
///
/// A region is a file in RUN_DIR/regions that a program maps: QEMU with
/// 'memory-backend-file,share=on', memcached with '-e'. Local RAM is a cache of the region. A page
/// that the program touches is fetched from its lender, and pages that do not fit are evicted to
/// lenders.
///
/// Run the program with 'aquifer region exec'; the program needs no change.
#[derive(Debug, Args)]
pub struct Region {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Create(Box<Create>),
    List(List),
    /// Show a region's usage, programs and fault times
    Show(Which),
    /// Show where each page and extent of a region is
    ///
    /// A page is 'zero' (stored nowhere), 'remote' (only at a lender or in the spill file),
    /// 'resident' (in local RAM and at a lender), 'dirty' (newer in local RAM) or 'shared'. A
    /// shared page is kept once for several regions of the group ('aquifer serve dedup'). A write
    /// to a resident page shows as dirty only when the engine scans or evicts that page. Extents
    /// are 64 MiB.
    ShowPages(Part),
    Resize(Resize),
    ShowLimits(ShowLimits),
    SetLimit(SetLimit),
    /// Write a region's dirty pages to its lenders
    ///
    /// Pages that programs write meanwhile may be missing. The pages stay in the cache, so this
    /// costs no later faults.
    Persist(Which),
    /// Zero pages of a region and free the memory they take
    ///
    /// Frees memory of this host and of lenders.
    Drop(Part),
    /// Serve a region again after its processes were killed
    ///
    /// Starts a supervisor and an engine. Programs that map the region then continue.
    Recover(Which),
    /// Remove an unmapped region and its content
    Rm(Which),
    Exec(Exec),
}

/// Create a region and start its engine
///
/// Prints the file to map.
#[derive(Debug, Args)]
pub struct Create {
    /// Name of the region and of its file
    name: RegionName,
    /// Size of the region
    #[arg(long, value_name = "SIZE")]
    size: Bytes,
    #[command(flatten)]
    cached: Cached,
    #[command(flatten)]
    overcommit: Overcommit,
}

/// List the regions of this host
#[derive(Debug, Args)]
pub struct List {}

// The help is that of the command that takes this struct.
#[derive(Debug, Args)]
#[expect(missing_docs, reason = "a text here would take the place of the commands' own")]
pub struct Which {
    /// Name of the region
    name: RegionName,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        (
            "aquifer region create items --size 4G --cache 1G",
            "Create 4 GiB that this host's agent borrows, with at most 1 GiB of local RAM",
        ),
        (
            "aquifer region create items --size 4G --cache 1G \
             --lender nbds://b/ --tls /etc/aquifer/tls",
            "Create the same, with its lender named",
        ),
        (
            "aquifer region exec -- memcached -u root -m 4096 -e /run/aquifer/regions/items",
            "Run memcached with its items in the region",
        ),
        (
            "aquifer region exec --heap items -- redis-server --save ''",
            "Run unmodified Redis with its heap in the region",
        ),
        ("aquifer region show items", "Show where its pages are and how long faults take"),
        ("aquifer region resize items --cache 512M", "Free half of its local RAM now"),
        (
            "aquifer region set-limit --cache 8G",
            "Limit the caches of all regions together to 8 GiB",
        ),
        ("aquifer region rm items", "Remove the region and its content"),
    ],
    notes: &[
        (
            "Lifetime",
            "A region and its content outlive the programs that map it, until 'rm' or a reboot. If \
             the engine dies, another one takes over; programs wait meanwhile. If a lender is \
             unreachable, programs that touch its pages wait, indefinitely or for \
             --fault-timeout.",
        ),
        (
            "Requirements",
            "Root, and Linux 6.7 or later (userfaultfd with asynchronous write protection, \
             PAGEMAP_SCAN). Programs must map the region shared. Their child processes do not see \
             it. Direct I/O (O_DIRECT) of these programs goes through the page cache, as a device \
             must not write to a page that can be evicted.",
        ),
    ],
    files: &[
        ("/run/aquifer/regions/NAME", "the file that programs map"),
        ("/run/aquifer/regions/.NAME/log", "the log of its engines"),
    ],
    see_also: &["aquifer-serve-export(1)", "aquifer-volume-attach(1)", "userfaultfd(2)"],
    ..Manual::NONE
};

/// The answer of `aquifer region create`.
#[derive(Debug, Serialize)]
struct Created {
    /// The file that programs map.
    file: PathBuf,
    #[serde(flatten)]
    status: RegionStatus,
}

/// The answer of a command that changes a region.
#[derive(Debug, Serialize)]
struct Done {
    region: RegionName,
    done: &'static str,
}

/// Returns the directory of this host's regions.
pub(crate) fn directory(common: &Common) -> Result<PathBuf> {
    Ok(std::path::absolute(&common.run_dir).or_fail(|| "finding the regions")?.join("regions"))
}

impl Region {
    /// Runs the subcommand.
    ///
    /// # Errors
    /// If there is no such region, or if its engine does not answer or refuses.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        match self.what {
            What::Create(create) => create.run(common)?,
            What::List(_) => {
                output::answer(common.json, &Listed::all(common)?, |all| listed(all))?;
            }
            What::Show(which) => {
                let files = which.files(common)?;
                let status = client::status(&files)
                    .or_fail(|| format!("querying region '{}'", which.name))?;
                output::answer(common.json, &status, |status| text(&files, status))?;
            }
            What::Resize(resize) => resize.run(common)?,
            What::ShowPages(part) => part.show(common)?,
            What::ShowLimits(show) => show.run(common)?,
            What::SetLimit(set) => set.run(common)?,
            What::Persist(which) => {
                let _progress =
                    Progress::spinner(format!("writing region '{}' to its lenders", which.name));
                client::persist(&which.files(common)?)
                    .or_fail(|| format!("persisting region '{}'", which.name))?;
                done(common, which.name, "persisted")?;
            }
            What::Drop(part) => part.drop(common)?,
            What::Recover(which) => {
                let what = || format!("recovering region '{}'", which.name);
                let exe = std::env::current_exe().or_fail(what)?;
                let status = client::start(&exe, &which.files(common)?).or_fail(what)?;
                output::answer(common.json, &status, |status| {
                    format!("{} is served", status.spec.name)
                })?;
            }
            What::Rm(which) => {
                client::remove(&which.files(common)?)
                    .or_fail(|| format!("removing region '{}'", which.name))?;
                done(common, which.name, "removed")?;
            }
            What::Exec(exec) => return exec.run(common),
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn done(common: &Common, region: RegionName, done: &'static str) -> Result<()> {
    output::answer(common.json, &Done { region, done }, |is| format!("{} {}", is.region, is.done))
}

impl Which {
    fn files(&self, common: &Common) -> Result<Files> {
        Ok(Files::new(&directory(common)?, &self.name))
    }
}

impl Create {
    fn run(self, common: &Common) -> Result<()> {
        let Self { name, size, cached, overcommit } = self;
        let what = || format!("creating region '{name}'");
        let _progress = Progress::spinner(what());
        let directory = directory(common)?;
        let exe = std::env::current_exe().or_fail(what)?;
        let (claim, socket) = (cached.claim(&name, size, size), cached.socket().clone());
        let plan = cached.plan(common, (name.clone(), None), size)?;
        // After the plan, as lenders may take longer to answer than a claim counts.
        let claimed = overcommit.claim(common, &socket, &what(), claim)?;
        let files = Files::new(&directory, &name);
        let create = |spec: &RegionSpec| client::create(&exe, &directory, spec).or_fail(what);
        let status = plan.make(create, || _ = client::remove(&files))?;
        claimed.keep();
        let file = files.region();
        output::answer(common.json, &Created { file, status }, |created| {
            created.file.display().to_string()
        })
    }
}
