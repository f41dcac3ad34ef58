//! The services of the host, and their output.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_dedup::ScanReport;
use aquifer_group::balance::{BalanceRound, Balanced};
use aquifer_hosts::daemon::{GROUP_BALANCER, SCANNER};
use aquifer_page::{Bytes, lock};
use serde::de::DeserializeOwned;

use super::mapped::Mapped;
use super::report::Group;
use super::stage::{GROUPS, Stage};
use crate::process::Process;
use crate::program;

/// The running services; its drop ends them.
#[derive(Debug)]
pub(super) struct Watch {
    services: Vec<Service>,
    began: Instant,
    seen: Arc<Mutex<Seen>>,
    /// Events, with their time in seconds.
    pub(super) marks: Vec<(f64, &'static str)>,
}

#[derive(Debug)]
struct Service {
    name: String,
    process: Process,
    log: PathBuf,
}

/// The output of the services.
#[derive(Debug, Default)]
struct Seen {
    /// The step of each of the balancer's periods, with its time in seconds.
    turns: Vec<(f64, BalanceRound)>,
    /// The reports of each scanner.
    reports: [Vec<ScanReport>; 2],
}

impl Watch {
    /// Starts a scanner for each group, and the balancer.
    pub(super) fn start(stage: &Stage) -> Result<Self> {
        let (services, marks) = (Vec::new(), Vec::new());
        let mut watch = Self { services, began: Instant::now(), seen: Arc::default(), marks };
        for (index, group) in GROUPS.into_iter().enumerate() {
            let words = [SCANNER, &[group, "--report", "1s"]].concat();
            watch.serve(stage, &words, move |seen, _, report| seen.reports[index].push(report))?;
        }
        watch.serve(stage, GROUP_BALANCER, |seen, at, turn| seen.turns.push((at, turn)))?;
        Ok(watch)
    }

    /// Starts a service of groups, and passes each object that it prints to `note`.
    fn serve<T: DeserializeOwned>(
        &mut self,
        stage: &Stage,
        words: &[&str],
        note: impl Fn(&mut Seen, f64, T) + Send + 'static,
    ) -> Result<()> {
        let first = &words[..words.len().min(3)];
        let name = format!("aquifer {}", first.join(" "));
        let what = || format!("starting '{name}'");
        let log = stage.dir.join(first.join("-")).with_extension("log");
        let mut command = Command::new(program::aquifer()?);
        command.arg("--json").arg("--run-dir").arg(&stage.dir).args(words);
        command.arg("--groups").arg(stage.groups());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).or_fail(what)?);
        let mut process = Process::start(&mut command, &name)?;
        let output = process.output().ok_or_else(|| Failure::new(what(), "it has no output"))?;
        let (seen, began) = (self.seen.clone(), self.began);
        // The thread ends when the service closes its output.
        thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(std::result::Result::ok);
            for said in lines.filter_map(|line| serde_json::from_str(&line).ok()) {
                note(&mut lock(&seen), began.elapsed().as_secs_f64(), said);
            }
        });
        self.services.push(Service { name, process, log });
        Ok(())
    }

    /// Notes an event at the present time.
    pub(super) fn mark(&mut self, what: &'static str) {
        self.marks.push((self.began.elapsed().as_secs_f64(), what));
    }

    /// Fails if a service has ended.
    pub(super) fn check(&mut self) -> Result<()> {
        for Service { name, process, log } in &mut self.services {
            if let Some(end) = process.ended() {
                let log = fs::read_to_string(log).unwrap_or_default();
                return Err(Failure::new(format!("'{name}'"), log.lines().last().unwrap_or(&end)));
            }
        }
        Ok(())
    }

    /// Returns how many periods the balancer has finished.
    pub(super) fn turns(&self) -> usize {
        lock(&self.seen).turns.len()
    }

    /// Returns the step of the latest period.
    pub(super) fn last(&self) -> Option<BalanceRound> {
        lock(&self.seen).turns.last().map(|(_, turn)| turn.clone())
    }

    /// Returns all steps, with their times in seconds.
    pub(super) fn history(&self) -> Vec<(f64, BalanceRound)> {
        lock(&self.seen).turns.clone()
    }

    /// Returns the bytes that a guest swapped in each period from `from` on.
    pub(super) fn swapped(&self, vm: &str, from: usize) -> Vec<Bytes> {
        let seen = lock(&self.seen);
        seen.turns
            .iter()
            .skip(from)
            .filter_map(|(_, turn)| Some(found(turn, vm)?.swapped))
            .collect()
    }

    /// Returns the memory that a guest's balloon leaves it.
    pub(super) fn size(&self, vm: &str) -> Option<Bytes> {
        Some(found(&self.last()?, vm)?.size)
    }

    /// Returns the state of the groups in the latest period.
    pub(super) fn groups(&self, mapped: &[Mapped]) -> Result<Vec<Group>> {
        let what = || "looking at the groups";
        let turn = self
            .last()
            .ok_or_else(|| Failure::new(what(), "'aquifer serve reprovision' says nothing"))?;
        let seen = lock(&self.seen);
        let of = |(index, name): (usize, &str)| {
            let balanced = turn.groups.iter().find(|group| group.account.group.as_str() == name);
            let balanced =
                balanced.ok_or_else(|| Failure::new(what(), format!("group '{name}' is gone")))?;
            Ok(Group::new(balanced, &seen.turns, &seen.reports[index], mapped[index]))
        };
        GROUPS.into_iter().enumerate().map(of).collect()
    }
}

/// Finds a guest in a step of the balancer.
pub(super) fn found<'a>(
    turn: &'a BalanceRound,
    vm: &str,
) -> Option<&'a aquifer_group::balance::Vm> {
    let of = |group: &'a Balanced| group.vms.iter().find(|found| found.vm.as_str() == vm);
    turn.groups.iter().find_map(of)
}
