//! `aquifer demo cluster`: four hosts on this machine become a cluster and keep a guest's memory.
//!
//! Everything is real: four agents in network namespaces of their own on one bridge, each with a
//! memory cgroup as its machine; QEMU, and a stock kernel. The guest rewrites its memory and checks
//! every byte, while its pages move from one lender to the next. At the end it shares equal pages
//! with a second guest of its group.

mod boot;
mod guest;
mod picture;
mod report;
mod sharing;
mod stage;
mod watch;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use aquifer_api::status::Standing;
use aquifer_cli::cgroup::Hierarchy;
use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_cli::load::Plan;
use aquifer_cli::progress::Progress;
use aquifer_cli::sys::start_in_cgroup;
use aquifer_page::Bytes;

use super::loader::Loader;
use super::machine::Machine;
use super::session::{DemoSession, Outcome};
use super::user::User;
use boot::{Boot, serial};
use guest::{HELD, Writer};
use report::{Played, Summary};
use stage::{Member, RAM, Stage};
use watch::Watch;

/// The options of the demo.
#[derive(Debug)]
pub struct Options {
    /// The kernel, accelerator and QEMU of the guest.
    pub machine: Machine,
    /// The directory of marks, sockets and logs while the demo runs.
    pub run_dir: PathBuf,
}

/// The kind in the demo's mark.
const KIND: &str = "cluster-demo";

/// The VM, and its memory.
const VM: &str = "web";
const MEMORY: Bytes = Bytes::mib(256);

/// The memory that a program takes on a host. With the pages of the VM that are there, it is more
/// than the host's threshold; with all that the host promised, no more than its RAM.
const PRESSURE: Bytes = Bytes::mib(304);

/// The memory that a program takes on the VM's host while all of the VM's pages are there.
const FIRST_PRESSURE: Bytes = Bytes::mib(256);

/// How long a step may take before the demo gives up.
const STEP: Duration = Duration::from_secs(60);

/// How long all hosts are watched before the first step and after the last.
const CODA: Duration = Duration::from_millis(1500);

/// Runs the demo and removes all that it made.
///
/// # Errors
/// If this machine lacks a requirement, or if a step fails; the help then has the agents' logs.
pub fn run(options: &Options) -> Result<Outcome<Summary>> {
    let hierarchy = Hierarchy::find().or_fail(|| "making a cgroup for each host")?;
    let session = DemoSession::begin(&options.run_dir, KIND, |dir, dead| {
        stage::clean_up(dir, dead, &hierarchy)
    })?;
    let progress = Progress::spinner("four hosts join a cluster");
    let mut stage = Stage::set(&session, &hierarchy, &options.machine.qemu)?;
    let watch = Watch::start(&stage.hosts)?;
    let mut play =
        Play { stage: &mut stage, session: &session, watch: &watch, progress: &progress };
    let played = play.run(options);
    let seen = watch.stop();
    let played = played.map_err(|failure| failure.help(stage.logs()))?;
    let picture = picture::draw(&seen)?;
    Ok(Outcome { summary: Summary::new(played, &seen), picture })
}

struct Play<'a> {
    stage: &'a mut Stage,
    session: &'a DemoSession,
    watch: &'a Watch,
    progress: &'a Progress,
}

impl Play<'_> {
    fn run(&mut self, options: &Options) -> Result<Played> {
        std::thread::sleep(CODA);
        let boot = Boot::new(self.first(), &options.machine)?;
        self.create_vm(&boot)?;
        let user = User::meet(&serial(self.first(), VM), self.session.wait())?;
        let group_hosts = self.await_group()?;
        let mut guest = Writer::meet(user, HELD)?;
        self.press_home(&mut guest)?;
        let first = self.lender()?;
        self.overload_lender(&first, &mut guest)?;
        let second = self.lender()?;
        let lender_ms = self.drain_lender(&second, &mut guest)?;
        self.stage.forget_files_of(&second);
        let home = self.overload_home(&mut guest)?;
        let home_ms = self.drain_home(home, &mut guest)?;
        self.stage.forget_files_of(home);
        self.progress.say("the guest verifies every page".to_owned());
        guest.pass()?;
        let (shared, twin) = self.share(&boot, &mut guest)?;
        std::thread::sleep(CODA);
        self.first().run(&["vm", "stop", VM, "--force"])?;
        self.first().run(&["vm", "rm", VM])?;
        Ok(Played {
            files_edited: self.stage.files_edited(),
            join_ms: self.stage.join_ms.clone(),
            tally: guest.tally + twin,
            group_hosts,
            shared,
            drained_ms: lender_ms.max(home_ms),
        })
    }

    /// Returns the host that made the cluster. It never leaves.
    fn first(&self) -> &Member {
        &self.stage.hosts[0]
    }

    /// Creates the group and its first VM on the first host, whose agent finds lenders when it
    /// needs them.
    fn create_vm(&self, boot: &Boot) -> Result<()> {
        self.progress.say("the VM boots; no lender is named".to_owned());
        self.create_group()?;
        self.watch.mark(self.first().name(), "the VM starts");
        boot.create(self.first(), VM, MEMORY)
    }

    /// Returns the one host that lends to the VM, which is on the first host.
    fn lender(&self) -> Result<String> {
        let what = "finding the VM's lender";
        self.session.wait().until(what, STEP, || {
            let regions = self.first().try_status().map(|status| status.loans.regions);
            let leases = regions.into_iter().flatten().flat_map(|region| region.leases);
            let lenders: Vec<_> = leases.map(|held| held.lender.to_string()).collect();
            Ok(<[String; 1]>::try_from(lenders).ok().map(|[lender]| lender))
        })
    }

    /// Waits until the VM's memory belongs to a host other than `from`, and returns that host.
    fn new_home(&self, from: &str) -> Result<&Member> {
        self.session.wait().until("letting the VM move", STEP, || {
            let others = self.stage.hosts.iter().filter(|host| host.name() != from);
            let has_it = |host: &&Member| {
                host.try_status().is_some_and(|status| !status.loans.regions.is_empty())
            };
            Ok(others.into_iter().find(has_it))
        })
    }

    /// Overloads the VM's host for a while. The agent borrows, and moves cold pages of the VM.
    fn press_home(&self, guest: &mut Writer<'_>) -> Result<()> {
        self.progress.say("a program of the VM's host needs memory: cold pages leave".to_owned());
        guest.pass()?;
        let load = self.load(self.first(), FIRST_PRESSURE)?;
        let deadline = Instant::now() + STEP;
        guest.pass_until(|| {
            let late = || format!("no page has left host a after {} s", STEP.as_secs());
            let left = self.stage.hosts[1..].iter().any(|host| host.stored() > Bytes::ZERO);
            if !left && Instant::now() > deadline {
                return Err(Failure::new("moving cold pages", late()));
            }
            Ok(left)
        })?;
        self.unload(load, self.first().name())
    }

    /// Starts a program on a host that overloads it.
    fn load(&self, host: &Member, bytes: Bytes) -> Result<Loader> {
        self.watch.mark(host.name(), "a program of the host needs memory");
        let plan = Plan { bytes, rate: Some(RAM), seed: 1, hold: true };
        Loader::start(plan, |command| {
            let entrance = host.cgroup.entrance().or_fail(|| "starting a load in a cgroup")?;
            start_in_cgroup(command, entrance);
            Ok(())
        })
    }

    /// Verifies the memory of that program, and ends it.
    fn unload(&self, mut load: Loader, host: &str) -> Result<()> {
        load.order("verify")?;
        let what = "verifying a host's own memory";
        let verdict = self
            .session
            .wait()
            .until(what, STEP, || load.verified(Instant::now() + Duration::from_millis(50)))?;
        if verdict.pages_lost > 0 {
            let why = format!("{} pages of host {host}'s own were lost", verdict.pages_lost);
            return Err(Failure::new(what, why));
        }
        load.quit(Instant::now() + STEP)
    }

    /// Overloads a lender by a program of its own, until the VM's pages are elsewhere.
    fn overload_lender(&self, name: &str, guest: &mut Writer<'_>) -> Result<()> {
        self.progress.say(format!("host {name} needs its memory, while the guest writes"));
        let lender = self.stage.host(name);
        let load = self.load(lender, PRESSURE)?;
        let deadline = Instant::now() + STEP;
        guest.pass_until(|| {
            let late = || format!("{name} still lends after {} s", STEP.as_secs());
            let is_free = lender.try_status().is_some_and(|status| status.loans.lent.is_empty());
            if !is_free && Instant::now() > deadline {
                return Err(Failure::new("recalling memory", late()));
            }
            Ok(is_free)
        })?;
        self.unload(load, name)
    }

    /// Overloads the VM's host by a program of its own, until the agent has moved the VM. Returns
    /// the VM's new host.
    fn overload_home(&self, guest: &mut Writer<'_>) -> Result<&'static str> {
        let from = self.first();
        self.progress.say(format!("host {} stays overloaded, so the VM moves", from.name()));
        let load = self.load(from, PRESSURE)?;
        let home = self.new_home(from.name())?;
        guest.meet_again(&serial(home, VM))?;
        self.unload(load, from.name())?;
        guest.pass()?;
        Ok(home.name())
    }

    /// Drains the VM's host, which moves the VM, and lets the host leave. Returns how long that
    /// took, in milliseconds.
    fn drain_home(&self, name: &str, guest: &mut Writer<'_>) -> Result<u64> {
        self.progress.say(format!("host {name} drains: the VM moves, and the host leaves"));
        let took = self.drain(name, |left| left())?;
        let home = self.new_home(name)?;
        guest.meet_again(&serial(home, VM))?;
        Ok(took)
    }

    /// Drains a lender and lets it leave, while the guest writes. Returns how long it took, in
    /// milliseconds.
    fn drain_lender(&self, name: &str, guest: &mut Writer<'_>) -> Result<u64> {
        self.progress.say(format!("host {name} drains and leaves, while the guest writes"));
        self.drain(name, |leave| {
            std::thread::scope(|scope| {
                let left = scope.spawn(leave);
                let passed = guest.pass_until(|| Ok(left.is_finished()));
                let left = left.join().unwrap_or_else(|_| {
                    Err(Failure::new("draining a host", "the thread that waited for it panicked"))
                });
                passed.and(left)
            })
        })
    }

    /// Drains a host and lets it leave, by a function that calls the given one. Returns how long
    /// that took, in milliseconds.
    fn drain(
        &self,
        name: &str,
        during: impl FnOnce(&(dyn Fn() -> Result<()> + Sync)) -> Result<()>,
    ) -> Result<u64> {
        let host = self.stage.host(name);
        self.watch.mark(name, "the operator drains it");
        let began = Instant::now();
        during(&|| drain_and_leave(host))?;
        let took = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let what = format!("letting host {name} leave");
        self.session.wait().until(&what, STEP, || {
            let standing = self.first().standing_of(name);
            Ok(matches!(standing, Some(Standing::Left) | None).then_some(()))
        })?;
        self.watch.mark(name, "left");
        Ok(took)
    }
}

/// Drains a host and lets it leave.
fn drain_and_leave(host: &Member) -> Result<()> {
    host.run(&["host", "drain"])?;
    let config = host.config().display().to_string();
    host.run(&["cluster", "leave", "--config", &config])
}
