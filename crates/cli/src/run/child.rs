//! A command run as if the shell had run it: signals reach it, its exit code comes back, the terminal is its own.

use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::signal::{
    SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH,
};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::raw::WithRawSiginfo;

/// Signals that are the command's business.
const FORWARDED: [i32; 7] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH];

/// Those of them that ask the command to end; before it has started they end what prepares it.
const ENDING: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];

/// Takes this program's signals from the moment it is made, so that none can end it between making something and
/// removing it again.
pub struct Supervisor {
    signals: SignalsInfo<WithRawSiginfo>,
}

impl Supervisor {
    /// Begins to take the signals. One that this program was started to ignore (nohup) stays ignored, by the command too.
    ///
    /// # Errors
    /// If the kernel refuses a handler.
    pub fn new() -> io::Result<Self> {
        let ignored = ignored()?;
        let heeded = FORWARDED.iter().filter(|signal| ignored & (1 << (**signal - 1)) == 0);
        Ok(Self { signals: SignalsInfo::new(heeded.chain(&[SIGCHLD]))? })
    }

    /// The signal that asked this program to end since this was asked last.
    pub fn asked_to_end(&mut self) -> Option<i32> {
        self.signals.pending().map(|info| info.si_signo).find(|signal| ENDING.contains(signal))
    }

    /// Runs the command to its end and hands on to it every signal that this program gets meanwhile.
    ///
    /// The command stays in this program's process group: it has the terminal as if this program were not there, and ^Z
    /// stops both. A signal that the terminal made (^C) has reached it already and is not sent again.
    ///
    /// # Errors
    /// If the command cannot be started.
    pub fn run(&mut self, command: &mut Command) -> io::Result<ExitStatus> {
        let mut child = command.spawn()?;
        loop {
            // It may have ended before the wait begins; its SIGCHLD is then pending and ends the wait at once.
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            for info in self.signals.wait() {
                if info.si_signo != SIGCHLD && info.si_code != libc::SI_KERNEL {
                    forward(&child, info.si_signo);
                }
            }
        }
    }
}

impl std::fmt::Debug for Supervisor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Supervisor").finish_non_exhaustive()
    }
}

/// Sends a signal to the command. It has not been waited for since it was last seen alive, so its id is still its own.
fn forward(child: &Child, signal: i32) {
    if let Some(signal) = Signal::from_named_raw(signal) {
        // One that has just ended needs no signal.
        let _ = kill_process(Pid::from_child(child), signal);
    }
}

/// The signals this program was started to ignore, one bit each as in /proc/self/status.
fn ignored() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    Ok(mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0))
}

/// The exit code that stands for a command's end, as shells have it: its own, or 128 and the signal that killed it.
pub fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}
