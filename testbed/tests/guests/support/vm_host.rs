//! Questions to a host of this machine about its VMs, which are busy with their memory.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use aquifer_hosts::Host;
use aquifer_page::Bytes;
use aquifer_testbed::{Parts, Spec, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{TIMEOUT, example};

/// A deadline for one command, which only a hang reaches. Moves of a busy VM take longest.
const COMMAND: Duration = Duration::from_secs(600);

/// A host that runs VMs.
pub trait VmHost {
    /// Returns the command `aquifer WORDS` on this host, with JSON as its output.
    fn json(&self, words: &[&str]) -> Result<Command>;
    /// Starts the agent of this host unless it runs.
    fn start_agent(&self) -> Result<()>;

    /// Begins a command.
    fn begin(&self, words: &[&str]) -> Result<Child> {
        let mut command = self.json(words)?;
        Ok(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
    }

    /// Runs a command, and returns its output.
    fn ask(&self, words: &[&str]) -> Result<Output> {
        let command = self.begin(words)?;
        ended(command).with_context(|| format!("'aquifer {}'", words.join(" ")))
    }

    /// Runs a command that must succeed, and returns its answer.
    fn done(&self, words: &[&str]) -> Result<Value> {
        let Output { status, stdout, stderr } = self.ask(words)?;
        let failed = || {
            let error = String::from_utf8_lossy(&stderr);
            format!("'aquifer {}': {status}: {}", words.join(" "), error.trim())
        };
        ensure!(status.success(), "{}", failed());
        match stdout.is_empty() {
            true => Ok(Value::Null),
            false => serde_json::from_slice(&stdout).with_context(failed),
        }
    }

    /// Returns the state of a VM; `none` if this host does not run it.
    fn vm_state(&self, vm: &str) -> String {
        match self.done(&["vm", "show", vm]).map(|status| status["state"].clone()) {
            Ok(Value::String(state)) => state,
            Ok(other) => other.to_string(),
            Err(_) => "none".to_owned(),
        }
    }

    /// Returns the engine of a region.
    fn engine(&self, region: &str) -> Result<u32> {
        let pid = self.done(&["region", "show", region])?["pid"].as_u64();
        Ok(u32::try_from(pid.context("the region has no engine")?)?)
    }

    /// Returns the supervisor of the host's VM.
    fn supervisor(&self) -> Result<u32>;
    /// Returns the VM's latest figures: ticks, rewritten pages, wrong pages.
    fn ticks(&self, vm: &str) -> Result<[u64; 3]>;
    /// Returns when guests of the VM began here, by its console. A guest that only came here began
    /// elsewhere.
    fn starts(&self, vm: &str) -> Result<Vec<u64>>;
    /// Returns whether this host has no VM, no region, and none of their processes and mounts.
    fn is_empty(&self) -> Result<bool>;

    /// Waits until the VM has ticked for two seconds more.
    fn goes_on(&self, vm: &str) -> Result<[u64; 3]> {
        let mut first = 0;
        wait_until("the guest ticks for two seconds", Duration::from_secs(120), || {
            let [tick, ..] = self.ticks(vm)?;
            first = if first == 0 { tick } else { first };
            Ok(first > 0 && tick >= first + 20)
        })?;
        self.ticks(vm)
    }
}

impl VmHost for Host {
    fn json(&self, words: &[&str]) -> Result<Command> {
        let mut command = self.command()?;
        command.arg("--json").args(words).env("AQUIFER_GROUPS", self.dir().join("groups"));
        Ok(command)
    }

    fn start_agent(&self) -> Result<()> {
        if self.pid().is_some() && self.ended().is_none() {
            return Ok(());
        }
        self.start(|_| ())?;
        wait_until("the agent answers", TIMEOUT, || Ok(self.is_ready()?))
    }

    fn supervisor(&self) -> Result<u32> {
        process_like(&format!("serve vm {}", self.state().display()))
    }

    fn ticks(&self, vm: &str) -> Result<[u64; 3]> {
        let console = self.state().join("vms").join(vm).join("console.log");
        let console = fs::read(&console).context("cannot read the VM's console log")?;
        let console = String::from_utf8_lossy(&console).into_owned();
        let said = console.lines().rev().skip(1).find_map(|line| {
            let numbers: Vec<_> =
                line.trim().strip_prefix("churn ")?.split(' ').map(str::parse).collect();
            <[_; 3]>::try_from(numbers)
                .ok()
                .map(|numbers| numbers.map(|number| number.unwrap_or(u64::MAX)))
        });
        Ok(said.unwrap_or_default())
    }

    fn starts(&self, vm: &str) -> Result<Vec<u64>> {
        let console = self.state().join("vms").join(vm).join("console.log");
        let console = fs::read(&console).context("cannot read the VM's console log")?;
        let console = String::from_utf8_lossy(&console).into_owned();
        let began = console.lines().filter_map(|line| line.trim().split_once("began "));
        began.map(|(_, number)| Ok(number.parse()?)).collect()
    }

    fn is_empty(&self) -> Result<bool> {
        let (vms, regions) = (self.done(&["vm", "list"])?, self.done(&["region", "list"])?);
        let run = self.state();
        let run = run.to_str().context("the path is not UTF-8")?;
        let processes = Command::new("pgrep")
            .args(["-f", &format!("serve (vm|region).*{run}|qemu.*{run}/")])
            .output()?;
        Ok(vms.as_array().is_some_and(Vec::is_empty)
            && regions.as_array().is_some_and(Vec::is_empty)
            && processes.stdout.is_empty()
            && !fs::read_to_string("/proc/self/mounts")?.contains(run))
    }
}

/// Waits for the end of a command, at most [`COMMAND`], and returns its output.
pub fn ended(command: Child) -> Result<Output> {
    let (process, (done, end)) = (command.id(), mpsc::channel());
    // The test does not wait for the thread if the command hangs.
    thread::spawn(move || done.send(command.wait_with_output()));
    match end.recv_timeout(COMMAND) {
        Ok(output) => Ok(output?),
        Err(_) => {
            kill(process, Signal::KILL)?;
            bail!("the command did not end within {COMMAND:?}")
        }
    }
}

/// The kernel and the first programs of a guest that only checks and rewrites its memory.
pub fn busy_guest(dir: &Path) -> Result<Parts> {
    let first = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guests/churn.sh");
    let spec = Spec::new("guest").file(example("demo", "churn"), "/bin/churn").modules([
        "virtio_mem",
        "virtio_balloon",
        "virtio_blk",
    ]);
    spec.file(first, "/bin/churn.sh").parts(dir)
}

/// The sizes of a VM.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub memory: Bytes,
    pub most: Bytes,
    /// `None`: the host's agent chooses it.
    pub cache: Option<Bytes>,
}

/// Returns the options of `vm start` for a guest with these parts. `churn` are the arguments of its
/// program: the MiB that it checks and rewrites, the percentage of it that it mostly rewrites, and
/// MiB a second.
pub fn busy_vm(parts: &Parts, sizes: Sizes, churn: &str) -> Result<Vec<String>> {
    let text = |path: &Path| path.to_str().context("the path is not UTF-8").map(str::to_owned);
    let Sizes { memory, most, cache } = sizes;
    let append = format!(
        "{} memhp_default_state=online_movable init_on_alloc=0 rdinit=/bin/churn.sh -- {churn}",
        parts.append
    );
    let words = [
        ("--memory", memory.0.to_string()),
        ("--max-memory", most.0.to_string()),
        ("--cache", cache.map_or("auto".to_owned(), |cache| cache.0.to_string())),
        ("--accel", "tcg".to_owned()),
        ("--kernel", text(&parts.kernel)?),
        ("--initrd", text(&parts.initrd)?),
        ("--append", append),
    ];
    Ok(words.into_iter().flat_map(|(option, value)| [option.to_owned(), value]).collect())
}

/// Returns the first process with a command line that matches `like`.
pub fn process_like(like: &str) -> Result<u32> {
    let found = Command::new("pgrep").args(["-f", like]).output()?;
    let text = String::from_utf8(found.stdout)?;
    let first = text.lines().next().with_context(|| format!("there is no process '{like}'"))?;
    Ok(first.parse()?)
}

pub fn kill(process: u32, signal: Signal) -> Result<()> {
    let process = Pid::from_raw(process as i32).context("the process ID is 0")?;
    Ok(kill_process(process, signal)?)
}
