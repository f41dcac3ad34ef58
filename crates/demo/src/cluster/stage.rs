//! The stage of the demo: four hosts on one bridge, joined by one command each.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_api::status::Standing;
use aquifer_cli::cgroup::{Cgroup, Hierarchy, Limits, Swap};
use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_cli::instance::Instance;
use aquifer_cli::sys::start_in_cgroup;
use aquifer_hosts::{Binary, Namespace, Place, Switched};
use aquifer_page::Bytes;
use aquifer_vm::process::client;

use crate::process::{self, failure};
use crate::session::DemoSession;
use crate::wait::Wait;
use crate::{program, remove, stores};

/// The hosts. The first creates the cluster and runs the VM.
pub(super) const HOSTS: [&str; 4] = ["a", "b", "c", "d"];

/// RAM of each host, which its cgroup enforces.
pub(super) const RAM: Bytes = Bytes::mib(640);

/// A host that uses more than this part of its RAM recalls what it lent.
pub(super) const UPPER: f64 = 0.7;
const LOWER: f64 = 0.5;

/// How long the others may take to see a host come or go.
const GOSSIP: Duration = Duration::from_secs(30);

/// How long the removal of a VM may take.
const CLEARING: Duration = Duration::from_secs(20);

/// A host with a cgroup as its machine; its drop ends all of its programs, then its agent.
#[derive(Debug)]
pub(super) struct Member {
    host: aquifer_hosts::Host,
    pub(super) cgroup: Cgroup,
}

impl Member {
    /// Runs `aquifer` among the programs of this host.
    pub(super) fn run(&self, words: &[&str]) -> Result<()> {
        self.output(words).map(drop)
    }

    /// Does the same, and returns its standard output.
    pub(super) fn output(&self, words: &[&str]) -> Result<Vec<u8>> {
        let named = words.iter().filter(|word| !word.starts_with('-')).take(2);
        let named = named.copied().collect::<Vec<_>>().join(" ");
        let what = || format!("'aquifer {named}' on host {}", self.name());
        let mut command = self.command().map_err(failure)?;
        start_in_cgroup(&mut command, self.cgroup.entrance().or_fail(what)?);
        let output = command.args(words).stdin(Stdio::null()).output().or_fail(what)?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        Err(Failure::new(what(), String::from_utf8_lossy(&output.stderr).trim()))
    }

    /// Returns what the host's agent knows of another host.
    pub(super) fn standing_of(&self, name: &str) -> Option<Standing> {
        let peers = self.try_status()?.peers;
        peers.into_iter().find(|peer| peer.host.as_str() == name).map(|peer| peer.standing)
    }
}

impl Deref for Member {
    type Target = aquifer_hosts::Host;

    fn deref(&self) -> &aquifer_hosts::Host {
        &self.host
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.cgroup.kill_all();
    }
}

/// The hosts with their network and files; its drop removes all of it.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) hosts: Vec<Member>,
    _network: Switched,
    dir: PathBuf,
    /// Milliseconds from each host's `cluster join` until the first host sees it.
    pub(super) join_ms: Vec<u64>,
    /// The hosts' configuration files, as each was when its host had joined.
    configured: BTreeMap<PathBuf, Vec<u8>>,
}

impl Stage {
    pub(super) fn set(session: &DemoSession, hierarchy: &Hierarchy, qemu: &Path) -> Result<Self> {
        let DemoSession { instance, dir, .. } = session;
        hierarchy.enable().or_fail(|| "allowing cgroups with limits")?;
        let network = Switched::create(instance.name(), &HOSTS).map_err(failure)?;
        let places = network.hosts().to_vec();
        let (hosts, join_ms, configured) = Default::default();
        let mut stage = Self { hosts, _network: network, dir: dir.clone(), join_ms, configured };
        let aquifer = Binary::new(program::aquifer()?);
        let set = Setting { instance, hierarchy, qemu, wait: session.wait() };
        let mut places = HOSTS.into_iter().zip(&places);
        let Some(first) = places.next() else { unreachable!("there are four hosts") };
        let (host, token) = aquifer_hosts::Host::create(&aquifer, dir, &stores(dir), place(first))
            .map_err(failure)?;
        stage.admit(host, &set)?;
        for member in places {
            let began = Instant::now();
            let signer = (&*stage.hosts[0], token.as_str());
            let (dir, stores) = (&stage.dir, stores(&stage.dir));
            let host = aquifer_hosts::Host::join(&aquifer, dir, &stores, place(member), signer)
                .map_err(failure)?;
            stage.admit(host, &set)?;
            let what = format!("letting host {} join", member.0);
            set.wait.until(&what, GOSSIP, || {
                let is_up = stage.hosts[0].standing_of(member.0) == Some(Standing::Up);
                Ok(is_up.then_some(()))
            })?;
            let took = began.elapsed().as_millis();
            stage.join_ms.push(u64::try_from(took).unwrap_or(u64::MAX));
        }
        Ok(stage)
    }

    /// Starts the agent of a host that belongs to the cluster.
    fn admit(&mut self, host: aquifer_hosts::Host, set: &Setting<'_>) -> Result<()> {
        let name = host.name();
        let cgroup = Cgroup::create(
            set.hierarchy,
            &cgroup_name(set.instance, name),
            Limits { memory: RAM, swap: Swap::Unlimited },
        )
        .or_fail(|| format!("making the cgroup that plays host {name}"))?;
        // This machine plays four: each agent must know which part of it is its own.
        let sections = format!(
            "[memory]\ncgroup = \"{}\"\nperiod = \"100ms\"\nupper = {UPPER}\nlower = {LOWER}\n\
             pressure = 0.0\n[borrow]\nenabled = false\n[vms]\naccept = true\n\
             move_after = \"8s\"\nqemu = \"{}\"\n",
            cgroup.path().display(),
            set.qemu.display()
        );
        host.set(&sections).map_err(failure)?;
        let member = Member { host, cgroup };
        // What an agent starts, such as a VM that arrives, is a program of its host.
        let entrance = member.cgroup.entrance();
        let entrance =
            entrance.or_fail(|| format!("entering the cgroup that plays host {name}"))?;
        let within = |command: &mut Command| {
            process::end_with_this(command);
            start_in_cgroup(command, entrance);
        };
        member.start(within).map_err(failure)?;
        process::wait_until_ready(&member, set.wait)?;
        self.configured.append(&mut files_of(&member)?);
        self.hosts.push(member);
        Ok(())
    }

    /// Counts the configuration files that changed since their hosts joined.
    pub(super) fn files_edited(&self) -> u64 {
        let is_edited =
            |(path, text): &(&PathBuf, &Vec<u8>)| fs::read(path).ok().as_ref() != Some(text);
        self.configured.iter().filter(is_edited).count() as u64
    }

    /// Stops counting the files of a host that left: its certificate is gone.
    pub(super) fn forget_files_of(&mut self, host: &str) {
        let dir = self.dir.join(host);
        self.configured.retain(|path, _| !path.starts_with(&dir));
    }

    pub(super) fn host(&self, name: &str) -> &Member {
        let found = self.hosts.iter().find(|host| host.name() == name);
        found.unwrap_or_else(|| unreachable!("{name} is one of the hosts"))
    }

    /// Returns the last lines of all logs.
    pub(super) fn logs(&self) -> String {
        self.hosts.iter().map(|host| host.log_tails(8)).collect()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        clear_vms(&self.dir);
        self.hosts.clear();
        // A drop cannot report. The next demo removes the rest.
        remove(&self.dir);
    }
}

/// What all hosts have in common.
struct Setting<'a> {
    instance: &'a Instance,
    hierarchy: &'a Hierarchy,
    qemu: &'a Path,
    wait: Wait<'a>,
}

fn place((name, network): (&'static str, &Arc<Namespace>)) -> Place {
    Place::within(name, network)
}

/// Reads the files that an operator would edit: the configuration and the certificates.
fn files_of(host: &Member) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let what = || format!("reading the files of host {}", host.name());
    let entries = fs::read_dir(host.tls()).or_fail(what)?.flatten().map(|entry| entry.path());
    let read = |path: PathBuf| fs::read(&path).map(|text| (path, text)).or_fail(what);
    entries.chain([host.config()]).map(read).collect()
}

fn cgroup_name(instance: &Instance, host: &str) -> String {
    format!("aquifer-{}-{host}", instance.name())
}

fn clear_vms(dir: &Path) {
    for host in HOSTS {
        for vm in client::list(&dir.join(host).join("state")).unwrap_or_default() {
            let _ = client::stop(&vm, true, CLEARING);
        }
    }
}

/// Removes the remains of a killed demo; its agents and loads ended with it.
pub(super) fn clean_up(dir: &Path, dead: &Instance, hierarchy: &Hierarchy) -> Result<()> {
    clear_vms(dir);
    for host in HOSTS {
        drop(Cgroup::adopt(hierarchy, &cgroup_name(dead, host)));
    }
    Switched::clean_up(dead.name(), &HOSTS).map_err(failure)?;
    remove(dir);
    Ok(())
}
