//! Processes that end with their demo.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_cli::sys;
use aquifer_hosts::{Binary, Error, Export, Host, Network};
use aquifer_page::{Bytes, EXTENT_SIZE};
use rustix::process::{Pid, Signal, kill_process};

use super::wait::Wait;
use super::{program, stores};

/// How long a process may take to end after SIGTERM.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long an agent may take until it answers.
const STARTING: Duration = Duration::from_secs(20);

/// A process that ends with this one.
#[derive(Debug)]
pub struct Process(Child);

impl Process {
    /// Starts the process; `what` names it in an error.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(command: &mut Command, what: &str) -> Result<Self> {
        end_with_this(command);
        command.spawn().map(Self).or_fail(|| format!("starting {what}"))
    }

    /// Takes the pipe from its standard output; `None` if there is no pipe, or at a second call.
    pub fn output(&mut self) -> Option<ChildStdout> {
        self.0.stdout.take()
    }

    /// Returns the exit status as text; `None` while the process runs.
    pub fn ended(&mut self) -> Option<String> {
        self.0.try_wait().ok().flatten().map(|status| status.to_string())
    }
}

impl Drop for Process {
    /// Sends SIGTERM first: a service that ends by itself leaves nothing.
    fn drop(&mut self) {
        let asked = kill_process(Pid::from_child(&self.0), Signal::TERM);
        let deadline = Instant::now() + TIMEOUT;
        while asked.is_ok() && matches!(self.0.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        // A failure means that the process has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Makes a process end with this one. A signal from the terminal must reach the demo only, which
/// ends its processes in order.
pub(crate) fn end_with_this(command: &mut Command) {
    sys::signal_with_parent(command, Signal::KILL);
    command.process_group(0);
}

/// Returns the socket of the lender of a demo in `dir`.
pub fn lender_socket(dir: &Path) -> PathBuf {
    dir.join("lender")
}

/// Starts an exporting process on this machine, with files in `dir`, and waits until it listens.
///
/// # Errors
/// If it cannot be started, or ends at once.
pub fn lender(dir: &Path, size: Bytes) -> Result<Export> {
    let mut command = Export::command(&Binary::new(program::aquifer()?), dir);
    command.arg(Bytes(size.0.next_multiple_of(EXTENT_SIZE)).to_string());
    command.arg("--nbd").arg(format!("unix:{}", lender_socket(dir).display()));
    // A killed lender leaves its pages. In this directory the demo's cleanup finds them.
    command.arg("--dir").arg(stores(dir).join("lender"));
    end_with_this(&mut command);
    Export::start(&mut command).map_err(failure)
}

/// Admits the hosts `a` and `b` of a demo with files in `dir`; their agents do not run yet.
///
/// # Errors
/// If their files cannot be written.
pub fn hosts(network: &Network, dir: &Path) -> Result<Vec<Host>> {
    let aquifer = Binary::new(program::aquifer()?);
    Host::admit_to(network, &aquifer, dir, &stores(dir)).map_err(failure)
}

/// Waits until the agent of a host answers.
///
/// # Errors
/// If it ends, or does not answer in time.
pub(crate) fn wait_until_ready(host: &Host, wait: Wait<'_>) -> Result<()> {
    let what = format!("starting the agent of host {}", host.name());
    wait.until(&what, STARTING, || Ok(host.is_ready().map_err(failure)?.then_some(())))
}

/// Returns a failed step with hosts as the failure of a demo.
pub(crate) fn failure(Error { what, why, help }: Error) -> Failure {
    Failure { what, why, help: help.map(str::to_owned) }
}
