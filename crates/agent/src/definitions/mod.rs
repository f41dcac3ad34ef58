//! The start of this host's defined VMs: after a boot, and again after failures.
//!
//! Module `restart` of the `control` crate decides. This module looks at the VMs once a period, and
//! runs `aquifer vm start` for those that are to start. That command holds the definition's lock,
//! so that neither another command nor a migration changes the VM meanwhile. All VMs, defined or
//! not, get another supervisor if theirs dies.

mod starting;
mod supervising;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use aquifer_api::status::EventKind;
use aquifer_control::restart::{Look, Restarts, Seen, Step};
use aquifer_page::RegionName;
use aquifer_vm::definition::{Definition, DefinitionError, Definitions};
use aquifer_vm::process::{Ended, Files, NextStart, ended};
use tokio::runtime;

use crate::background::Background;
use crate::config::Config;
use crate::driver::{Command, Handle, Journal};
use crate::events::Events;
use starting::Starting;
use supervising::Supervising;

/// The defined VMs of this host, and the commands that start some of them.
#[derive(Debug)]
pub(crate) struct Starter {
    definitions: Definitions,
    starting: Starting,
    supervising: Supervising,
    restarts: Restarts,
    began: Instant,
    events: Events,
    journal: Journal,
    /// The latest problem of each definition that cannot be read; empty for the directory's.
    problems: BTreeMap<String, String>,
    /// The driver, which knows whether this host drains.
    handle: Handle,
    runtime: runtime::Handle,
}

impl Starter {
    /// Makes a starter that has looked at no VM yet. Call this in a runtime.
    pub(crate) fn new(
        config: &Config,
        exe: &Path,
        (events, journal): (Events, Journal),
        handle: Handle,
    ) -> Self {
        Self {
            starting: Starting::new(config, exe),
            supervising: Supervising::new(config, exe.to_owned(), journal.clone()),
            definitions: Definitions::of(&config.vms.dir),
            restarts: Restarts::default(),
            began: Instant::now(),
            events,
            journal,
            problems: BTreeMap::new(),
            handle,
            runtime: runtime::Handle::current(),
        }
    }

    /// Starts the thread that starts VMs. Dropping the result leaves commands in progress to end
    /// by themselves.
    ///
    /// # Errors
    /// If the thread cannot start.
    pub(crate) fn start(self) -> io::Result<Background> {
        Background::start("vm-starts", self, Self::step)
    }

    /// Returns whether this host drains. An agent that ends starts nothing more, either.
    fn drains(&self) -> bool {
        let admits = self.handle.ask(|reply| Command::AdmitsVms { reply });
        !self.runtime.block_on(admits).unwrap_or(false)
    }

    fn step(&mut self) {
        self.supervising.step();
        self.reap();
        // A record that cannot be read is no reason to start nothing: all is as after a boot.
        let ends = ended(self.starting.run_dir(), SystemTime::UNIX_EPOCH).unwrap_or_default();
        let looks = match self.look(&ends) {
            Ok(looks) => looks,
            Err(error) => return self.note_problem("", error.to_string()),
        };
        self.problems.remove("");
        let drains = !looks.is_empty() && self.drains();
        for (name, step) in self.restarts.step(self.began.elapsed(), &looks, drains) {
            match step {
                Step::Start => self.begin(&name),
                Step::Wait(delay) => {
                    let last = ends.iter().rfind(|ended| ended.name == name);
                    let why = last.map_or("it ended".to_owned(), |ended| ended.cause.to_string());
                    self.wait(&name, delay, &why);
                }
                Step::Rest => self.rest(&name),
            }
        }
    }

    /// Tells when the VM starts again: in the log, to `aquifer why`, and to `aquifer vm show`.
    fn wait(&self, name: &RegionName, delay: Duration, why: &str) {
        let shown = humantime::format_duration(delay);
        tracing::info!(vm = %name, "the VM starts again in {shown}: {why}");
        self.journal.decided_about(name, format!("starts VM {name} again in {shown}: {why}"));
        let next = NextStart::new(SystemTime::now() + delay, why);
        if let Err(error) = self.starting.files(name).plan_start(&next) {
            tracing::warn!(vm = %name, "cannot record when the VM starts again: {error}");
        }
    }

    /// Looks at each VM that has a sound definition.
    fn look(&mut self, ends: &[Ended]) -> Result<BTreeMap<RegionName, Look>, DefinitionError> {
        let each = self.definitions.each()?;
        self.problems.retain(|name, _| each.iter().any(|(known, _)| known.as_str() == name));
        if each.is_empty() {
            return Ok(BTreeMap::new());
        }
        let mut looks = BTreeMap::new();
        for (name, definition) in each {
            let definition = match definition {
                Ok(definition) => definition,
                Err(error) => {
                    self.note_problem(name.as_str(), error.to_string());
                    continue;
                }
            };
            self.problems.remove(name.as_str());
            let files = self.starting.files(&name);
            let seen = match self.definitions.is_held(&name) {
                true => Seen::Busy,
                false if definition.elsewhere.is_some() => self.unmark(&definition, &files),
                false => files.look(ends),
            };
            let Definition { restart: policy, autostart, .. } = definition;
            looks.insert(name, Look { policy, autostart, seen });
        }
        Ok(looks)
    }

    /// Removes the mark of a VM that another host may own if the VM is here after all: its
    /// supervisor died before it could do that.
    fn unmark(&self, definition: &Definition, files: &Files) -> Seen {
        let settled = self.definitions.hold(&definition.name).and_then(|held| held.settle(files));
        if let Err(error) = settled {
            tracing::warn!(vm = %definition.name, "cannot unmark the definition: {error}");
        }
        Seen::Rests
    }

    fn note_problem(&mut self, name: &str, why: String) {
        if self.problems.get(name) == Some(&why) {
            return;
        }
        let subject = if name.is_empty() { "all VMs" } else { name };
        self.events.note(EventKind::VmNotStarted, subject, why.clone());
        self.problems.insert(name.to_owned(), why);
    }

    fn begin(&mut self, name: &RegionName) {
        tracing::info!(vm = %name, "starting the VM by its definition");
        if let Err(error) = self.starting.start(name, self.definitions.dir()) {
            self.failed(name, &format!("cannot run 'aquifer vm start': {error}"));
        }
    }

    /// Takes note of the commands that have ended.
    fn reap(&mut self) {
        for (name, outcome) in self.starting.ended() {
            match outcome {
                Ok(()) => {
                    self.restarts.started(self.began.elapsed(), &name, true);
                    self.journal.decided_about(&name, format!("starts VM {name}"));
                }
                Err(why) => self.failed(&name, &why),
            }
        }
    }

    fn failed(&mut self, name: &RegionName, why: &str) {
        let Some(next) = self.restarts.started(self.began.elapsed(), name, false) else { return };
        self.wait(name, next, why);
        let next = humantime::format_duration(next);
        self.events.note(
            EventKind::VmNotStarted,
            name,
            format!("{why}; the agent tries again in {next}"),
        );
    }

    fn rest(&self, name: &RegionName) {
        let why = "the VM ended, and by its definition it does not restart";
        tracing::info!(vm = %name, "{why}");
        if let Err(error) = self.starting.files(name).rest(why) {
            tracing::warn!(vm = %name, "the next agent may start the VM: {error}");
        }
    }
}
