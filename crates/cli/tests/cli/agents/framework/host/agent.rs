//! The process of a host's agent: its start, its death, and its end with all that it made.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_api::status::Volume;
use aquifer_page::Bytes;
use rustix::process::{Pid, Signal, kill_process};

use super::Host;
use crate::agents::framework::{STEP_TIMEOUT, wait_for, wait_until};

impl Host {
    fn agent(&self) -> MutexGuard<'_, Option<Child>> {
        self.agent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the host's agent.
    pub fn start(&self) {
        fs::create_dir_all(self.state()).unwrap();
        let log = File::options().create(true).append(true).open(self.log()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_aquifer"));
        command
            .args(["serve", "agent"])
            .arg("--config")
            .arg(self.config())
            .env_remove("AQUIFER_LOG");
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let before = self.agent().replace(command.spawn().unwrap());
        assert!(before.is_none(), "{} has an agent already", self.name);
    }

    /// Waits until the agent answers and has its first reading of memory.
    #[track_caller]
    pub fn wait_until_ready(&self) {
        wait_until(&format!("the agent of {} answers", self.name), || {
            let ended = self.agent().as_mut().and_then(|agent| agent.try_wait().unwrap());
            if let Some(status) = ended {
                panic!("the agent of {} ended with {status}", self.name);
            }
            self.try_status().is_some_and(|status| status.memory.total > Bytes::ZERO)
        });
    }

    /// Starts the agent again, and waits until it is ready.
    #[track_caller]
    pub fn restart(&self) {
        self.start();
        self.wait_until_ready();
    }

    /// Kills the agent, as a crash would.
    pub fn kill_agent(&self) {
        self.signal_agent(Signal::KILL);
    }

    /// Ends the agent by a signal and waits for its end.
    #[track_caller]
    pub fn signal_agent(&self, signal: Signal) -> ExitStatus {
        let mut agent = self.agent();
        let process = agent.as_mut().unwrap();
        kill_process(Pid::from_child(process), signal).unwrap();
        let status = wait_for("the agent ends", || process.try_wait().unwrap());
        *agent = None;
        status
    }

    /// Asks the agent to end, and does not wait.
    pub fn interrupt(&self) {
        let agent = self.agent();
        kill_process(Pid::from_child(agent.as_ref().unwrap()), Signal::INT).unwrap();
    }

    /// Returns the log of all the host's agents.
    pub fn log_text(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }

    fn log(&self) -> PathBuf {
        self.dir.join("agent.log")
    }

    /// Prints the last lines of the logs of the agent and its volumes.
    pub(in crate::agents::framework) fn show_logs(&self) {
        let volumes = fs::read_dir(self.state().join("volumes")).into_iter().flatten().flatten();
        let volumes = volumes
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|e| e == "log"));
        for log in [self.log()].into_iter().chain(volumes) {
            let text = fs::read_to_string(&log).unwrap_or_default();
            let lines: Vec<_> = text.lines().collect();
            eprintln!("--- {}: {}", self.name, log.display());
            lines[lines.len().saturating_sub(40)..].iter().for_each(|line| eprintln!("{line}"));
        }
    }

    /// Ends every program on this host.
    pub(in crate::agents::framework) fn end_loads(&self) {
        let _ = self.cgroup.kill_all();
    }

    /// Ends the agent, which gives back borrowed memory, and removes any remains.
    pub(in crate::agents::framework) fn end(&self) {
        if self.agent().is_none() && self.has_volumes() {
            // A new agent takes over the volumes of the dead one.
            self.start();
            holds_in_time(|| self.try_status().is_some());
        }
        let volumes = self.try_status().map(|status| status.borrowed).unwrap_or_default();
        if let Some(mut agent) = self.agent().take() {
            // On SIGINT, an agent that has only lent would wait until its borrowers, which may be
            // gone, have room elsewhere.
            let signal = if volumes.is_empty() { Signal::TERM } else { Signal::INT };
            let _ = kill_process(Pid::from_child(&agent), signal);
            if !holds_in_time(|| !matches!(agent.try_wait(), Ok(None))) {
                // A second signal ends an agent that waits for a borrower that is gone.
                let _ = kill_process(Pid::from_child(&agent), Signal::INT);
                holds_in_time(|| !matches!(agent.try_wait(), Ok(None)));
            }
            let _ = agent.kill();
            let _ = agent.wait();
        }
        for Volume { pid, device, .. } in volumes {
            // The process of a returned volume is about to end.
            if holds_in_time(|| !lives(pid)) {
                continue;
            }
            eprintln!("{}: the volume of process {pid:?} on {device} is left over", self.name);
            let _ = kill_process(process(pid), Signal::KILL);
            let _ = Command::new("swapoff").arg(&device).status();
        }
        let _ = fs::remove_dir_all(&self.store);
        let _ = self.store.parent().map(fs::remove_dir);
    }
}

/// Waits for `condition` for at most [`STEP_TIMEOUT`]; returns whether it holds.
fn holds_in_time(mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + STEP_TIMEOUT;
    while !condition() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Returns the process of a volume from the API's number.
pub fn process(pid: Option<u32>) -> Pid {
    Pid::from_raw(pid.unwrap().cast_signed()).unwrap()
}

/// Returns whether the process of a volume lives; a zombie does not.
pub fn lives(pid: Option<u32>) -> bool {
    let pid = process(pid).as_raw_pid();
    // The name before the state may contain anything, but ends with the last parenthesis.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
}
