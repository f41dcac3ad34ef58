//! A command run as if the shell had run it, with its signals, its exit code and the terminal.

use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus};

use aquifer_procfs::process::ignored_signals;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::signal::{
    SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH,
};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::raw::WithRawSiginfo;

/// Signals that are forwarded to the command.
const FORWARDED: [i32; 7] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH];

/// Forwarded signals that ask the command to end; before its start they end the preparation.
const ENDING: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];

/// A handler of this program's signals. While it lives, no signal can end the program between the
/// making of something and its removal.
pub struct Supervisor {
    signals: SignalsInfo<WithRawSiginfo>,
}

impl Supervisor {
    /// Takes over the signals. One that this program inherited as ignored (nohup) stays ignored,
    /// also for the command.
    ///
    /// # Errors
    /// If the kernel refuses a handler.
    pub fn new() -> io::Result<Self> {
        let ignored = ignored_signals()?;
        let heeded = FORWARDED.iter().filter(|signal| ignored & (1 << (**signal - 1)) == 0);
        Ok(Self { signals: SignalsInfo::new(heeded.chain(&[SIGCHLD]))? })
    }

    /// Returns a signal that asked this program to end since the last call.
    pub fn asked_to_end(&mut self) -> Option<i32> {
        self.signals.pending().map(|info| info.si_signo).find(|signal| ENDING.contains(signal))
    }

    /// Runs the command to its end and forwards the signals that this program gets.
    ///
    /// The command stays in this program's process group, so it has the terminal, and ^Z stops
    /// both. A signal that the terminal sent (^C) has reached the command already and is not
    /// forwarded.
    ///
    /// # Errors
    /// If the command cannot be started.
    pub fn run(&mut self, command: &mut Command) -> io::Result<ExitStatus> {
        let mut child = command.spawn()?;
        loop {
            // The command may end before the wait. Its SIGCHLD is then pending and ends the wait.
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

/// Sends a signal to the command. Its id is still its own, as it has not been waited for since it
/// was last seen alive.
fn forward(child: &Child, signal: i32) {
    if let Some(signal) = Signal::from_named_raw(signal) {
        // A failure means that the command has just ended.
        let _ = kill_process(Pid::from_child(child), signal);
    }
}

/// Returns the exit code of an ended command as shells do: its own, or 128 plus its signal.
pub fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}
