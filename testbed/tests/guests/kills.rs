//! The kill matrix: one process of a cluster dies while a VM is created, grows, leaves a lender
//! that recalls, or leaves a host that drains. Nothing is lost, nothing is left behind.
//!
//! Needs root and userfaultfd on this machine. By default one process dies in each step;
//! `AQUIFER_MATRIX=all` tests every process in every step.

mod site;

use std::fs;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use aquifer_hosts::Host;
use aquifer_testbed::wait_until;
use rustix::process::Signal;

use crate::support::{TIMEOUT, VmHost as _, ended, kill, step};
use site::{LENDERS, SIGNER, Site, VM, VM_HOSTS};

/// What is in progress when a process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// `vm create`: a lender has lent.
    Create,
    /// `vm resize`: the growth is recorded.
    Grow,
    /// `host drain` on the lender: the lender recalls its lease.
    Recall,
    /// `host drain` on the VM's host: the VM arrives on the other host.
    Drain,
}

/// The process that dies. *Here* is the host that has the VM when the step begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    AgentHere,
    AgentThere,
    Lender,
    OtherLender,
    Signer,
    EngineHere,
    EngineThere,
    SupervisorHere,
    SupervisorThere,
}

use Victim::*;

impl Step {
    const ALL: [Self; 4] = [Self::Create, Self::Grow, Self::Recall, Self::Drain];

    /// Returns the processes that may die in this step, the most interesting first.
    fn victims(self) -> &'static [Victim] {
        match self {
            Self::Create => &[AgentHere, Lender, Signer, OtherLender],
            Self::Grow => &[SupervisorHere, EngineHere, AgentHere, Lender, Signer],
            Self::Recall => &[Lender, AgentHere, EngineHere, OtherLender, SupervisorHere, Signer],
            Self::Drain => &[
                AgentHere,
                AgentThere,
                Lender,
                SupervisorThere,
                EngineThere,
                SupervisorHere,
                EngineHere,
                Signer,
            ],
        }
    }
}

/// How often a step may be over before its middle.
const ATTEMPTS: usize = 4;

/// The VM before a step.
enum Before {
    /// It is not there. An earlier one of its name began at these times.
    Nothing(Vec<u64>),
    /// Its figures, and when it began, on the host that has it.
    Runs([u64; 3], Vec<u64>),
}

/// One cell of the matrix.
struct Cell<'a> {
    site: &'a Site,
    step: Step,
    victim: Victim,
    here: &'static str,
    there: &'static str,
    /// The lender when the step begins.
    lender: &'static str,
    /// The number of the cell: growing cells alternate between two sizes.
    number: usize,
}

#[test]
fn nothing_is_lost_whichever_process_dies_in_whichever_step() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return Ok(());
    }
    let all = std::env::var("AQUIFER_MATRIX").is_ok_and(|matrix| matrix == "all");
    let site = Site::new()?;
    let mut here = VM_HOSTS[0];
    for step in Step::ALL {
        let count = if all { step.victims().len() } else { 1 };
        for (number, victim) in step.victims().iter().take(count).enumerate() {
            here = die_in(&site, step, *victim, (here, number))
                .with_context(|| format!("{victim:?} died in {step:?}"))?;
        }
    }
    site.boot(here)?;
    wait_until("the VM runs again", TIMEOUT, || Ok(site.of(here).vm_state(VM) == "running"))?;
    settled(&site, here)?;
    step(&format!("{here} has booted, and its agent has started the VM"));
    remove_vm(&site, here)
}

/// Tests one cell of the matrix, with the VM on `here`; returns the VM's host. A step that was over
/// before its middle comes again.
fn die_in(
    site: &Site,
    step: Step,
    victim: Victim,
    (mut here, number): (&'static str, usize),
) -> Result<&'static str> {
    for attempt in 0..ATTEMPTS {
        let number = number + attempt;
        if step == Step::Create && number > 0 {
            remove_vm(site, here)?;
        }
        let lender = site.lender().unwrap_or(LENDERS[0]);
        let there = if here == VM_HOSTS[0] { VM_HOSTS[1] } else { VM_HOSTS[0] };
        let has_died;
        (here, has_died) = Cell { site, step, victim, here, there, lender, number }.run()?;
        if has_died {
            return Ok(here);
        }
    }
    bail!("the step was over before its middle, {ATTEMPTS} times")
}

/// Waits until the VM runs on a host and all hosts agree about that.
fn settled(site: &Site, here: &str) -> Result<Duration> {
    let [_, _, wrong] = site.of(here).goes_on(VM)?;
    ensure!(wrong == 0, "{wrong} pages are wrong");
    let began = Instant::now();
    let mut last = String::new();
    let agree = wait_until("all hosts agree about the leases", TIMEOUT, || {
        last = site.check(Some(here)).err().map(|error| error.to_string()).unwrap_or_default();
        Ok(last.is_empty())
    });
    agree.with_context(|| last)?;
    Ok(began.elapsed())
}

/// Removes the VM, and waits until no host has anything of it.
fn remove_vm(site: &Site, here: &str) -> Result<()> {
    site.of(here).done(&["vm", "stop", VM, "--force"])?;
    site.of(here).done(&["vm", "rm", VM])?;
    let mut last = String::new();
    let empty = wait_until("nothing of the VM is left", TIMEOUT, || {
        last = site.check(None).err().map(|error| error.to_string()).unwrap_or_default();
        Ok(last.is_empty())
    });
    empty.with_context(|| last)
}

impl Cell<'_> {
    /// Runs the step, kills the process in the middle, and repeats the step until it is done.
    /// Returns the VM's host, and whether the process died: the step may be over sooner.
    fn run(&self) -> Result<(&'static str, bool)> {
        let Self { site, victim, .. } = self;
        let before = match self.step {
            // The console of a VM that was removed may still be there.
            Step::Create => Before::Nothing(site.of(self.here).starts(VM).unwrap_or_default()),
            _ => Before::Runs(site.of(self.here).ticks(VM)?, site.of(self.here).starts(VM)?),
        };
        // A VM grows in milliseconds: a search for the process then may take longer.
        let known = if self.step == Step::Grow { Some(self.process()?) } else { None };
        let size = recorded_size(self.site.of(self.here));
        let mut command = self.begin()?;
        let process = self.wait_for_the_moment(&mut command, known, &size)?;
        process.map_or(Ok(()), end)?;
        site.start_agents()?;
        let output = ended(command)?;
        let is = self.finish()?;
        if matches!(victim, SupervisorHere | SupervisorThere) {
            wait_until("the agent has started another supervisor", TIMEOUT, || {
                Ok(site.of(is).supervisor().is_ok())
            })?;
        }
        let took = settled(site, is)?;
        self.went_on(&before, is, output.status.success())?;
        let end = if output.status.success() { "done" } else { "failed at first" };
        let died = if process.is_some() { "died" } else { "lives, the step was over" };
        step(&format!("{:?}: {victim:?} {died}, {end}; agreed in {took:.1?}", self.step));
        Ok((is, process.is_some()))
    }

    /// Checks that the guest did not start again: its ticks went on, and it began where it was
    /// before. A new guest began once; or twice, if the command that started it has failed, and
    /// took it back.
    fn went_on(&self, before: &Before, is: &'static str, was_done: bool) -> Result<()> {
        let (ticks, starts) = (self.site.of(is).ticks(VM)?, self.site.of(is).starts(VM)?);
        match before {
            Before::Nothing(earlier) => {
                let new: Vec<_> = starts.iter().filter(|at| !earlier.contains(at)).collect();
                let most = if was_done { 1 } else { 2 };
                ensure!((1..=most).contains(&new.len()), "the new guest began at {new:?}");
            }
            Before::Runs(before, began) => {
                let none = Vec::new();
                let expected = if is == self.here { began } else { &none };
                ensure!(starts == *expected, "the guest began again: {expected:?}, {starts:?}");
                ensure!(ticks[0] > before[0], "the guest went back: {before:?}, {ticks:?}");
            }
        }
        Ok(())
    }

    /// The size in bytes that a cell gives the VM.
    fn size(&self) -> String {
        (if self.number.is_multiple_of(2) { 448_u64 } else { 576 } << 20).to_string()
    }

    fn begin(&self) -> Result<Child> {
        match self.step {
            Step::Create => {
                let words = self.site.creation()?;
                self.site.of(self.here).begin(&words.iter().map(String::as_str).collect::<Vec<_>>())
            }
            Step::Grow => {
                self.site.of(self.here).begin(&["vm", "resize", VM, "--memory", &self.size()])
            }
            Step::Recall => self.site.of(self.lender).begin(&["host", "drain", "--timeout", "60s"]),
            Step::Drain => self.site.of(self.here).begin(&["host", "drain", "--timeout", "60s"]),
        }
    }

    /// Returns whether the step is in its middle.
    fn is_in_the_middle(&self, size_before: &str) -> bool {
        let (here, there) = (self.site.of(self.here), self.site.of(self.there));
        match self.step {
            Step::Create => self.site.lender().is_some(),
            Step::Grow => recorded_size(here) != size_before,
            Step::Recall => self.site.recalls(self.lender),
            Step::Drain => there.vm_state(VM) != "none",
        }
    }

    /// Waits for the middle of the step, and returns the process that is to die: the known one, if
    /// there is one. Returns `None` if the step was over sooner.
    fn wait_for_the_moment(
        &self,
        command: &mut Child,
        known: Option<u32>,
        size_before: &str,
    ) -> Result<Option<u32>> {
        let (mut is_middle, deadline) = (false, Instant::now() + TIMEOUT);
        loop {
            is_middle = is_middle || self.is_in_the_middle(size_before);
            // The destination's processes come one after the other.
            let process = if is_middle { known.or_else(|| self.process().ok()) } else { None };
            if command.try_wait()?.is_some() {
                return Ok(None);
            }
            if process.is_some() {
                return Ok(process);
            }
            ensure!(Instant::now() < deadline, "the step neither begins nor ends");
            // The middle is short: the usual wait between two looks may miss it.
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn process(&self) -> Result<u32> {
        let site = self.site;
        let other = LENDERS.into_iter().find(|name| *name != self.lender);
        match self.victim {
            AgentHere => site.agent(self.here),
            AgentThere => site.agent(self.there),
            // `vm create` chooses its lender.
            Lender => site.agent(site.lender().unwrap_or(self.lender)),
            OtherLender => site.agent(other.context("there is one lender")?),
            Signer => site.agent(SIGNER),
            EngineHere => site.of(self.here).engine(VM),
            EngineThere => site.of(self.there).engine(VM),
            SupervisorHere => site.of(self.here).supervisor(),
            SupervisorThere => site.of(self.there).supervisor(),
        }
    }

    /// Completes the step as an operator would; returns the VM's host.
    fn finish(&self) -> Result<&'static str> {
        let Self { site, here, there, lender, .. } = *self;
        match self.step {
            Step::Create => {
                let host = site.of(here);
                if !host.ask(&["vm", "show", VM])?.status.success() {
                    let words = site.creation()?;
                    host.done(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
                } else if host.vm_state(VM) != "running" {
                    // The command wrote the definition, and failed to start the VM.
                    host.done(&["vm", "start", VM])?;
                }
                self.runs_on(&[here])
            }
            Step::Grow => {
                let resized =
                    site.of(here).done(&["vm", "resize", VM, "--memory", &self.size()])?;
                let reached = resized["reached"].to_string();
                ensure!(reached == self.size(), "{resized}");
                Ok(here)
            }
            Step::Recall => {
                drain(site.of(lender))?;
                ensure!(site.status(lender)?.loans.lent.is_empty(), "{lender} still lends");
                site.of(lender).done(&["host", "undrain"])?;
                Ok(here)
            }
            Step::Drain => {
                let is = self.runs_on(&[here, there])?;
                site.of(is).done(&["vm", "resume", VM])?;
                drain(site.of(here))?;
                let is = self.runs_on(&[there])?;
                site.of(here).done(&["host", "undrain"])?;
                Ok(is)
            }
        }
    }

    /// Waits until the VM runs on one of these hosts.
    fn runs_on(&self, hosts: &[&'static str]) -> Result<&'static str> {
        let running = || {
            let is_running = |host: &&&'static str| self.site.of(host).vm_state(VM) == "running";
            hosts.iter().filter(is_running).copied().collect::<Vec<_>>()
        };
        let mut found = Vec::new();
        wait_until("the VM runs", TIMEOUT, || {
            found = running();
            Ok(!found.is_empty())
        })?;
        match found[..] {
            [host] => Ok(host),
            _ => bail!("the VM runs on {found:?}"),
        }
    }
}

fn drain(host: &Host) -> Result<()> {
    let drained = host.ask(&["host", "drain", "--timeout", "120s"])?;
    ensure!(drained.status.success(), "{}", String::from_utf8_lossy(&drained.stderr));
    Ok(())
}

/// Kills a process, and waits until it is dead with all of its threads.
fn end(process: u32) -> Result<()> {
    kill(process, Signal::KILL)?;
    wait_until("the process is dead", TIMEOUT, || {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let is_dead = stat.rsplit(") ").next().is_none_or(|rest| !rest.starts_with(ALIVE));
        let threads = fs::read_dir(format!("/proc/{process}/task")).map_or(0, Iterator::count);
        Ok(is_dead && threads <= 1)
    })
}

/// The letters of states of processes that are not dead (proc_pid_stat(5)).
const ALIVE: [char; 6] = ['R', 'S', 'D', 'T', 't', 'I'];

fn recorded_size(host: &Host) -> String {
    // The budget of the host's VMs. A command would take longer than the VM takes to grow.
    let budget = fs::read_to_string(host.state().join("guests.json")).unwrap_or_default();
    let budget: serde_json::Value = serde_json::from_str(&budget).unwrap_or_default();
    budget["vms"][VM].to_string()
}
