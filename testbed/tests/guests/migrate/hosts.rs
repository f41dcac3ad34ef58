//! Two hosts on this machine, each with an agent and a network of its own.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use aquifer_page::Bytes;
use aquifer_testbed::{Parts, Spec, wait_until};
use serde_json::Value;

use crate::support::{TIMEOUT, aquifer, example, pages_of, step};

pub const VM_MEMORY: Bytes = Bytes::mib(384);
const VM_CACHE: Bytes = Bytes::mib(128);

/// Arguments of `churn`: MiB that the guest checks and rewrites, the percentage of it that the
/// guest mostly rewrites, and MiB a second.
const CHURN_ARGUMENTS: &str = "200 20 20";

const HOST_ADDRESSES: [(&str, &str); 2] = [("a", "10.0.0.1"), ("b", "10.0.0.2")];

/// Two network namespaces joined by a wire; dropping it removes them.
pub struct Network(String);

impl Network {
    fn new() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let own = NEXT.fetch_add(1, Ordering::Relaxed);
        let network = Self(format!("aquifer-move-{}-{own}", std::process::id()));
        for (host, _) in HOST_ADDRESSES {
            ip(&["netns", "add", &network.of(host)])?;
        }
        let [a, b] = HOST_ADDRESSES.map(|(host, _)| network.of(host));
        ip(&[
            "link", "add", "eth0", "netns", &a, "type", "veth", "peer", "name", "eth0", "netns", &b,
        ])?;
        for (host, address) in HOST_ADDRESSES {
            let name = network.of(host);
            ip(&["-n", &name, "address", "add", &format!("{address}/24"), "dev", "eth0"])?;
            ip(&["-n", &name, "link", "set", "lo", "up"])?;
            ip(&["-n", &name, "link", "set", "eth0", "up"])?;
        }
        Ok(network)
    }

    fn of(&self, host: &str) -> String {
        format!("{}-{host}", self.0)
    }

    /// Returns a command that runs a program in a host's network; its first argument is the
    /// program. (`ip netns exec` would give the program other mounts.)
    fn command(&self, host: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.of(host)));
        command
    }

    /// Mends the wire if `connected`, else cuts it.
    pub fn connect(&self, connected: bool) -> Result<()> {
        ip(&["-n", &self.of("a"), "link", "set", "eth0", if connected { "up" } else { "down" }])
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for (host, _) in HOST_ADDRESSES {
            let _ = ip(&["netns", "delete", &self.of(host)]);
        }
    }
}

fn ip(words: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(words).output()?;
    ensure!(output.status.success(), "ip {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Two hosts with agents, and a lender for both; dropping it ends them.
pub struct Hosts {
    dir: tempfile::TempDir,
    pages: PathBuf,
    parts: Parts,
    network: Network,
    lender: Option<Child>,
    agents: BTreeMap<&'static str, Child>,
}

impl Hosts {
    pub fn new() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let first = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guests/churn.sh");
        let spec =
            Spec::new("guest").file(example("demo", "churn"), "/bin/churn").module("virtio_mem");
        let parts = spec.file(first, "/bin/churn.sh").parts(dir.path())?;
        let pages = pages_of(dir.path());
        let (network, agents) = (Network::new()?, BTreeMap::new());
        let mut hosts = Self { dir, pages, parts, network, lender: None, agents };
        let listens = hosts.lender();
        let lender = Command::new(aquifer())
            .args([
                "serve",
                "export",
                "--size",
                "640M",
                "--nbd",
                &format!("unix:{}", listens.display()),
                "--dir",
            ])
            .arg(&hosts.pages)
            .env("AQUIFER_RUN_DIR", hosts.dir.path().join("lender-run"))
            .stdout(Stdio::null())
            .spawn()?;
        hosts.lender = Some(lender);
        wait_until("the lender listens", TIMEOUT, || Ok(listens.exists()))?;
        hosts.admit()?;
        for name in ["a", "b"] {
            hosts.start_agent(name)?;
        }
        Ok(hosts)
    }

    /// Starts the agent of a host unless it runs.
    pub fn start_agent(&mut self, host: &'static str) -> Result<()> {
        if self.agents.get_mut(host).is_some_and(|agent| matches!(agent.try_wait(), Ok(None))) {
            return Ok(());
        }
        let log =
            fs::OpenOptions::new().create(true).append(true).open(self.of(host).join("log"))?;
        let mut agent = self.network.command(host);
        agent
            .arg(aquifer())
            .args(["serve", "agent", "--config"])
            .arg(self.of(host).join("agent.toml"))
            .stderr(log);
        self.agents.insert(host, agent.spawn()?);
        wait_until("the agent answers", TIMEOUT, || {
            Ok(self.ask(host, &["status"])?.status.success())
        })
    }

    /// Returns the process id of a host's agent.
    pub fn agent(&self, host: &str) -> Result<u32> {
        Ok(self.agents.get(host).context("the host has no agent")?.id())
    }

    /// Returns the process id of the lender of all remote pages.
    pub fn lending(&self) -> Result<u32> {
        Ok(self.lender.as_ref().context("the lender does not run")?.id())
    }

    /// Returns the wire between the hosts.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Returns the directory with the files of a host's VMs.
    pub fn run_dir(&self, host: &str) -> PathBuf {
        self.of(host).join("run")
    }

    fn groups(&self, host: &str) -> PathBuf {
        self.of(host).join("groups")
    }

    fn lender(&self) -> PathBuf {
        self.dir.path().join("lender")
    }

    fn of(&self, host: &str) -> PathBuf {
        self.dir.path().join(host)
    }

    fn admit(&self) -> Result<()> {
        let mut init = Command::new(aquifer());
        init.args(["cluster", "init"]).arg("--dir").arg(self.dir.path());
        for (name, address) in HOST_ADDRESSES {
            init.args(["--host", name, "--address", address]);
        }
        let output = init.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for name in ["a", "b"] {
            let path = self.of(name).join("agent.toml");
            let mut config: toml::Table = fs::read_to_string(&path)?.parse()?;
            let run = self.of(name).join("run");
            for (key, value) in [
                ("tls", self.of(name).join("tls")),
                ("socket", run.join("agent.sock")),
                ("state", run.clone()),
                ("store", self.pages.join(name)),
            ] {
                let value = value.to_str().context("the path is not UTF-8")?;
                config.insert(key.to_owned(), value.into());
            }
            let section =
                |key: &str, value: toml::Value| toml::Table::from_iter([(key.to_owned(), value)]);
            config.insert("vms".to_owned(), section("accept", true.into()).into());
            let groups = self.groups(name).to_str().context("the path is not UTF-8")?.to_owned();
            config.insert("groups".to_owned(), section("agreements", groups.into()).into());
            config.insert("borrow".to_owned(), section("enabled", false.into()).into());
            config.insert("lend".to_owned(), section("enabled", false.into()).into());
            fs::write(&path, config.to_string())?;
        }
        Ok(())
    }

    pub fn ask(&self, host: &str, words: &[&str]) -> Result<Output> {
        let mut command = self.network.command(host);
        command.arg(aquifer()).arg("--json").args(words);
        command.env("AQUIFER_RUN_DIR", self.run_dir(host)).env("AQUIFER_GROUPS", self.groups(host));
        Ok(command.output()?)
    }

    pub fn done(&self, host: &str, words: &[&str]) -> Result<Value> {
        let output = self.ask(host, words)?;
        ensure!(
            output.status.success(),
            "{host}: {words:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(serde_json::from_slice(&output.stdout)?)
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
        let uri = format!("nbd+unix:///?socket={}", self.lender().display());
        let (memory, cache) = (VM_MEMORY.0.to_string(), VM_CACHE.0.to_string());
        let text = |path: &Path| path.to_str().context("the path is not UTF-8").map(str::to_owned);
        let (kernel, initrd) = (text(&self.parts.kernel)?, text(&self.parts.initrd)?);
        let most = (VM_MEMORY.0 + Self::MAX_GROWTH.0).to_string();
        let mut words =
            vec!["vm", "start", name, "--memory", &memory, "--cache", &cache, "--lender", &uri];
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
        let console = self.of(host).join("run/vms").join(name).join("console.log");
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
        let run = self.of(host).join("run");
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
            let logs = "cd $0; tail -n 20 */log */run/vms/*/log */run/regions/.*/log";
            let _ = Command::new("sh").args(["-c", logs]).arg(self.dir.path()).status();
        }
        for host in ["a", "b"] {
            for vm in
                self.done(host, &["vm", "list"]).ok().iter().filter_map(Value::as_array).flatten()
            {
                let name = vm["name"].as_str().unwrap_or_default();
                let _ = self.done(host, &["vm", "stop", "--force", name]);
            }
        }
        for child in self.agents.values_mut().chain(&mut self.lender) {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = fs::remove_dir_all(&self.pages);
    }
}
