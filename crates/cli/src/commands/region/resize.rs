//! `aquifer region resize`.

use std::thread;
use std::time::{Duration, Instant};

use aquifer_api::order::{Claim, ClaimPurpose};
use aquifer_page::RegionName;
use aquifer_region::process::client::By;
use aquifer_region::process::{Files, client};
use aquifer_vm::process::client as vms;
use clap::Args;

use super::cached::CacheSize;
use super::{Which, done, plan};
use crate::agent_call::Socket;
use crate::claim::Overcommit;
use crate::commands::Common;
use crate::failure::{Failure, OrFail as _, Result};
use crate::progress::Progress;

/// How long the agent may take to add leases to a region that runs.
const ADDING: Duration = Duration::from_secs(30);

/// Resize a region's cache in local RAM while it is in use
///
/// The region keeps its size. Returns when the cache is within the new limit. To shrink it, the
/// engine evicts pages. The region of a VM has the VM's name.
///
/// With 'auto' this host's agent chooses the limit from now on. With a size it no longer does. If
/// the cache shrinks, and the region has less memory of other hosts than its size, the agent
/// borrows the rest first.
#[derive(Debug, Args)]
pub struct Resize {
    /// Name of the region
    name: RegionName,
    /// Maximum local RAM for the region, or 'auto'
    #[arg(long, value_name = "SIZE")]
    cache: CacheSize,
    #[command(flatten)]
    overcommit: Overcommit,
    #[command(flatten)]
    socket: Socket,
}

impl Resize {
    pub(super) fn run(self, common: &Common) -> Result<()> {
        let Self { name, cache, overcommit, socket } = self;
        let what = || format!("resizing the cache of region '{name}'");
        let files = Which { name: name.clone() }.files(common)?;
        let _progress = Progress::spinner(what());
        set_cache(common, &socket, &files, cache, overcommit)?;
        done(common, name, "resized")
    }
}

/// Sets the limit of a region's cache. First asks this host's agent for the RAM, and borrows for a
/// region that has less at lenders than its size, if pages must leave.
///
/// # Errors
/// If the agent or the engine refuses.
pub(crate) fn set_cache(
    common: &Common,
    socket: &Socket,
    files: &Files,
    cache: CacheSize,
    overcommit: Overcommit,
) -> Result<()> {
    let name = files.name();
    let what = || format!("resizing the cache of region '{name}'");
    // A VM's cache counts in this host's memory budget.
    let vm = vms::of_region(&common.run_dir, name);
    let CacheSize::Bytes(cache) = cache else {
        return match vm {
            Some(vm) => vms::adapt_cache(&vm).or_fail(what),
            None => client::adapt_cache(files).or_fail(what),
        };
    };
    let spec = client::record(files).or_fail(what)?;
    let ask = || {
        let group = spec.group.clone();
        let claim = Claim::new(name.clone(), ClaimPurpose::Cache, cache.min(spec.size));
        overcommit.claim(common, socket, &what(), Claim { group, ..claim })
    };
    let mut claimed = ask()?;
    if spec.began_local && cache < spec.cache.min(spec.size) && spec.leased() < spec.size {
        let lacks = spec.size.saturating_sub(spec.leased());
        plan::borrow(common, socket.clone(), &spec, lacks)?;
        await_leases(files)?;
        // The loan may have taken longer than a claim counts.
        claimed.keep();
        claimed = ask()?;
    }
    match vm {
        Some(vm) => vms::resize_cache(&vm, cache, By::Operator).or_fail(what),
        None => client::resize_cache(files, cache, By::Operator).or_fail(what),
    }?;
    claimed.keep();
    Ok(())
}

/// Waits until the agent has added leases that suffice to the region.
fn await_leases(files: &Files) -> Result<()> {
    let what = || format!("adding memory of other hosts to region '{}'", files.name());
    let deadline = Instant::now() + ADDING;
    loop {
        let spec = client::record(files).or_fail(what)?;
        if spec.leased() >= spec.size {
            return Ok(());
        }
        if Instant::now() > deadline {
            let why = format!("the agent has not done so within {ADDING:?}");
            let help = format!("see 'aquifer why {}', then try again", files.name());
            return Err(Failure::new(what(), why).help(help));
        }
        thread::sleep(Duration::from_millis(20));
    }
}
