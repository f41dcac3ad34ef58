//! Hosts with agents that know each other.

use std::panic::{self, AssertUnwindSafe};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use aquifer_api::status::{Role, Status};
use aquifer_hosts::daemon::AGENT;
use aquifer_page::Bytes;
use aquifer_testbed::{Host, Shell as _, Spec, Testbed, wait_for, wait_until};

use super::picture::drawn;
use super::{TIMEOUT, aquifer, daemon, example};

/// Describes a host that can join: with `aquifer`, a program that needs memory, and the modules to
/// swap to a volume.
pub fn member(name: &str) -> Spec {
    let load = example("blockdev", "touch");
    let spec = Spec::new(name).modules(["fuse", "loop", "nbd"]);
    spec.file(aquifer(), "/bin/aquifer").file(load, "/bin/checked-memory")
}

/// A cluster of hosts with agents, to be started.
#[derive(Debug)]
pub struct Cluster {
    members: Vec<Spec>,
    settings: Vec<String>,
    /// Command that each host runs before its agent starts.
    first: Option<String>,
    /// Name and title of the picture.
    picture: Option<[String; 2]>,
}

impl Cluster {
    pub fn of(members: impl IntoIterator<Item = Spec>) -> Self {
        Self {
            members: members.into_iter().collect(),
            settings: Vec::new(),
            first: None,
            picture: None,
        }
    }

    /// Adds settings to the agents' configurations from `aquifer cluster init`. Each setting is
    /// `section.key = value`, where `{address}` is the host's own.
    pub fn settings<'a>(mut self, settings: impl IntoIterator<Item = &'a str>) -> Self {
        self.settings.extend(settings.into_iter().map(str::to_owned));
        self
    }

    /// Sets a command that each host runs before its agent starts.
    pub fn first(self, command: &str) -> Self {
        Self { first: Some(command.to_owned()), ..self }
    }

    /// Draws the hosts' memory over time as `NAME.png` into the directory `AQUIFER_PICTURES`, if
    /// that variable is set.
    pub fn picture(self, name: &str, title: &str) -> Self {
        Self { picture: Some([name.to_owned(), title.to_owned()]), ..self }
    }

    /// Starts the hosts, admits them to a new cluster, starts their agents, and calls `play`. A
    /// failure prints all hosts' logs.
    pub fn play(self, play: impl FnOnce(&Testbed) -> Result<()>) -> Result<()> {
        let Self { members, settings, first, picture } = self;
        with_admitted(members, |hosts| {
            for host in hosts.hosts() {
                if let Some(first) = &first {
                    host.sh(first)?;
                }
                let config = String::from_utf8(host.read("/etc/aquifer/agent.toml")?)?;
                host.write("/etc/aquifer/agent.toml", with_settings(config, host, &settings))?;
                host.start_agent()?;
            }
            hosts.hosts().iter().try_for_each(Aquifer::wait_for_agent)?;
            match &picture {
                Some([name, title]) => drawn(hosts, name, title, play),
                None => play(hosts),
            }
        })
    }
}

/// Starts hosts and admits them to a new cluster, without agents; then calls `play`.
pub fn with_admitted(
    members: impl IntoIterator<Item = Spec>,
    play: impl FnOnce(&Testbed) -> Result<()>,
) -> Result<()> {
    let hosts = Testbed::start(members)?;
    let played =
        panic::catch_unwind(AssertUnwindSafe(|| admit(&hosts).and_then(|()| play(&hosts))));
    if !matches!(played, Ok(Ok(()))) {
        hosts.hosts().iter().filter(|host| host.is_on()).for_each(show_logs);
    }
    played.unwrap_or_else(|panic| panic::resume_unwind(panic))
}

/// Prints the logs of agent and volumes, the running and blocked tasks, and the kernel's log.
fn show_logs(host: &Host) {
    let logs = "free -m; cat /proc/swaps
        tail -n 40 /var/log/agent.log /run/aquifer/volumes/*.log; dmesg | tail -n 20
        counters='pswp|pgmajfault|pgsteal_(kswapd|direct) |allocstall|oom_kill|workingset_refault'
        grep -E \"^($counters)\" /proc/vmstat
        awk '$1 == \"TcpExt:\" && !n { n = split($0, name); next }
            $1 == \"TcpExt:\" {
                for (i = 2; i <= n; i++) if ($i) printf \"%s %s \", name[i], $i
            }' \\
            /proc/net/netstat
        top -b -n 2 -d 3 | head -n 40
        for key in l w m; do echo $key >/proc/sysrq-trigger; done; dmesg | tail -n 250";
    match host.run_within(logs, Duration::from_secs(30)) {
        Ok(logs) => eprintln!("---- logs of {host}:\n{}{}----", logs.stdout, logs.stderr),
        Err(error) => eprintln!("cannot read the logs of {host}: {error}"),
    }
}

/// Runs `aquifer cluster init` for all hosts, and copies each host's files to it.
fn admit(hosts: &Testbed) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut init = Command::new(aquifer());
    init.args(["cluster", "init"]).arg("--dir").arg(dir.path());
    for host in hosts.hosts() {
        init.args(["--host", host.name(), "--address", &host.address().to_string()]);
    }
    let done = init.output()?;
    ensure!(
        done.status.success(),
        "aquifer cluster init: {}",
        String::from_utf8_lossy(&done.stderr)
    );
    hosts
        .hosts()
        .iter()
        .try_for_each(|host| host.push(&dir.path().join(host.name()), "/etc/aquifer"))
}

fn with_settings(config: String, host: &Host, settings: &[String]) -> String {
    settings.iter().fold(config, |config, setting| {
        let setting = setting.replace("{address}", &host.address().to_string());
        let (section, line) = setting.split_once('.').expect("a setting is 'section.key = value'");
        let heading = format!("[{section}]\n");
        assert!(config.contains(&heading), "the configuration has no section {section}");
        config.replace(&heading, &format!("{heading}{line}\n"))
    })
}

/// An operator's actions and views on a host.
pub trait Aquifer {
    /// Starts the agent.
    fn start_agent(&self) -> Result<()>;
    /// Waits until the agent answers and has read its memory figures once.
    fn wait_for_agent(&self) -> Result<()>;
    /// Returns the agent's status.
    fn status(&self) -> Result<Status>;
    /// Waits until the host has this role.
    fn wait_until_it_is(&self, role: Role) -> Result<()>;
    /// Waits until the host neither lends nor borrows; checks that no lent pages and no swap are
    /// left.
    fn wait_until_it_is_free(&self) -> Result<()>;
    /// Returns the memory available to programs without swapping, in whole pages.
    fn available(&self) -> Result<Bytes>;
    /// Returns the number of pages swapped out since boot.
    fn pages_swapped_out(&self) -> Result<u64>;
    /// Returns the RAM that lent pages take, as the file system or zram reports it.
    fn lends(&self) -> Result<Bytes>;
}

impl Aquifer for Host {
    fn start_agent(&self) -> Result<()> {
        let agent = daemon(AGENT, ">>/var/log/agent.log 2>&1");
        self.spawn(&format!("mkdir -p /var/log && {agent}")).map(|_| ())
    }

    fn wait_for_agent(&self) -> Result<()> {
        wait_until(&format!("the agent of {self} answers"), TIMEOUT, || {
            let status = self.run("aquifer status --json")?;
            Ok(status.success() && parse(&status.stdout)?.memory.total > Bytes::ZERO)
        })
    }

    fn status(&self) -> Result<Status> {
        parse(&self.sh("aquifer status --json")?)
    }

    fn wait_until_it_is(&self, role: Role) -> Result<()> {
        wait_until(&format!("{self} is {role}"), TIMEOUT, || Ok(self.status()?.role == role))
    }

    fn wait_until_it_is_free(&self) -> Result<()> {
        let status = wait_for(&format!("{self} is free"), TIMEOUT, || {
            let status = self.status()?;
            let free = status.role == Role::Neutral
                && status.loans.lent.is_empty()
                && status.loans.borrowed.is_empty();
            Ok(free.then_some(status))
        })?;
        ensure!(self.lends()? == Bytes::ZERO, "{self} still stores {}", self.lends()?);
        let swaps = self.sh("cat /proc/swaps")?;
        ensure!(swaps.lines().count() == 1, "{self} still swaps, as a {}:\n{swaps}", status.role);
        Ok(())
    }

    fn available(&self) -> Result<Bytes> {
        let kib: u64 =
            self.sh("awk '/MemAvailable/ { print $2 }' /proc/meminfo")?.trim().parse()?;
        Ok(Bytes::kib(kib / 4 * 4))
    }

    fn pages_swapped_out(&self) -> Result<u64> {
        Ok(self.sh("awk '$1 == \"pswpout\" { print $2 }' /proc/vmstat")?.trim().parse()?)
    }

    fn lends(&self) -> Result<Bytes> {
        let files =
            format!("find /dev/shm/aquifer/{self} -name '*.pages' -exec du -k {{}} + 2>/dev/null");
        let disks = "awk '{ print $3 / 1024 }' /sys/block/zram*/mm_stat 2>/dev/null";
        let kib = self
            .sh(&format!("({files}; {disks}) | awk '{{ s += $1 }} END {{ printf \"%d\", s }}'"))?;
        Ok(Bytes::kib(kib.trim().parse()?))
    }
}

fn parse(json: &str) -> Result<Status> {
    serde_json::from_str(json).with_context(|| format!("cannot parse the agent's status: {json}"))
}
