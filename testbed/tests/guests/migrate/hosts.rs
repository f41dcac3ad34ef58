//! Two hosts on this machine, each with an agent and a network of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use aquifer_hosts::daemon::answer;
use aquifer_hosts::{Export, Host, Network};
use aquifer_page::Bytes;
use aquifer_testbed::{Parts, Spec, wait_until};
use serde_json::Value;

use crate::support::{TIMEOUT, binary, example, lend, pages_of, step};

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
        let first = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guests/churn.sh");
        let spec = Spec::new("guest")
            .file(example("demo", "churn"), "/bin/churn")
            .modules(["virtio_mem", "virtio_balloon"]);
        let parts = spec.file(first, "/bin/churn.sh").parts(dir.path())?;
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
        let host = self.of(host);
        if host.pid().is_some() && host.ended().is_none() {
            return Ok(());
        }
        host.start(|_| ())?;
        wait_until("the agent answers", TIMEOUT, || Ok(host.is_ready()?))
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

    fn of(&self, host: &str) -> &Host {
        &self.hosts[usize::from(host != "a")]
    }

    fn command(&self, host: &str, words: &[&str]) -> Result<Command> {
        let host = self.of(host);
        let mut command = host.command()?;
        command.arg("--json").args(words).env("AQUIFER_GROUPS", host.dir().join("groups"));
        Ok(command)
    }

    pub fn ask(&self, host: &str, words: &[&str]) -> Result<Output> {
        Ok(self.command(host, words)?.output()?)
    }

    pub fn done(&self, host: &str, words: &[&str]) -> Result<Value> {
        answer(&mut self.command(host, words)?).with_context(|| format!("on host {host}"))
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
        let uri = self.lender.uri();
        let (memory, cache) = (VM_MEMORY.0.to_string(), VM_CACHE.0.to_string());
        let text = |path: &Path| path.to_str().context("the path is not UTF-8").map(str::to_owned);
        let (kernel, initrd) = (text(&self.parts.kernel)?, text(&self.parts.initrd)?);
        let most = (VM_MEMORY.0 + Self::MAX_GROWTH.0).to_string();
        let mut words =
            vec!["vm", "start", name, "--memory", &memory, "--cache", &cache, "--lender", uri];
        words.extend(["--max-memory", &most]);
        words.extend(["--accel", "tcg", "--kernel", &kernel, "--initrd", &initrd]);
        let append = format!(
            "{} memhp_default_state=online_movable init_on_alloc=0 rdinit=/bin/churn.sh \
             -- {CHURN_ARGUMENTS}",
            self.parts.append
        );
        words.extend(["--append", &append]);
        self.done("a", &words)?;
        self.goes_on("a", name)?;
        step("the VM is busy");
        Ok(())
    }

    /// Returns the VM's latest figures: ticks, rewritten pages, wrong pages.
    pub fn ticks(&self, host: &str, name: &str) -> Result<[u64; 3]> {
        let console = self.run_dir(host).join("vms").join(name).join("console.log");
        let console = fs::read(&console).context("cannot read the VM's console log")?;
        let console = String::from_utf8_lossy(&console).into_owned();
        let said = console.lines().rev().skip(1).find_map(|line| {
            let numbers: Vec<_> =
                line.trim().strip_prefix("churn ")?.split(' ').map(str::parse).collect();
            <[_; 3]>::try_from(numbers)
                .ok()
                .map(|numbers| numbers.map(|number| number.unwrap_or(u64::MAX)))
        });
        Ok(said.unwrap_or_default())
    }

    /// Waits until the VM has ticked for two seconds more.
    pub fn goes_on(&self, host: &str, name: &str) -> Result<[u64; 3]> {
        let mut first = 0;
        wait_until("the guest ticks for two seconds", Duration::from_secs(120), || {
            let [tick, ..] = self.ticks(host, name)?;
            first = if first == 0 { tick } else { first };
            Ok(first > 0 && tick >= first + 20)
        })?;
        self.ticks(host, name)
    }

    /// Tells whether a host has no VM, no region, and none of their processes and mounts.
    pub fn is_empty(&self, host: &str) -> Result<bool> {
        let vms = self.done(host, &["vm", "list"])?;
        let regions = self.done(host, &["region", "list"])?;
        let run = self.run_dir(host);
        let run = run.to_str().context("the path is not UTF-8")?;
        let processes = Command::new("pgrep")
            .args(["-f", &format!("serve (vm|region).*{run}|qemu.*{run}/")])
            .output()?;
        Ok(vms.as_array().is_some_and(Vec::is_empty)
            && regions.as_array().is_some_and(Vec::is_empty)
            && processes.stdout.is_empty()
            && !fs::read_to_string("/proc/self/mounts")?.contains(run))
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
