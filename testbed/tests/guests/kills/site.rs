//! A cluster on this machine: a signer, two hosts with VMs, and two lenders.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use aquifer_api::status::{LoanState, Standing, Status};
use aquifer_hosts::{Host, Place, Switched};
use aquifer_page::{Bytes, LeaseId};
use aquifer_testbed::{Parts, wait_until};
use rustix::process::Signal;

use crate::support::{Sizes, TIMEOUT, VmHost as _, binary, busy_guest, busy_vm, pages_of};
use crate::support::{kill, process_like};

/// The VM.
pub const VM: &str = "one";
pub const SIGNER: &str = "s";
pub const VM_HOSTS: [&str; 2] = ["a", "b"];
pub const LENDERS: [&str; 2] = ["c", "d"];
const NAMES: [&str; 5] = [SIGNER, VM_HOSTS[0], VM_HOSTS[1], LENDERS[0], LENDERS[1]];

const SIZES: Sizes =
    Sizes { memory: Bytes::mib(320), most: Bytes::mib(576), cache: Some(Bytes::mib(64)) };

/// MiB that the guest checks and rewrites, the percentage of it that it mostly rewrites, and MiB a
/// second.
const CHURN: &str = "120 20 20";

/// The cluster; its drop ends it.
pub struct Site {
    // Dropped in this order: the agents first.
    hosts: Vec<Host>,
    _network: Switched,
    pages: PathBuf,
    dir: tempfile::TempDir,
    parts: Parts,
}

impl Site {
    pub fn new() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let own = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = tempfile::tempdir()?;
        let parts = busy_guest(dir.path())?;
        let pages = pages_of(dir.path());
        let network = Switched::create(&format!("kills-{}-{own}", std::process::id()), &NAMES)?;
        let mut places =
            NAMES.iter().zip(network.hosts()).map(|(name, network)| Place::within(name, network));
        let first = places.next().context("the network has no host")?;
        let (signer, token) = Host::create(&binary(), dir.path(), &pages, first)?;
        let places: Vec<_> = places.collect();
        let mut site = Self { hosts: vec![signer], _network: network, pages, dir, parts };
        site.configure(SIGNER)?;
        for place in places {
            let signer = (&site.hosts[0], token.as_str());
            let host = Host::join(&binary(), site.dir.path(), &site.pages, place, signer)?;
            let name = host.name();
            site.hosts.push(host);
            site.configure(name)?;
        }
        wait_until("all hosts know all others", TIMEOUT, || {
            Ok(site.hosts.iter().all(|host| {
                let peers = host.try_status().map(|status| status.peers).unwrap_or_default();
                let is_up = |peer: &&aquifer_api::status::Peer| peer.standing == Standing::Up;
                peers.iter().filter(is_up).count() == NAMES.len() - 1
            }))
        })?;
        Ok(site)
    }

    fn configure(&self, name: &str) -> Result<()> {
        let host = self.of(name);
        // After a quarter of the grace, a lender asks a host that lost its leases unnoticed.
        host.set(&format!(
            "[memory]\nperiod = \"200ms\"\n[vms]\naccept = {}\n[lend]\nenabled = {}\n\
             grace = \"60s\"\n\
             [borrow]\nenabled = false\nprotection = \"none\"\n\
             [groups]\nagreements = {:?}",
            VM_HOSTS.contains(&name),
            LENDERS.contains(&name),
            host.dir().join("groups")
        ))?;
        host.start_agent()
    }

    pub fn of(&self, name: &str) -> &Host {
        let found = self.hosts.iter().find(|host| host.name() == name);
        found.unwrap_or_else(|| panic!("there is no host {name}"))
    }

    /// Starts the agents that have died.
    pub fn start_agents(&self) -> Result<()> {
        self.hosts.iter().try_for_each(Host::start_agent)
    }

    pub fn agent(&self, name: &str) -> Result<u32> {
        let pid = self.of(name).pid().context("the host has no agent")?;
        Ok(pid.as_raw_pid().cast_unsigned())
    }

    /// Returns the status of a host; an error if its agent does not answer.
    pub fn status(&self, name: &str) -> Result<Status> {
        self.of(name).try_status().with_context(|| format!("the agent of {name} does not answer"))
    }

    /// Returns the words that create the VM.
    pub fn creation(&self) -> Result<Vec<String>> {
        let words = ["vm", "create", VM].map(str::to_owned).into_iter();
        Ok(words.chain(busy_vm(&self.parts, SIZES, CHURN)?).collect())
    }

    /// Returns the lender that lends to the VM, if there is one.
    pub fn lender(&self) -> Option<&'static str> {
        let lends =
            |name: &&str| self.status(name).is_ok_and(|status| !status.loans.lent.is_empty());
        LENDERS.into_iter().find(lends)
    }

    /// Returns whether a lender recalls a lease.
    pub fn recalls(&self, lender: &str) -> bool {
        self.status(lender).is_ok_and(|status| {
            status.loans.lent.iter().any(|lent| lent.state == LoanState::Recalled)
        })
    }

    /// Checks that host and lenders agree about all leases, that nothing is left of the VM on the
    /// other host, and that all ledgers are right. Without a host there must be no lease at all.
    pub fn check(&self, here: Option<&str>) -> Result<()> {
        let mut lent: Vec<(LeaseId, String, String)> = Vec::new();
        for name in LENDERS {
            let leases = self.status(name)?.loans.lent;
            let files = fs::read_dir(self.of(name).store())?.flatten();
            let files = files.filter(|file| file.path().extension().is_some_and(|e| e == "pages"));
            let (files, known) = (files.count(), leases.len());
            ensure!(files == known, "{name} has {files} files of pages for {known} leases");
            lent.extend(
                leases.iter().map(|it| (it.lease, name.to_owned(), it.borrower.to_string())),
            );
        }
        let mut held = Vec::new();
        for name in VM_HOSTS {
            let regions = self.status(name)?.loans.regions;
            let leases = regions.iter().flat_map(|region| &region.leases);
            held.extend(leases.map(|it| (it.lease, it.lender.to_string(), name.to_owned())));
            if here != Some(name) {
                ensure!(self.of(name).is_empty()?, "something is left on {name}");
            }
        }
        lent.sort();
        held.sort();
        ensure!(lent == held, "lent {lent:?}, held {held:?}");
        ensure!(held.is_empty() == here.is_none(), "held {held:?}, with the VM on {here:?}");
        for name in NAMES {
            let status = self.status(name)?;
            let promised: u64 = status.loans.lent.iter().map(|lent| lent.capacity.0).sum();
            let ledger = status.ledger;
            ensure!(ledger.adds_up() && ledger.overcommitted.0 == 0, "{name}: {ledger:?}");
            ensure!(ledger.lent.0 == promised, "{name} lends {promised}: {ledger:?}");
            let cache = if here == Some(name) { SIZES.cache.map_or(0, |cache| cache.0) } else { 0 };
            let is_counted = (ledger.cache_floor.0 > 0) == (cache > 0);
            ensure!(is_counted && ledger.cache_floor.0 >= cache, "{name}: {ledger:?}");
        }
        Ok(())
    }

    /// Kills all processes of a host, and removes all that a boot removes.
    pub fn boot(&self, name: &str) -> Result<()> {
        let (host, run) = (self.of(name), self.of(name).state());
        host.signal(Signal::KILL)?;
        let mut killed = BTreeSet::new();
        wait_until("all processes are dead", Duration::from_secs(30), || {
            let mut one = None;
            // The directory, or a file in it; a VM's supervisor has the VM's name after it.
            while let Ok(process) = process_like(&format!("{}(/| |$)", run.display())) {
                if one == Some(process) {
                    return Ok(false);
                }
                one = Some(process);
                killed.insert(process);
                // It may end meanwhile.
                let _ = kill(process, Signal::KILL);
            }
            let is_dead = killed.iter().all(|process| has_ended(*process));
            Ok(is_dead && (host.ended().is_some() || host.pid().is_none()))
        })?;
        unmount(&run)?;
        fs::remove_dir_all(&run).with_context(|| {
            let left = Command::new("find").arg(&run).output().map(|found| found.stdout);
            format!("left: {}", String::from_utf8_lossy(&left.unwrap_or_default()))
        })?;
        host.start_agent()
    }
}

/// Returns whether all threads of a process have ended. One that is killed has no command line any
/// more, while the last call of its threads may still make a file.
fn has_ended(process: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    threads.into_iter().all(|thread| {
        // proc_pid_stat(5): the state follows the name, which is in parentheses.
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
    })
}

fn unmount(run: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let mounts = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    for mount in mounts.filter(|mount| Path::new(mount).starts_with(run)) {
        let ended = Command::new("umount").args(["-l", mount]).status()?;
        ensure!(ended.success(), "{mount} cannot be unmounted");
    }
    Ok(())
}

impl Drop for Site {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.hosts.iter().for_each(|host| eprintln!("{}", host.log_tails(20)));
        }
        for host in VM_HOSTS.map(|name| self.of(name)) {
            let _ = host.ask(&["vm", "stop", "--force", VM]);
            let _ = host.ask(&["vm", "rm", VM]);
        }
        self.hosts.clear();
        let _ = fs::remove_dir_all(&self.pages);
    }
}
