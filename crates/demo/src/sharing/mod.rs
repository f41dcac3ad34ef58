//! `aquifer demo sharing`: two hosts on this machine, overloaded one after the other, use each
//! other's memory.
//!
//! Everything is real: two agents in network namespaces of their own, each with a memory cgroup as
//! its machine. Each load fills 1.5 times its host's RAM, and verifies every byte while a third of
//! it is in the other host's RAM.

mod host;
mod report;
mod watch;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aquifer_cli::cgroup::{Cgroup, Hierarchy, Limits, Swap};
use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_cli::instance::Instance;
use aquifer_cli::load::{Plan, Verdict};
use aquifer_hosts::Network;
use aquifer_page::Bytes;

use super::loader::Loader;
use super::process::{failure, hosts, wait_until_ready};
use super::session::{DemoSession, Outcome};
use host::Host;
use report::Summary;
use watch::Watch;

/// The options of the demo.
#[derive(Debug)]
pub struct Options {
    /// RAM of each host, in bytes.
    pub memory: Bytes,
    /// The directory of marks, sockets and logs while the demo runs.
    pub run_dir: PathBuf,
}

/// The memory that a host's load fills, as a multiple of the host's RAM (the mock application of
/// \[Ge23\]).
const OVERLOAD: f64 = 1.5;

/// T_upper and T_lower of both agents (\[Ge23\]).
const THRESHOLDS: (f64, f64) = (0.8, 0.6);

/// How long each step may take before the demo gives up.
const STEP: Duration = Duration::from_secs(40);

/// How long both hosts are watched after the end.
const CODA: Duration = Duration::from_millis(1500);

/// The kind in the demo's mark.
const KIND: &str = "demo";

/// Runs the demo and removes all that it made.
///
/// # Errors
/// If this machine lacks a requirement, or if a step fails; the help then has the agents' logs.
pub fn run(options: &Options) -> Result<Outcome<Summary>> {
    let hierarchy = Hierarchy::find().or_fail(|| "making a cgroup for each host")?;
    let session =
        DemoSession::begin(&options.run_dir, KIND, |dir, dead| clean_up(dir, dead, &hierarchy))?;
    let stage = Stage::set(options, &session, &hierarchy)?;
    let watch = Watch::start(&stage.hosts, options.memory);
    let played = stage.play(options, &watch, &session.interrupted);
    let seen = watch.stop();
    let ended = stage.clear(played.is_err());
    let phases =
        played.map_err(
            |failure| if ended.logs.is_empty() { failure } else { failure.help(ended.logs) },
        )?;
    ended.result?;
    Ok(Outcome { summary: Summary::new(&phases, &seen), picture: seen.picture(options.memory)? })
}

/// The hosts with their network and files; its drop removes all of it, in the order of the fields.
#[derive(Debug)]
struct Stage {
    hosts: Vec<Host>,
    network: Network,
    dir: PathBuf,
}

struct Ended {
    result: Result<()>,
    /// The last lines of the agents' logs, if the demo failed.
    logs: String,
}

impl Stage {
    fn set(options: &Options, session: &DemoSession, hierarchy: &Hierarchy) -> Result<Self> {
        let DemoSession { instance, dir, .. } = session;
        let network = Network::create(instance.name()).map_err(failure)?;
        let mut stage = Self { hosts: Vec::new(), network, dir: dir.clone() };
        for host in hosts(&stage.network, dir)? {
            let name = host.name();
            let limits = Limits { memory: options.memory, swap: Swap::Unlimited };
            let cgroup =
                Cgroup::create(hierarchy, &format!("aquifer-{}-{name}", instance.name()), limits)
                    .or_fail(|| format!("making the cgroup that plays host {name}"))?;
            stage.hosts.push(Host::start(host, cgroup, options.memory)?);
        }
        for host in &stage.hosts {
            wait_until_ready(host, session.wait())?;
        }
        Ok(stage)
    }

    /// Overloads one host, then the other.
    fn play(
        &self,
        options: &Options,
        watch: &Watch,
        interrupted: &AtomicBool,
    ) -> Result<[Verdict; 2]> {
        let mut verdicts = [Verdict::default(); 2];
        for (turn, verdict) in verdicts.iter_mut().enumerate() {
            let play = Play { stage: self, watch, interrupted, host: &self.hosts[turn], turn };
            *verdict = play.overload(options)?;
        }
        // The picture shows that both hosts are neutral again.
        std::thread::sleep(CODA);
        Ok(verdicts)
    }

    /// Ends the agents and removes all that the demo made.
    fn clear(mut self, failed: bool) -> Ended {
        let logs = if failed {
            self.hosts.iter().map(|host| host.log_tails(12)).collect()
        } else {
            String::new()
        };
        let hosts = std::mem::take(&mut self.hosts);
        let result = hosts.into_iter().try_for_each(Host::end);
        Ended { result, logs }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.hosts.clear();
        // A drop cannot report. The next demo removes the rest.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// One host's overload, from its beginning until all borrowed memory is given back.
struct Play<'a> {
    stage: &'a Stage,
    watch: &'a Watch,
    interrupted: &'a AtomicBool,
    host: &'a Host,
    turn: usize,
}

impl Play<'_> {
    fn overload(&self, options: &Options) -> Result<Verdict> {
        let name = self.host.name();
        let other = self.stage.hosts[1 - self.turn].name();
        self.watch.begin(self.turn);
        self.stage_is(&format!(
            "host {name} is overloaded: a process fills {OVERLOAD} times its RAM"
        ));
        let plan = Plan {
            bytes: options.memory.scaled(OVERLOAD),
            rate: Some(options.memory.scaled(0.2)),
            seed: 1 + self.turn as u64,
            hold: true,
        };
        let mut load = Loader::start(plan, |command| {
            let entrance =
                self.host.cgroup().entrance().or_fail(|| "starting a load in a cgroup")?;
            aquifer_cli::sys::start_in_cgroup(command, entrance);
            Ok(())
        })?;
        self.wait("filling memory", || load.filled(soon()))?;
        self.stage_is(&format!("every byte is verified, through the memory of host {other}"));
        load.order("verify")?;
        let verdict = self.wait("verifying memory", || load.verified(soon()))?;
        self.stage_is(&format!("the load of host {name} ends: it returns borrowed memory"));
        load.order("free")?;
        self.watch.freed(self.turn);
        self.wait("returning borrowed memory", || {
            Ok(self.watch.has_returned(self.turn).then_some(()))
        })?;
        load.quit(Instant::now() + STEP)?;
        Ok(verdict)
    }

    fn stage_is(&self, what: &str) {
        self.watch.stage(what);
    }

    /// Polls `step` until it returns a value; fails if an agent dies or the time is over.
    fn wait<T>(&self, what: &str, mut step: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let deadline = Instant::now() + STEP;
        loop {
            if self.interrupted.load(Ordering::Relaxed) {
                return Err(Failure::new("showing memory sharing", "interrupted"));
            }
            for host in &self.stage.hosts {
                host.check().map_err(failure)?;
            }
            if let Some(found) = step()? {
                return Ok(found);
            }
            if Instant::now() > deadline {
                let name = self.host.name();
                return Err(Failure::new(
                    what,
                    format!("host {name} is not done with it after {} s", STEP.as_secs()),
                ));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Returns the deadline of one poll of a wait.
fn soon() -> Instant {
    Instant::now() + Duration::from_millis(50)
}

/// Removes the remains of a killed demo.
fn clean_up(dir: &Path, dead: &Instance, hierarchy: &Hierarchy) -> Result<()> {
    for name in ["a", "b"] {
        drop(Cgroup::adopt(hierarchy, &format!("aquifer-{}-{name}", dead.name())));
    }
    host::clean_up(dir);
    Network::clean_up(dead.name()).map_err(failure)?;
    let _ = fs::remove_dir_all(dir);
    Ok(())
}
