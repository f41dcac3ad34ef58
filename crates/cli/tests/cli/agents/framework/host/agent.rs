//! The process of a host's agent: its start, its death, and its end with all that it made.

use std::fs;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use aquifer_api::status::Volume;
use aquifer_hosts::daemon::AGENT;
use rustix::process::{Pid, Signal, kill_process};

use super::Host;
use crate::agents::framework::{Answer, STEP_TIMEOUT, wait_for, wait_until};

impl Host {
    /// Starts the host's agent.
    pub fn start(&self) {
        self.host.start(|command| _ = command.env_remove("AQUIFER_LOG")).unwrap();
    }

    /// Waits until the agent answers and has its first reading of memory.
    #[track_caller]
    pub fn wait_until_ready(&self) {
        wait_until(&format!("the agent of {} answers", self.name()), || {
            self.is_ready().unwrap_or_else(|error| panic!("{error}"))
        });
    }

    /// Starts the agent again, and waits until it is ready.
    #[track_caller]
    pub fn restart(&self) {
        self.start();
        self.wait_until_ready();
    }

    /// Runs an agent that cannot start, and returns its error; it must end soon.
    #[track_caller]
    pub fn refusal(&self) -> Answer {
        Answer::of(self.aquifer(AGENT).arg("--config").arg(self.config()))
    }

    /// Kills the agent, as a crash would.
    pub fn kill_agent(&self) {
        self.signal_agent(Signal::KILL);
    }

    /// Ends the agent by a signal and waits for its end.
    #[track_caller]
    pub fn signal_agent(&self, signal: Signal) -> ExitStatus {
        self.signal(signal).unwrap();
        wait_for("the agent ends", || self.ended())
    }

    /// Ends every program on this host.
    pub(in crate::agents::framework) fn end_loads(&self) {
        let _ = self.cgroup.kill_all();
    }

    /// Ends the agent, which gives back borrowed memory, and removes any remains.
    pub(in crate::agents::framework) fn end(&self) {
        if self.pid().is_none() && self.has_volumes() {
            // A new agent takes over the volumes of the dead one.
            self.start();
            holds_in_time(|| self.try_status().is_some());
        }
        let volumes = self.try_status().map(|status| status.loans.borrowed).unwrap_or_default();
        self.host.end(STEP_TIMEOUT);
        for Volume { pid, device, .. } in volumes {
            // The process of a returned volume is about to end.
            if holds_in_time(|| !lives(pid)) {
                continue;
            }
            let name = self.name();
            eprintln!("{name}: the volume of process {pid:?} on {device} is left over");
            let _ = kill_process(process(pid), Signal::KILL);
            let _ = Command::new("swapoff").arg(&device).status();
        }
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
