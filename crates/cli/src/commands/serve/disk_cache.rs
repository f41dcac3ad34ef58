//! `aquifer serve disk-cache`.

use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_dedup::join_cgroup;
use aquifer_disk_cache::{CacheCounts, CacheStatus, LenderStatus, Options, Service};
use aquifer_group::GroupEncryption;
use aquifer_nbd::Uri;
use aquifer_page::{Bytes, Group};
use aquifer_procfs::end_oom_exemption;
use aquifer_transport::Address;
use aquifer_vm::process::{cache_needed, client as vms};
use clap::Args;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::commands::Common;
use crate::commands::group::Groups;
use crate::commands::region::directory;
use crate::failure::{OrFail as _, Result};
use crate::lender::Certified;
use crate::listening;
use crate::output;

/// Serve and cache the disks of a group's VMs
///
/// Serves VMs on this host that start with --cached-disk. The cache uses memory that is currently
/// free. Runs until a signal ends it; its VMs wait until it runs again.
#[derive(Debug, Args)]
pub(super) struct DiskCache {
    /// Name of the group
    name: Group,
    /// Fixed size of the cache
    ///
    /// By default 'serve reprovision' sets it to the savings that no VM needs, and it is 0 until
    /// then.
    #[arg(long, value_name = "SIZE")]
    size: Option<Bytes>,
    /// Lend cache memory at unix:PATH or HOST:PORT; repeat for more
    ///
    /// Caches of the group on other hosts borrow there. TCP needs --tls unless it is loopback. When
    /// this host needs memory, it takes lent memory back first; the borrower still has the disk.
    /// Default: lend nothing.
    #[arg(long = "lend", value_name = "ADDRESS")]
    lends: Vec<Address>,
    /// Borrow from the group's cache at this URI; repeat for more
    ///
    /// The URI is nbd:// or nbds:// with an address from that cache's --lend. This cache evicts
    /// pages to it, encrypted, and reads them there instead of from the disk. The lender may fail
    /// and return at any time. Default: borrow nothing.
    #[arg(long = "lender", value_name = "URI")]
    lenders: Vec<Uri>,
    /// Maximum memory to borrow from each lender
    #[arg(long, value_name = "SIZE", default_value = "1GiB", requires = "lenders")]
    borrow: Bytes,
    #[command(flatten)]
    certified: Certified,
    /// Join this cgroup, which is charged for CPU and memory
    ///
    /// The default is the cgroup in the group's terms, or none.
    #[arg(long, value_name = "DIR")]
    cgroup: Option<PathBuf>,
    /// Print usage at this interval, with --json one object a line
    ///
    /// By default the command prints it once.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    report: Option<Duration>,
    /// End once no VM has needed the cache for this time
    ///
    /// The agent sets it for a cache that it starts. By default the cache runs until a signal.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    until_unused: Option<Duration>,
    #[command(flatten)]
    groups: Groups,
}

/// Most time between two looks for VMs.
const LONGEST_INTERVAL: Duration = Duration::from_secs(10);

/// Least time between them.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);

impl DiskCache {
    pub(super) fn run(self, common: &Common) -> Result<()> {
        let what = || format!("caching disks of group '{}'", self.name);
        let agreement = self.groups.all().get(&self.name).or_fail(what)?;
        let lenders =
            self.lenders.iter().map(|uri| self.certified.target(uri)).collect::<Result<_>>()?;
        let options = Options {
            size: self.size.unwrap_or_default(),
            fixed: self.size.is_some(),
            ends_unused: self.until_unused.is_some(),
            lends: listening::security(self.lends, self.certified.tls.as_deref())?,
            lenders,
            borrows: self.borrow,
            encrypted: agreement.encryption != GroupEncryption::Off,
        };
        if let Some(cgroup) = &self.cgroup.or(agreement.cgroup) {
            join_cgroup(cgroup).or_fail(|| format!("joining {}", cgroup.display()))?;
        }
        if self.until_unused.is_some() {
            // An agent is exempt, and its children inherit that.
            end_oom_exemption().or_fail(what)?;
        }
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).or_fail(what)?;
        let (tell, told) = mpsc::channel();
        let waiting = thread::Builder::new().name("signals".to_owned());
        waiting
            .spawn(move || {
                signals.forever().next();
                // The receiver is gone if the service failed.
                let _ = tell.send(());
            })
            .or_fail(what)?;
        let service =
            Service::start(&directory(common)?, self.name.clone(), options).or_fail(what)?;
        // The reader may be gone.
        let report = || _ = output::answer(common.json, &service.status(), text);
        // The first report tells a waiting process that the cache serves.
        report();
        let look = self
            .until_unused
            .map_or(Duration::MAX, |time| LONGEST_INTERVAL.min(time / 4).max(SHORTEST_INTERVAL));
        let every = self.report.unwrap_or(Duration::MAX).min(look);
        let (mut reported, mut used) = (Instant::now(), Instant::now());
        while told.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
            if self.report.is_some_and(|every| reported.elapsed() >= every) {
                report();
                reported = Instant::now();
            }
            let Some(most) = self.until_unused else { continue };
            if is_needed(common, &self.name, &service.status()) {
                used = Instant::now();
            } else if used.elapsed() >= most {
                break;
            }
        }
        Ok(())
    }
}

/// Returns whether a VM of this host uses a group's cache, or is about to.
fn is_needed(common: &Common, group: &Group, status: &CacheStatus) -> bool {
    if !status.disks.is_empty() {
        return true;
    }
    // VMs that cannot be listed may need it.
    let Ok(vms) = vms::list(&common.run_dir) else { return true };
    vms.iter().any(|vm| cache_needed(vm).as_ref() == Some(group))
}

/// Describes a cache's state for people.
pub(in crate::commands) fn text(status: &CacheStatus) -> String {
    let CacheStatus { size, used, counts, disks, lent, borrowers, lenders, .. } = status;
    let CacheCounts { hits, misses, .. } = counts;
    let rate = *hits as f64 * 100.0 / (hits + misses).max(1) as f64;
    let connections: u64 = disks.iter().map(|disk| disk.connections).sum();
    let mut text = format!(
        "{used} of {size} used; {rate:.0} % hits of {} reads; \
         {} disks on {connections} connections",
        hits + misses,
        disks.len()
    );
    if !borrowers.is_empty() {
        text += &format!("; {lent} lent to {}", borrowers.join(", "));
    }
    for lender in lenders {
        let LenderStatus { lender, answers, has, read_bytes, dropped_bytes, wrong_bytes, .. } =
            lender;
        let does = if *answers { "holds" } else { "does not answer, held" };
        text += &format!(
            "\n{lender} {does} {has}: {read_bytes} read, {dropped_bytes} dropped, \
             {wrong_bytes} wrong"
        );
    }
    text
}
