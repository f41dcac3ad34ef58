//! Two hosts on this machine, each with an agent and a network of its own.

use std::fs;
use std::path::PathBuf;
use std::process::Output;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result, ensure};
use aquifer_hosts::{Export, Host, Network};
use aquifer_page::Bytes;
use aquifer_testbed::Parts;
use serde_json::Value;

use crate::support::{Sizes, VmHost as _, binary, busy_guest, busy_vm, lend, pages_of, step};

pub const VM_MEMORY: Bytes = Bytes::mib(384);
const VM_CACHE: Bytes = Bytes::mib(128);

/// Arguments of `churn`: MiB that the guest checks and rewrites, the percentage of it that the
/// guest mostly rewrites, and MiB a second.
const CHURN_ARGUMENTS: &str = "200 20 20";

/// Two hosts with agents, and a lender for both; dropping it ends them.
pub struct Hosts {
    // Dropped in this order: the agents first.
    hosts: Vec<Host>,
    network: Network,
    lender: Export,
    _dir: tempfile::TempDir,
    pages: PathBuf,
    parts: Parts,
}

impl Hosts {
    pub fn new() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let parts = busy_guest(dir.path())?;
        let pages = pages_of(dir.path());
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let own = NEXT.fetch_add(1, Ordering::Relaxed);
        let network = Network::create(&format!("move-{}-{own}", std::process::id()))?;
        let lender = lend(&dir.path().join("lender-run"), dir.path(), &["640M"])?;
        let hosts = Host::admit_to(&network, &binary(), dir.path(), &pages)?;
        let hosts = Self { hosts, network, lender, _dir: dir, pages, parts };
        for host in &hosts.hosts {
            host.set(&format!(
                "[vms]\naccept = true\n[groups]\nagreements = {:?}\n\
                 [borrow]\nenabled = false\n[lend]\nenabled = false",
                host.dir().join("groups")
            ))?;
            hosts.start_agent(host.name())?;
        }
        Ok(hosts)
    }

    /// Starts the agent of a host unless it runs.
    pub fn start_agent(&self, host: &str) -> Result<()> {
        self.of(host).start_agent()
    }

    /// Returns the process id of a host's agent.
    pub fn agent(&self, host: &str) -> Result<u32> {
        let pid = self.of(host).pid().context("the host has no agent")?;
        Ok(pid.as_raw_pid().cast_unsigned())
    }

    /// Returns the process id of the lender of all remote pages.
    pub fn lending(&self) -> u32 {
        self.lender.daemon.pid().as_raw_pid().cast_unsigned()
    }

    /// Returns the wire between the hosts.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Returns the directory with the files of a host's VMs.
    pub fn run_dir(&self, host: &str) -> PathBuf {
        self.of(host).state()
    }

    /// Returns a host.
    pub fn of(&self, host: &str) -> &Host {
        &self.hosts[usize::from(host != "a")]
    }

    pub fn ask(&self, host: &str, words: &[&str]) -> Result<Output> {
        self.of(host).ask(words)
    }

    pub fn done(&self, host: &str, words: &[&str]) -> Result<Value> {
        self.of(host).done(words).with_context(|| format!("on host {host}"))
    }

    /// The most by which a VM can grow.
    pub const MAX_GROWTH: Bytes = Bytes::mib(256);

    /// Resizes a VM to its boot memory plus `more`.
    pub fn resize(&self, host: &str, name: &str, more: Bytes) -> Result<()> {
        let size = (VM_MEMORY.0 + more.0).to_string();
        let resized = self.done(host, &["vm", "resize", name, "--memory", &size])?;
        ensure!(resized["reached"] == VM_MEMORY.0 + more.0, "{resized}");
        Ok(())
    }

    /// Starts a VM on host a that is busy with its memory.
    pub fn start(&self, name: &str) -> Result<()> {
        self.start_pooled(name, &[])
    }

    /// Does the same with more options.
    pub fn start_pooled(&self, name: &str, more: &[&str]) -> Result<()> {
        self.start_with(name, Some(VM_CACHE), &[&["--lender", self.lender.uri()], more].concat())
    }

    /// Starts a VM on host a with all of its memory there, and without a lender.
    pub fn start_local(&self, name: &str) -> Result<()> {
        self.start_with(name, None, &[])
    }

    fn start_with(&self, name: &str, cache: Option<Bytes>, more: &[&str]) -> Result<()> {
        let most = Bytes(VM_MEMORY.0 + Self::MAX_GROWTH.0);
        let sizes = Sizes { memory: VM_MEMORY, most, cache };
        let options = busy_vm(&self.parts, sizes, CHURN_ARGUMENTS)?;
        let mut words = [&["vm", "start", name], more].concat();
        words.extend(options.iter().map(String::as_str));
        self.done("a", &words)?;
        self.goes_on("a", name)?;
        step("the VM is busy");
        Ok(())
    }

    /// Returns the VM's latest figures: ticks, rewritten pages, wrong pages.
    pub fn ticks(&self, host: &str, name: &str) -> Result<[u64; 3]> {
        self.of(host).ticks(name)
    }

    /// Waits until the VM has ticked for two seconds more.
    pub fn goes_on(&self, host: &str, name: &str) -> Result<[u64; 3]> {
        self.of(host).goes_on(name)
    }

    /// Tells whether a host has no VM, no region, and none of their processes and mounts.
    pub fn is_empty(&self, host: &str) -> Result<bool> {
        self.of(host).is_empty()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let left = ["a", "b"].iter().any(|host| !self.is_empty(host).unwrap_or(false));
        if std::thread::panicking() || left {
            eprintln!("logs of the hosts, which are not empty:");
            self.hosts.iter().for_each(|host| eprintln!("{}", host.log_tails(20)));
        }
        for host in ["a", "b"] {
            for vm in
                self.done(host, &["vm", "list"]).ok().iter().filter_map(Value::as_array).flatten()
            {
                let name = vm["name"].as_str().unwrap_or_default();
                let _ = self.done(host, &["vm", "stop", "--force", name]);
            }
        }
        let _ = fs::remove_dir_all(&self.pages);
    }
}
