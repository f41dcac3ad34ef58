//! The commands that start VMs: processes of their own, which outlive the agent.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use aquifer_page::RegionName;
use aquifer_vm::process::Files;

use crate::config::Config;

/// How long a command may take; each of its steps ends by itself much earlier.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Commands in progress, by VM.
#[derive(Debug)]
pub(super) struct Starting {
    exe: PathBuf,
    run_dir: PathBuf,
    groups: PathBuf,
    /// Of this agent, which the command asks for memory.
    socket: PathBuf,
    commands: BTreeMap<RegionName, (Child, Instant)>,
}

impl Starting {
    pub(super) fn new(config: &Config, exe: &Path) -> Self {
        Self {
            exe: exe.to_owned(),
            run_dir: config.state.clone(),
            groups: config.groups.agreements.clone(),
            socket: config.socket.clone(),
            commands: BTreeMap::new(),
        }
    }

    pub(super) fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    pub(super) fn files(&self, name: &RegionName) -> Files {
        Files::new(&self.run_dir, name)
    }

    /// Returns the file for what the command reports. A pipe would break when the agent ends.
    fn report(&self, name: &RegionName) -> PathBuf {
        self.run_dir.join("vms").join(format!(".{name}.start"))
    }

    /// Starts a VM by the definition in `dir`, unless an operator has stopped it meanwhile.
    pub(super) fn start(&mut self, name: &RegionName, dir: &Path) -> io::Result<()> {
        let report = self.report(name);
        report.parent().map_or(Ok(()), fs::create_dir_all)?;
        let mut command = Command::new(&self.exe);
        command.arg("--run-dir").arg(&self.run_dir).args(["vm", "start", "--if-wanted"]);
        command.arg("--vm-dir").arg(dir).arg(name.as_str());
        command.env("AQUIFER_GROUPS", &self.groups).env("AQUIFER_SOCKET", &self.socket);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(report)?);
        self.commands.insert(name.clone(), (command.spawn()?, Instant::now()));
        Ok(())
    }

    /// Returns the commands that have ended since the last call, each with the reason if it failed.
    pub(super) fn ended(&mut self) -> Vec<(RegionName, Result<(), String>)> {
        let mut ended = Vec::new();
        for (name, (command, since)) in &mut self.commands {
            match command.try_wait() {
                Ok(Some(status)) => ended.push((name.clone(), Ok(status))),
                Ok(None) if since.elapsed() > TIMEOUT => {
                    // The next attempt removes what this one leaves.
                    let _ = command.kill();
                    let _ = command.wait();
                    let why = format!("'aquifer vm start' took longer than {TIMEOUT:?}");
                    ended.push((name.clone(), Err(why)));
                }
                Ok(None) => {}
                Err(error) => ended.push((name.clone(), Err(error.to_string()))),
            }
        }
        self.commands.retain(|name, _| ended.iter().all(|(gone, _)| gone != name));
        let outcome = |(name, end): (RegionName, Result<ExitStatus, String>)| {
            let outcome = end.and_then(|status| self.outcome(&name, status));
            (name, outcome)
        };
        ended.into_iter().map(outcome).collect()
    }

    fn outcome(&self, name: &RegionName, status: ExitStatus) -> Result<(), String> {
        let report = self.report(name);
        let said = fs::read_to_string(&report).unwrap_or_default();
        // A failure only leaves a small file.
        let _ = fs::remove_file(&report);
        let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
        let said = said.trim_start_matches("aquifer: ");
        match status.success() {
            true => Ok(()),
            false if said.is_empty() => Err(format!("'aquifer vm start' ended with {status}")),
            false => Err(said.to_owned()),
        }
    }
}
