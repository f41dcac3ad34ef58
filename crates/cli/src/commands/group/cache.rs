//! `aquifer group cache`.

use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use aquifer_fabric::{Address, Uri};
use aquifer_group::Agreements;
use aquifer_group::Sealed;
use aquifer_group::cache::{LenderStatus, Options, Service, Status};
use aquifer_group::scan;
use aquifer_page::{Bytes, Group};
use clap::Args;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::directory;
use crate::commands::Common;
use crate::failure::{OrFail as _, Result};
use crate::lender::Certified;
use crate::listening;
use crate::output;

/// Serves disks of the group's VMs, and keeps what they read in memory that nobody needs just now
///
/// For VMs on this host that are started with --cached-disk. Runs until it is told to end; its VMs wait until it runs again.
#[derive(Debug, Args)]
pub(super) struct Cache {
    /// The group
    name: Group,
    /// How much memory it may have, always. Unless given, what 'group balance' gives it: what the group saves and no VM needs; nothing where that does not run
    #[arg(long, value_name = "SIZE")]
    size: Option<Bytes>,
    /// Where it lends of that to caches of the group on other hosts: HOST:PORT, or unix:PATH; repeat for more
    ///
    /// Without --tls, TCP only on loopback. What is lent is the first to go when this host needs it: whoever borrows has it on a disk, too.
    #[arg(long = "lend", value_name = "ADDRESS")]
    lends: Vec<Address>,
    /// A cache of the group on another host, which lends to this one (nbd:// or nbds://, at an address of its --lend); repeat for more
    ///
    /// It may be gone, and come back, at any time. What leaves the memory here goes there, sealed, and is read from there rather than from the disk.
    #[arg(long = "lender", value_name = "URI")]
    lenders: Vec<Uri>,
    /// How much it may have from each lender
    #[arg(long, value_name = "SIZE", default_value = "1GiB", requires = "lenders")]
    borrow: Bytes,
    #[command(flatten)]
    certified: Certified,
    /// Joins this cgroup, in which the tenant pays for it. Unless given, that of the group's agreement
    #[arg(long, value_name = "DIR")]
    cgroup: Option<PathBuf>,
    /// Says so often how it is; with --json a line each time
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    report: Option<Duration>,
}

impl Cache {
    pub(super) fn run(self, common: &Common, all: &Agreements) -> Result<()> {
        let what = || format!("caching disks of group '{}'", self.name);
        let agreement = all.get(&self.name).or_fail(what)?;
        let lenders =
            self.lenders.iter().map(|uri| self.certified.target(uri)).collect::<Result<_>>()?;
        let options = Options {
            size: self.size.unwrap_or_default(),
            fixed: self.size.is_some(),
            lends: listening::security(self.lends, self.certified.tls.as_deref())?,
            lenders,
            borrows: self.borrow,
            sealed: agreement.sealed != Sealed::Off,
        };
        if let Some(cgroup) = &self.cgroup.or(agreement.cgroup) {
            scan::join_cgroup(cgroup).or_fail(|| format!("joining {}", cgroup.display()))?;
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
        let every = self.report.unwrap_or(Duration::MAX);
        // The first report tells a waiting process that the cache serves.
        let report = || _ = output::answer(common.json, &service.status(), text);
        report();
        while told.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
            report();
        }
        Ok(())
    }
}

/// Describes a cache's state for people.
pub(super) fn text(status: &Status) -> String {
    let Status { size, used, hits, misses, disks, lent, borrowers, lenders, .. } = status;
    let rate = *hits as f64 * 100.0 / (hits + misses).max(1) as f64;
    let connections: u64 = disks.iter().map(|disk| disk.connections).sum();
    let mut text = format!(
        "{used} of {size} used; {rate:.0} % of {} pages were there; {} disks of {connections} connections",
        hits + misses,
        disks.len()
    );
    if !borrowers.is_empty() {
        text += &format!("; {lent} lent to {}", borrowers.join(", "));
    }
    for lender in lenders {
        let LenderStatus { lender, answers, has, read_bytes, dropped_bytes, wrong_bytes, .. } =
            lender;
        let does = if *answers { "keeps" } else { "does not answer, kept" };
        text += &format!(
            "\n{lender} {does} {has}: {read_bytes} read from there, {dropped_bytes} dropped, {wrong_bytes} wrong"
        );
    }
    text
}
