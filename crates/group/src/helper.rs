//! A process that an agent keeps for a group: a scanner, or a disk cache.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::agreement::Agreements;

/// The pause before a process that failed starts again: at first, and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// What all helpers of a host need.
#[derive(Debug)]
pub(crate) struct Programs {
    /// The program `aquifer`.
    exe: PathBuf,
    /// The directory with the files of the host's processes.
    pub(crate) run_dir: PathBuf,
    pub(crate) agreements: Agreements,
}

impl Programs {
    pub(crate) fn new(exe: &Path, run_dir: &Path, agreements: Agreements) -> Self {
        Self { exe: exe.to_owned(), run_dir: run_dir.to_owned(), agreements }
    }

    /// Returns the command `aquifer WORDS`, in a process group of its own: a signal to the agent's
    /// does not reach it.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.exe);
        command.arg("--run-dir").arg(&self.run_dir).args(words);
        command.env("AQUIFER_GROUPS", self.agreements.directory()).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }
}

/// The process, if this agent started one, and the pause after the latest failure. The pause
/// doubles until a process lives for a minute.
#[derive(Debug, Default)]
pub(crate) struct Helper {
    child: Option<(Child, Instant)>,
    pause: Option<(Duration, Instant)>,
}

/// The end of a helper's process.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) pid: u32,
    /// How long it lived.
    pub(crate) lived: Duration,
    /// Its status; `None` if the kernel does not tell.
    pub(crate) status: Option<ExitStatus>,
}

impl Helper {
    /// Returns whether a process that this agent started runs.
    pub(crate) fn runs(&self) -> bool {
        self.child.is_some()
    }

    /// Returns whether this is the process that this agent started.
    pub(crate) fn is(&self, pid: Pid) -> bool {
        self.child.as_ref().is_some_and(|(child, _)| is(child.id(), pid))
    }

    /// Returns whether none runs, and the pause is over.
    pub(crate) fn may_start(&self) -> bool {
        !self.runs() && self.pause.is_none_or(|(_, until)| Instant::now() >= until)
    }

    /// Starts a process; returns its id. A failure begins a pause.
    pub(crate) fn start(&mut self, start: impl FnOnce() -> io::Result<Child>) -> io::Result<u32> {
        let child = start().inspect_err(|_| _ = self.fail(Duration::ZERO))?;
        let pid = child.id();
        self.child = Some((child, Instant::now()));
        Ok(pid)
    }

    /// Takes note of the end of the process.
    pub(crate) fn reap(&mut self) -> Option<End> {
        let (child, since) = self.child.as_mut()?;
        let (pid, lived) = (child.id(), since.elapsed());
        let status = match child.try_wait() {
            Ok(None) => return None,
            Ok(status) => status,
            Err(error) => {
                tracing::warn!("cannot wait for process {pid}: {error}");
                None
            }
        };
        self.child = None;
        Some(End { pid, lived, status })
    }

    /// Begins the pause after a process that lived for so long, and returns it.
    pub(crate) fn fail(&mut self, lived: Duration) -> Duration {
        let pause = match self.pause {
            Some((last, _)) if lived < LONGEST_PAUSE => (last * 2).min(LONGEST_PAUSE),
            _ => FIRST_PAUSE,
        };
        self.pause = Some((pause, Instant::now() + pause));
        pause
    }

    /// Begins a pause without a failure.
    pub(crate) fn hold(&mut self, pause: Duration) {
        self.pause = Some((FIRST_PAUSE, Instant::now() + pause));
    }

    /// Forgets earlier failures.
    pub(crate) fn forget_failures(&mut self) {
        self.pause = None;
    }
}

impl End {
    /// Returns whether it was this process.
    pub(crate) fn is_of(&self, pid: Pid) -> bool {
        is(self.pid, pid)
    }

    /// Returns whether the process succeeded.
    pub(crate) fn is_success(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }
}

fn is(id: u32, pid: Pid) -> bool {
    i32::try_from(id).is_ok_and(|id| id == pid.as_raw_nonzero().get())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    #[test]
    fn pauses_grow_until_a_process_lives() {
        let mut helper = Helper::default();
        assert!(helper.may_start());
        let pauses: Vec<_> = (0..8).map(|_| helper.fail(Duration::ZERO).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert!(!helper.may_start());
        assert_eq!(helper.fail(LONGEST_PAUSE), FIRST_PAUSE);
        helper.forget_failures();
        assert!(helper.may_start());
    }

    #[test]
    fn a_helper_knows_its_process_and_how_it_ended() {
        let mut helper = Helper::default();
        assert!(helper.reap().is_none());
        let pid = helper.start(|| Command::new("false").spawn()).unwrap();
        let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        assert!(helper.is(pid) && helper.runs() && !helper.may_start());
        let ends_by = Instant::now() + Duration::from_secs(60);
        let end = loop {
            if let Some(end) = helper.reap() {
                break end;
            }
            assert!(Instant::now() < ends_by);
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(end.is_of(pid) && !end.is_success() && !helper.is(pid) && helper.may_start());
        assert!(helper.start(|| Command::new("/no/program").spawn()).is_err());
        assert!(!helper.may_start(), "a failure to start begins a pause");
    }
}
