//! `aquifer region`.

mod cached;
mod exec;
mod limit;
mod manuals;
mod pages;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer_vm::process::client as vms;
use aquifer_page::{Bytes, RegionName};
use aquifer_region::process::{Files, Status, client};
use clap::{Args, Subcommand};
use serde::Serialize;

use super::Common;
use crate::failure::{OrFail, Result};
use crate::manual::Manual;
use crate::output;
use crate::progress::Progress;
pub(crate) use cached::{Cached, MaybeCached};
use exec::Exec;
pub(crate) use exec::{preload_library, with_preload};
use limit::Limit;
pub(super) use manuals::MANUALS;
use pages::{Drop, Pages};
pub(crate) use show::{Listed, cells, listed, text};

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
    Create(Box<Create>),
    List(List),
    /// What is where in a region, who maps it, and how long faults took
    Show(Which),
    ResizeCache(ResizeCache),
    Limit(Limit),
    /// Has lenders have all that is in the cache of a region: what a program writes meanwhile, or not
    Persist(Which),
    Drop(Drop),
    Pages(Pages),
    /// Serves a region again whose processes were killed, engine and keeper; programs that have it mapped go on
    Start(Which),
    /// Takes a region away that nobody maps, with all that is in it
    Rm(Which),
    Exec(Exec),
}

/// Makes a region and starts its engine; prints the file to map
#[derive(Debug, Args)]
pub struct Create {
    /// The region's name, and that of its file
    name: RegionName,
    /// Its size
    #[arg(long, value_name = "SIZE")]
    size: Bytes,
    #[command(flatten)]
    cached: Cached,
}

/// The regions of this host
#[derive(Debug, Args)]
pub struct List {}

// The help is that of the command that takes this struct.
#[derive(Debug, Args)]
#[expect(missing_docs, reason = "a text here would take the place of the commands' own")]
pub struct Which {
    /// The region
    name: RegionName,
}

/// Changes how much of a region may be in local RAM, while it is in use
///
/// Returns when the cache is within the new limit.
#[derive(Debug, Args)]
pub struct ResizeCache {
    /// The region
    name: RegionName,
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
        (
            "aquifer region exec --heap items -- redis-server --save ''",
            "A program that knows nothing of files to map, with all that it allocates there",
        ),
        ("aquifer region show items", "What is where, and how long faults take"),
        ("aquifer region resize-cache items 512M", "Gives half of the RAM back, now"),
        (
            "aquifer region limit 8G",
            "Has the caches of all regions of this host be 8 GiB together, wherever they are needed",
        ),
        ("aquifer region rm items", "Takes it away, with what was in it"),
    ],
    notes: &[
        (
            "What is kept",
            "A region and what is in it outlive the programs that map it, until 'rm' or a reboot. An engine that dies is followed by \
             another, which goes on where it was; programs wait meanwhile. A lender that cannot be reached has the programs \
             wait that touch its pages, for ever or as long as --give-up says.",
        ),
        (
            "Needs",
            "Root, and Linux 6.7 or later (userfaultfd with asynchronous write-protection, PAGEMAP_SCAN). Programs must map the \
             region shared. Their children do not see it. What they open for direct I/O (O_DIRECT) goes through the page cache, as a \
             device must not write to a page that may leave.",
        ),
    ],
    files: &[
        ("/run/aquifer/regions/NAME", "what programs map"),
        ("/run/aquifer/regions/.NAME/log", "what its engines had to say"),
    ],
    see_also: &["aquifer-export(1)", "aquifer-attach(1)", "userfaultfd(2)"],
    ..Manual::NONE
};

/// The answer of `aquifer region create`.
#[derive(Debug, Serialize)]
struct Created {
    /// The file that programs map.
    file: PathBuf,
    #[serde(flatten)]
    status: Status,
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
                    .or_fail(|| format!("asking for region '{}'", which.name))?;
                output::answer(common.json, &status, |status| text(&files, status))?;
            }
            What::ResizeCache(ResizeCache { name, cache }) => {
                let files = Which { name: name.clone() }.files(common)?;
                let _progress = Progress::spinner(format!("resizing the cache of '{name}'"));
                let what = || format!("resizing the cache of '{name}'");
                // A VM's cache counts in this host's memory budget, so its supervisor resizes it.
                match vms::of_region(&common.run_dir, &name) {
                    Some(vm) => vms::resize_cache(&vm, cache).or_fail(what)?,
                    None => client::resize_cache(&files, cache).or_fail(what)?,
                }
                done(common, name, "resized")?;
            }
            What::Limit(limit) => limit.run(common)?,
            What::Persist(which) => {
                let _progress =
                    Progress::spinner(format!("writing '{}' to its lenders", which.name));
                client::persist(&which.files(common)?)
                    .or_fail(|| format!("persisting '{}'", which.name))?;
                done(common, which.name, "persisted")?;
            }
            What::Drop(drop) => drop.run(common)?,
            What::Pages(pages) => pages.run(common)?,
            What::Start(which) => {
                let what = || format!("serving region '{}' again", which.name);
                let exe = std::env::current_exe().or_fail(what)?;
                let status = client::start(&exe, &which.files(common)?).or_fail(what)?;
                output::answer(common.json, &status, |status| {
                    format!("{} is served", status.spec.name)
                })?;
            }
            What::Rm(which) => {
                client::remove(&which.files(common)?)
                    .or_fail(|| format!("removing '{}'", which.name))?;
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
        let Self { name, size, cached } = self;
        let what = || format!("making region '{name}'");
        let _progress = Progress::spinner(what());
        let spec = cached.spec(common, name.clone(), size)?;
        let directory = directory(common)?;
        let exe = std::env::current_exe().or_fail(what)?;
        let status = client::create(&exe, &directory, &spec).or_fail(what)?;
        let file = Files::new(&directory, &name).region();
        output::answer(common.json, &Created { file, status }, |created| {
            created.file.display().to_string()
        })
    }
}
