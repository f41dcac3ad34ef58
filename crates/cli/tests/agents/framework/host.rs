//! One host: its agent, its memory, and the commands an operator gives on it.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquifer_api::client::{CallError, Client};
use aquifer_api::order::{Borrowed, Returned};
use aquifer_api::path;
use aquifer_api::status::{Held, Lent, Role, Status, Volume};
use aquifer_cli::cgroup::{Cgroup, Hierarchy, Limits, Swap};
use aquifer_device::backend::label;
use aquifer_device::swap::swaps;
use aquifer_page::{Bytes, HostName};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde::de::DeserializeOwned;
use toml::Table;

use super::{LIMIT, Load, Spec, wait_until};

/// A host of a cluster.
pub struct Host {
    name: &'static str,
    address: Ipv4Addr,
    dir: PathBuf,
    store: PathBuf,
    agent: Mutex<Option<Child>>,
    cgroup: Cgroup,
}

/// What a command came to.
#[derive(Debug)]
pub struct Answer {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Answer {
    /// Runs `command` to its end.
    ///
    /// # Panics
    /// If it takes longer than [`LIMIT`].
    #[track_caller]
    pub fn of(command: &mut Command) -> Self {
        let started = Instant::now();
        let Output { status, stdout, stderr } = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let answer = Self { code: status.code(), stdout: text(stdout), stderr: text(stderr) };
        assert!(started.elapsed() < LIMIT, "took {:?}: {answer:?}", started.elapsed());
        answer
    }

    /// Demands that the command failed, with this exit code, and that it said all of `words` about it.
    #[track_caller]
    pub fn must_fail(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "does not say '{word}': {}", self.stderr);
        }
    }

    /// Demands that it succeeded; reads its JSON.
    #[track_caller]
    pub fn json<T: DeserializeOwned>(&self) -> T {
        assert_eq!(self.code, Some(0), "{self:?}");
        serde_json::from_str(&self.stdout).unwrap()
    }
}

impl Host {
    pub(super) fn new(spec: &Spec, address: Ipv4Addr, cluster: &Path) -> Self {
        let hierarchy = Hierarchy::find().unwrap();
        hierarchy.enable().unwrap();
        let cluster_name = cluster.file_name().unwrap().to_str().unwrap();
        let limits = Limits { memory: spec.memory, swap: Swap::Unlimited };
        let cgroup = Cgroup::create(&hierarchy, &format!("{cluster_name}-{}", spec.name), limits).unwrap();
        let dir = cluster.join(spec.name);
        let store = Path::new("/dev/shm").join(cluster_name).join(spec.name);
        let host = Self { name: spec.name, address, dir, store, agent: Mutex::new(None), cgroup };
        host.configure(|config| spec.apply(config));
        host
    }

    /// Changes the configuration that `aquifer init` wrote; the agent reads it when it next starts.
    pub fn configure(&self, change: impl FnOnce(&mut Table)) {
        let text = fs::read_to_string(self.config()).unwrap();
        let mut config: Table = text.parse().unwrap();
        let mut set = |key: &str, path: &Path| {
            config.insert(key.to_owned(), path.to_str().unwrap().into());
        };
        set("tls", &self.tls());
        set("socket", &self.socket());
        set("state", &self.state());
        set("store", &self.store);
        let mut section = |name: &str, key: &str, path: &Path| {
            let section = config.entry(name).or_insert_with(|| Table::new().into());
            section.as_table_mut().unwrap().insert(key.to_owned(), path.to_str().unwrap().into());
        };
        section("memory", "cgroup", self.cgroup.path());
        section("borrow", "spill", &self.spill());
        change(&mut config);
        fs::write(self.config(), config.to_string()).unwrap();
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its name, as the API has it.
    pub fn host_name(&self) -> HostName {
        self.name.parse().unwrap()
    }

    /// Where peers call its agent.
    pub fn api(&self) -> SocketAddr {
        (self.address, 7070).into()
    }

    /// Where borrowers reach its pages.
    pub fn pages(&self) -> SocketAddr {
        (self.address, 7071).into()
    }

    pub fn config(&self) -> PathBuf {
        self.dir.join("agent.toml")
    }

    pub fn tls(&self) -> PathBuf {
        self.dir.join("tls")
    }

    pub fn socket(&self) -> PathBuf {
        self.state().join("agent.sock")
    }

    /// Where its sockets and logs are.
    pub fn state(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// Where its local files go that take what no lender has room for.
    pub fn spill(&self) -> PathBuf {
        self.dir.join("spill")
    }

    fn agent(&self) -> MutexGuard<'_, Option<Child>> {
        self.agent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts its agent.
    pub fn start(&self) {
        fs::create_dir_all(self.state()).unwrap();
        let log = File::options().create(true).append(true).open(self.log()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_aquifer"));
        command.arg("agent").arg("--config").arg(self.config()).env_remove("AQUIFER_LOG");
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let before = self.agent().replace(command.spawn().unwrap());
        assert!(before.is_none(), "{} has an agent already", self.name);
    }

    /// Waits until its agent answers and has had its first look at its memory.
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

    /// Starts its agent again, as if nothing had been between.
    #[track_caller]
    pub fn restart(&self) {
        self.start();
        self.wait_until_ready();
    }

    /// Kills its agent, as a crash would.
    pub fn kill_agent(&self) {
        self.signal_agent(Signal::KILL);
    }

    /// Ends its agent by a signal and waits for its end.
    pub fn signal_agent(&self, signal: Signal) -> ExitStatus {
        let mut agent = self.agent().take().unwrap();
        kill_process(Pid::from_child(&agent), signal).unwrap();
        agent.wait().unwrap()
    }

    /// What its agent says, if it answers.
    pub fn try_status(&self) -> Option<Status> {
        block_on(Client::local(&self.socket()).get(path::STATUS)).ok()
    }

    /// What its agent says.
    #[track_caller]
    pub fn status(&self) -> Status {
        self.try_status().unwrap_or_else(|| panic!("the agent of {} does not answer", self.name))
    }

    pub fn role(&self) -> Role {
        self.status().role
    }

    /// The roles that it has had, in order.
    pub fn roles(&self) -> Vec<Role> {
        self.status().role_changes.iter().map(|change| change.to).collect()
    }

    /// The one volume that it has borrowed.
    #[track_caller]
    pub fn volume(&self) -> Volume {
        let [volume] = self.status().borrowed.try_into().unwrap();
        volume
    }

    /// What its one volume lies on of `lender`'s, if anything.
    #[track_caller]
    pub fn held_of(&self, lender: &str) -> Option<Held> {
        self.volume().leases.into_iter().find(|held| held.lender.as_str() == lender)
    }

    /// The one lease that it has granted.
    #[track_caller]
    pub fn lent(&self) -> Lent {
        let [lent] = self.status().lent.try_into().unwrap();
        lent
    }

    /// Neither borrows nor lends, and holds nobody's pages.
    pub fn is_free(&self) -> bool {
        self.role() == Role::Neutral && self.lease_files().is_empty()
    }

    /// Whether the kernel has the device of this volume, and not another's by the same name.
    pub fn is_attached(volume: &Volume) -> bool {
        label(Path::new(&volume.device)).is_some_and(|label| label.ends_with(&volume.volume.to_string()))
    }

    /// Whether the kernel swaps to this volume.
    pub fn is_swap(volume: &Volume) -> bool {
        let device = Path::new(&volume.device);
        Self::is_attached(volume) && swaps().unwrap().iter().any(|swap| swap.path == device)
    }

    /// `aquifer WORDS` on this host.
    pub fn aquifer(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aquifer"));
        command.args(words).env("AQUIFER_RUN_DIR", self.state()).env("AQUIFER_SOCKET", self.socket());
        command
    }

    /// Borrows by hand.
    #[track_caller]
    pub fn borrow(&self, bytes: Bytes) -> Borrowed {
        Answer::of(&mut self.aquifer(&["borrow", "--json", &bytes.0.to_string()])).json()
    }

    /// Returns by hand.
    #[track_caller]
    pub fn give_back(&self) -> Returned {
        Answer::of(&mut self.aquifer(&["return", "--json"])).json()
    }

    /// Starts a program on this host that fills this much memory as fast as it can.
    pub fn load(&self, bytes: Bytes) -> Load {
        Load::start(&self.cgroup, bytes, None)
    }

    /// Starts a program on this host that fills memory at this rate, a second.
    pub fn slow_load(&self, bytes: Bytes, rate: Bytes) -> Load {
        Load::start(&self.cgroup, bytes, Some(rate))
    }

    /// What its programs have swapped out.
    pub fn swapped(&self) -> Bytes {
        self.cgroup.swap_used().unwrap()
    }

    /// Where the pages are that it holds for others.
    pub fn store(&self) -> &Path {
        &self.store
    }

    /// RAM that the pages take which it holds for others, as the kernel counts it.
    pub fn stored(&self) -> Bytes {
        let pages =
            self.lease_files().into_iter().filter(|path| path.extension().is_some_and(|e| e == "pages"));
        // stat(2) counts blocks of 512 bytes.
        Bytes(pages.filter_map(|path| fs::metadata(path).ok()).map(|file| file.blocks() * 512).sum())
    }

    /// The files of the leases it has granted.
    pub fn lease_files(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(&self.store).into_iter().flatten().flatten().map(|entry| entry.path());
        files.filter(|path| path.extension().is_some()).collect()
    }

    fn log(&self) -> PathBuf {
        self.dir.join("agent.log")
    }

    /// Shows what its agent and volumes last said.
    pub(super) fn show_logs(&self) {
        let volumes = fs::read_dir(self.state().join("volumes")).into_iter().flatten().flatten();
        let volumes =
            volumes.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "log"));
        for log in [self.log()].into_iter().chain(volumes) {
            let text = fs::read_to_string(&log).unwrap_or_default();
            let lines: Vec<_> = text.lines().collect();
            eprintln!("--- {}: {}", self.name, log.display());
            lines[lines.len().saturating_sub(40)..].iter().for_each(|line| eprintln!("{line}"));
        }
    }

    /// Ends every program on this host.
    pub(super) fn end_loads(&self) {
        let _ = self.cgroup.kill_all();
    }

    /// Ends the agent, which gives back what was borrowed, and removes what it may have left all the same.
    pub(super) fn end(&self) {
        if self.agent().is_none() && self.has_volumes() {
            // The one that died left volumes to one that finds them.
            self.start();
            soon(|| self.try_status().is_some());
        }
        let volumes = self.try_status().map(|status| status.borrowed).unwrap_or_default();
        if let Some(mut agent) = self.agent().take() {
            let _ = kill_process(Pid::from_child(&agent), Signal::INT);
            soon(|| !matches!(agent.try_wait(), Ok(None)));
            let _ = agent.kill();
            let _ = agent.wait();
        }
        for Volume { pid, device, .. } in volumes {
            // One that was given back is on its way out.
            if soon(|| !lives(pid)) {
                continue;
            }
            eprintln!("{}: the volume of process {pid} on {device} is left over", self.name);
            let _ = kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::KILL);
            let _ = Command::new("swapoff").arg(&device).status();
        }
        let _ = fs::remove_dir_all(&self.store);
        let _ = self.store.parent().map(fs::remove_dir);
    }

    /// Demands that of this volume nothing is left: process, swap, device, files.
    #[track_caller]
    pub fn leaves_nothing(&self, volume: &Volume) {
        wait_until("the volume's process has ended", || !lives(volume.pid));
        wait_until("the volume's device is gone", || !Self::is_attached(volume));
        let files = fs::read_dir(self.state().join("volumes")).into_iter().flatten().flatten();
        let left: Vec<_> = files
            .map(|file| file.path())
            .filter(|path| path.extension().is_none_or(|e| e != "log"))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }

    /// Whether volumes are on record here, served or not.
    pub fn has_volumes(&self) -> bool {
        let mut files = fs::read_dir(self.state().join("volumes")).into_iter().flatten().flatten();
        files.any(|file| file.path().extension().is_some_and(|extension| extension == "json"))
    }
}

/// Waits for `condition` as long as anything may take; whether it holds then.
fn soon(mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + LIMIT;
    while !condition() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Whether a process lives.
pub fn lives(pid: u32) -> bool {
    i32::try_from(pid).ok().and_then(Pid::from_raw).is_some_and(|pid| test_kill_process(pid).is_ok())
}

/// Waits for the answer to a call.
pub fn block_on<T>(call: impl Future<Output = Result<T, CallError>>) -> Result<T, CallError> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(call)
}
