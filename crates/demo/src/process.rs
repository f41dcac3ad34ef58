//! Processes that end with their demo.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_cli::sys;
use aquifer_page::{Bytes, EXTENT_SIZE};
use rustix::process::{Pid, Signal, kill_process};

use super::netns::Namespace;
use super::program;
use super::stores;

/// How long a process may take to end after SIGTERM.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A process that ends with this one.
#[derive(Debug)]
pub struct Process(Child);

impl Process {
    /// Starts the process; `what` names it in an error.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(command: &mut Command, what: &str) -> Result<Self> {
        sys::signal_with_parent(command, Signal::KILL);
        // A signal from the terminal must reach the demo only, which ends its processes in order.
        command.process_group(0);
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
    /// Sends SIGTERM first: a lender that ends by itself removes its pages.
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

/// Returns the socket of the lender of a demo in `dir`.
pub fn lender_socket(dir: &Path) -> PathBuf {
    dir.join("lender")
}

/// Starts an exporting process on this machine, with files in `dir`, and waits until it listens.
///
/// # Errors
/// If it cannot be started, or ends at once.
pub fn lender(dir: &Path, size: Bytes) -> Result<Process> {
    let what = "starting a lender";
    let mut command = Command::new(program::aquifer()?);
    let room = Bytes(size.0.next_multiple_of(EXTENT_SIZE)).to_string();
    command
        .args(["--json", "serve", "export", "--size", &room, "--nbd"])
        .arg(format!("unix:{}", lender_socket(dir).display()));
    // A killed lender leaves its pages. In this directory the demo's cleanup finds them.
    command.arg("--dir").arg(stores(dir).join("lender"));
    command.env("AQUIFER_RUN_DIR", dir).stdout(Stdio::piped());
    let mut lender = Process::start(&mut command, "a lender")?;
    let mut line = String::new();
    let output = lender.output().ok_or_else(|| Failure::new(what, "it has no output"))?;
    BufReader::new(output).read_line(&mut line).or_fail(|| what)?;
    if line.is_empty() { Err(Failure::new(what, "it ended at once")) } else { Ok(lender) }
}

/// One of the two hosts of a demo.
#[derive(Debug)]
pub struct Site<'a> {
    /// Its name.
    pub name: &'a str,
    /// The demo's directory: the cluster's files are in `cluster`, the host's in a directory of its
    /// name.
    pub dir: &'a Path,
    /// Its network.
    pub namespace: &'a Namespace,
    /// The name and address of the other host.
    pub peer: (&'a str, Ipv4Addr),
}

impl Site<'_> {
    /// Returns the directory of the host's files.
    pub fn files(&self) -> PathBuf {
        self.dir.join(self.name)
    }

    /// Returns the directory of the pages that the host lends.
    pub fn store(&self) -> PathBuf {
        stores(self.dir).join(self.name)
    }

    /// Returns the command that starts its agent; `sections` is added to the configuration.
    ///
    /// # Errors
    /// If its files cannot be written, or the namespace is gone.
    pub fn agent(&self, sections: &str) -> Result<Command> {
        let Self { name, dir, namespace, peer: (peer, peer_address) } = self;
        let what = || format!("configuring the agent of host {name}");
        let files = self.files();
        fs::create_dir_all(&files).or_fail(what)?;
        let config = format!(
            r#"host = "{name}"
listen = "{address}:7070"
pages = "{address}:7071"
tls = "{cluster}/{name}/tls"
socket = "{files}/agent.sock"
state = "{files}"
store = "{store}"
{sections}
[[peer]]
name = "{peer}"
address = "{peer_address}:7070"
"#,
            address = namespace.address(),
            cluster = dir.join("cluster").display(),
            store = self.store().display(),
            files = files.display(),
        );
        let path = files.join("agent.toml");
        fs::write(&path, config).or_fail(what)?;
        let log = File::create(files.join("agent.log")).or_fail(what)?;
        let mut command = Command::new(program::aquifer()?);
        command.args(["serve", "agent"]).arg("--config").arg(path).stdin(Stdio::null());
        command.stdout(log.try_clone().or_fail(what)?).stderr(log);
        namespace.enter(&mut command)?;
        Ok(command)
    }
}
