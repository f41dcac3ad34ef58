//! Tests of VMs with definitions: commands, a host's agent, and a boot. QEMU's firmware is guest
//! enough.

mod moves;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::rc::Rc;

use aquifer_api::status::EventKind;
use aquifer_hosts::daemon::answer;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::agents::framework::address;
use crate::common::{binary, stderr, stdout, wait_until};

/// A host with an agent that does not run yet; its drop ends its VMs.
struct Host {
    host: aquifer_hosts::Host,
    dir: Rc<tempfile::TempDir>,
}

impl Host {
    fn new() -> Option<Self> {
        Self::all(&["a"])?.pop()
    }

    /// Makes hosts that know each other; `None` if the tests cannot run here.
    fn all(names: &[&'static str]) -> Option<Vec<Self>> {
        let has_qemu = Command::new("qemu-system-x86_64").arg("--version").output().is_ok();
        if !has_qemu || !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root and qemu-system-x86_64");
            return None;
        }
        let dir = Rc::new(tempfile::tempdir().unwrap());
        let stores = Path::new("/dev/shm/aquifer").join(dir.path().file_name().unwrap());
        let members: Vec<_> = names.iter().map(|name| (*name, address())).collect();
        let hosts = aquifer_hosts::Host::admit(&binary(), dir.path(), &stores, &members).unwrap();
        let host = |host: aquifer_hosts::Host| {
            host.set("[borrow]\nenabled = false\n[vms]\naccept = true").unwrap();
            Self { host, dir: dir.clone() }
        };
        Some(hosts.into_iter().map(host).collect())
    }

    fn start_agent(&self) {
        self.host.start(|_| ()).unwrap();
        wait_until("the agent answers", || self.host.is_ready().unwrap());
    }

    fn kill_agent(&self) {
        self.host.signal(Signal::KILL).unwrap();
        wait_until("the agent is dead", || self.host.ended().is_some());
    }

    fn run(&self, words: &[&str]) -> Output {
        self.host.command().unwrap().args(words).output().unwrap()
    }

    #[track_caller]
    fn done(&self, words: &[&str]) -> Value {
        let mut command = self.host.command().unwrap();
        answer(command.arg("--json").args(words)).unwrap_or_else(|error| panic!("{error}"))
    }

    #[track_caller]
    fn refused(&self, words: &[&str], says: &str) {
        let output = self.run(words);
        let text = stderr(&output);
        assert!(!output.status.success() && text.contains(says), "{words:?}: {text}");
    }

    fn create(&self, name: &str, more: &[&str]) -> Value {
        let words = ["vm", "create", name, "--memory", "32M", "--accel", "tcg"];
        self.done(&[&words[..], more].concat())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.host.definitions().join(format!("{name}.toml"))
    }

    /// Returns the process of a VM's QEMU, if the VM runs.
    fn qemu(&self, name: &str) -> Option<u32> {
        let all = self.done(&["vm", "list"]);
        let vm = all.as_array().unwrap().iter().find(|vm| vm["name"] == name)?;
        (vm["state"] == "running").then(|| vm["pid"].as_u64()).flatten().map(|pid| pid as u32)
    }

    #[track_caller]
    fn wait_for_qemu(&self, name: &str) -> u32 {
        wait_until("the VM runs", || self.qemu(name).is_some());
        self.qemu(name).unwrap()
    }

    fn state(&self, name: &str) -> String {
        let all = self.done(&["vm", "list", "--all"]);
        let vm = all.as_array().unwrap().iter().find(|vm| vm["name"] == name);
        vm.map_or(String::new(), |vm| vm["state"].as_str().unwrap_or_default().to_owned())
    }

    /// Kills all processes of the host, and removes all that a boot removes.
    fn boot(&self) {
        if self.host.pid().is_some() {
            self.kill_agent();
        }
        let run_dir = self.host.state();
        wait_until("all processes are dead", || {
            let mut processes = processes(&run_dir);
            processes.iter().for_each(|process| kill(*process));
            processes.retain(|process| Path::new(&format!("/proc/{process}/exe")).exists());
            processes.is_empty()
        });
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let mounts = mounts.lines().filter_map(|line| line.split(' ').nth(1));
        for mount in mounts.filter(|mount| Path::new(mount).starts_with(&run_dir)) {
            let status = Command::new("umount").args(["-l", mount]).status();
            assert!(status.unwrap().success(), "{mount}");
        }
        fs::remove_dir_all(run_dir).unwrap();
    }

    /// Waits until the agent has looked at its VMs several times.
    fn wait_for_periods(&self) {
        let uptime = || self.host.try_status().map_or(0.0, |status| status.agent.uptime_s);
        let before = uptime();
        wait_until("some periods pass", || uptime() > before + 3.5);
    }

    fn has_event(&self, subject: &str, says: &str) -> bool {
        let events = self.host.try_status().map(|status| status.history.events).unwrap_or_default();
        events.iter().any(|event| {
            event.kind == EventKind::VmNotStarted
                && event.who == subject
                && event.what.contains(says)
        })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.host.log_tails(40));
        }
        self.host.end(std::time::Duration::from_secs(10));
        processes(&self.host.state()).into_iter().for_each(kill);
    }
}

fn kill(process: u32) {
    // It may have ended.
    let _ = kill_process(Pid::from_raw(process as i32).unwrap(), Signal::KILL);
}

/// Returns the processes that name the run directory in their arguments.
fn processes(run_dir: &Path) -> Vec<u32> {
    let run_dir = run_dir.to_str().unwrap();
    let all = fs::read_dir("/proc").unwrap().flatten();
    let named = all.filter_map(|entry| {
        let process = entry.file_name().to_str()?.parse().ok()?;
        let line = fs::read(entry.path().join("cmdline")).ok()?;
        String::from_utf8_lossy(&line).contains(run_dir).then_some(process)
    });
    named.collect()
}

#[test]
fn a_vm_is_defined_started_stopped_changed_and_removed() {
    let Some(host) = Host::new() else { return };
    let first = host.run(&["vm", "create", "db", "--memory", "32M", "--accel", "tcg"]);
    assert!(first.status.success(), "{}", stderr(&first));
    assert!(stderr(&first).contains("no agent answers"), "{}", stderr(&first));
    let text = fs::read_to_string(host.file("db")).unwrap();
    assert!(text.contains("memory = \"32M\"") && text.contains("accel = \"tcg\""), "{text}");
    host.refused(&["vm", "create", "db", "--memory", "1G"], "defines VM 'db' already");
    host.refused(&["vm", "start", "db", "--memory", "1G"], "options would contradict");
    host.refused(&["vm", "start", "db"], "exists already");
    host.refused(&["vm", "rm", "db"], "it runs");
    let shown = stdout(&host.run(&["vm", "show", "db"]));
    for says in ["db.toml", "autostart   yes", "restart     on-failure"] {
        assert!(shown.contains(says), "{shown}");
    }

    let set = host.done(&["vm", "set", "db", "--cpus", "2", "--min", "16M", "--restart", "no"]);
    assert_eq!(set["now"].to_string(), r#"["restart","min"]"#, "{set}");
    assert_eq!(set["at_next_start"].to_string(), r#"["cpus"]"#, "{set}");
    assert_eq!(host.done(&["vm", "show", "db"])["limits"]["min"], 16 << 20);
    host.refused(&["vm", "set", "db", "--max-memory", "8 parsec"], "is not a size");
    host.refused(&["vm", "set", "db", "--initrd", "/i"], "--kernel");
    let text = fs::read_to_string(host.file("db")).unwrap();
    assert!(text.contains("cpus = 2") && !text.contains("initrd"), "{text}");

    host.done(&["vm", "stop", "db", "--force"]);
    assert_eq!(host.state("db"), "stopped");
    assert!(host.run(&["vm", "show", "db"]).status.success());
    host.done(&["vm", "start", "db"]);
    let qemu = host.wait_for_qemu("db");
    let line = fs::read(format!("/proc/{qemu}/cmdline")).unwrap();
    assert!(String::from_utf8_lossy(&line).contains("-smp\u{0}2\u{0}"));
    host.done(&["vm", "rm", "db", "--force"]);
    assert_eq!((host.qemu("db"), host.file("db").exists()), (None, false));
    host.refused(&["vm", "rm", "db"], "is not defined");
    host.refused(&["vm", "start", "db"], "vm create db");
    host.refused(&["vm", "set", "db", "--cpus", "2"], "vm create db");
}

#[test]
fn after_a_boot_the_agent_starts_each_defined_vm_once() {
    let Some(host) = Host::new() else { return };
    host.start_agent();
    host.create("auto", &[]);
    host.create("manual", &["--autostart=false"]);
    host.create("later", &["--no-start"]);
    host.create("off", &[]);
    host.done(&["vm", "stop", "off", "--force"]);
    let qemu = host.wait_for_qemu("auto");
    // Another agent neither starts a second copy, nor a VM that is to stay off.
    host.kill_agent();
    host.start_agent();
    host.wait_for_periods();
    assert_eq!(host.qemu("auto"), Some(qemu));
    assert_eq!((host.state("off"), host.state("later")), ("stopped".into(), "stopped".into()));

    let broken = "version = 1\nname = \"broken\"\n[vm]\nmemoy = \"1G\"\n";
    host.boot();
    fs::write(host.file("broken"), broken).unwrap();
    fs::write(host.file("damaged"), "version = 1\nnam = 1\n").unwrap();
    host.start_agent();
    for name in ["auto", "later", "off"] {
        host.wait_for_qemu(name);
    }
    wait_until("events name the others", || {
        host.has_event("broken", "unknown key 'memoy'") && host.has_event("damaged", "nam")
    });
    assert_eq!(host.state("manual"), "off");
    assert!(host.state("damaged").starts_with("damaged: "), "{}", host.state("damaged"));
}

#[test]
fn the_agent_replaces_a_killed_supervisor() {
    let Some(host) = Host::new() else { return };
    host.start_agent();
    host.create("db", &[]);
    host.done(&["vm", "start", "transient", "--memory", "32M", "--accel", "tcg"]);
    let supervisors = || {
        let find = ["-f", &format!("serve vm {}", host.host.state().display())];
        let found = Command::new("pgrep").args(find).output().unwrap();
        String::from_utf8(found.stdout).unwrap().lines().map(|pid| pid.parse().unwrap()).collect()
    };
    let before: Vec<u32> = supervisors();
    let qemu = host.wait_for_qemu("db");
    assert_eq!(before.len(), 2);
    before.iter().for_each(|supervisor| kill(*supervisor));
    wait_until("both VMs have other supervisors", || {
        let now: Vec<u32> = supervisors();
        now.len() == 2 && now.iter().all(|supervisor| !before.contains(supervisor))
    });
    wait_until("the journal says so", || {
        stdout(&host.run(&["why", "db"])).contains("another supervisor for VM db")
    });
    assert_eq!(host.qemu("db"), Some(qemu));
    for name in ["db", "transient"] {
        host.done(&["vm", "stop", name, "--force"]);
    }
    assert_eq!(supervisors(), Vec::<u32>::new());
}

#[test]
fn a_killed_vm_restarts_and_one_that_ends_by_itself_does_not() {
    let Some(host) = Host::new() else { return };
    host.start_agent();
    host.create("db", &[]);
    host.create("never", &["--restart", "no"]);
    host.create("quits", &[]);
    let [db, never] = ["db", "never"].map(|name| host.wait_for_qemu(name));
    kill(never);
    kill(db);
    wait_until("the VM runs again", || host.qemu("db").is_some_and(|qemu| qemu != db));
    let why = stdout(&host.run(&["why", "db"]));
    assert!(why.contains("starts VM db again in 1s: signal 9 killed QEMU"), "{why}");
    let monitor = host.host.state().join("vms/quits/qmp");
    let timeout = std::time::Duration::from_secs(60);
    // As if the guest had powered itself off.
    let mut qmp = aquifer_vm::Qmp::connect(&monitor, timeout).unwrap();
    let _ = qmp.execute("quit", serde_json::json!({}));
    for name in ["quits", "never"] {
        wait_until("the VM rests", || {
            stdout(&host.run(&["vm", "show", name])).contains("stopped by")
        });
    }

    // The agent is dead while QEMU and its supervisor die: the next one starts the VM again.
    host.kill_agent();
    let again = host.wait_for_qemu("db");
    let status = fs::read_to_string(format!("/proc/{again}/status")).unwrap();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap();
    kill(parent.trim().parse().unwrap());
    kill(again);
    host.start_agent();
    wait_until("the VM runs again", || host.qemu("db").is_some_and(|qemu| qemu != again));
    assert_eq!((host.qemu("never"), host.qemu("quits")), (None, None));
    host.done(&["vm", "stop", "db", "--force"]);
    assert_eq!(host.state("db"), "stopped");
}

#[test]
fn a_vm_that_fails_again_and_again_waits_longer_and_says_so() {
    let Some(host) = Host::new() else { return };
    host.start_agent();
    host.create("db", &["--restart", "always"]);
    let shown = || host.done(&["vm", "show", "db"]);
    let mut last = 0;
    // The fourth wait takes eight seconds.
    for _ in 0..4 {
        wait_until("the VM runs anew", || host.qemu("db").is_some_and(|qemu| qemu != last));
        last = host.wait_for_qemu("db");
        kill(last);
    }
    wait_until("the VM waits", || !shown()["defined"]["next_start"].is_null());
    assert_eq!(shown()["defined"]["next_start"]["why"], "signal 9 killed QEMU");
    let text = stdout(&host.run(&["vm", "show", "db"]));
    assert!(text.contains("next start  in ") && text.contains("signal 9 killed QEMU"), "{text}");
    host.done(&["vm", "stop", "db", "--force"]);
    assert_eq!(host.state("db"), "stopped");
    let text = stdout(&host.run(&["vm", "show", "db"]));
    assert!(text.contains("stopped by  aquifer vm stop") && !text.contains("next start"), "{text}");
}

#[test]
fn while_the_host_drains_the_agent_starts_no_vm_after_a_boot() {
    let Some(host) = Host::new() else { return };
    host.create("db", &["--no-start"]);
    let text = fs::read(host.file("db")).unwrap();
    host.boot();
    fs::remove_file(host.file("db")).unwrap();
    host.start_agent();
    let drained = host.run(&["host", "drain"]);
    assert!(drained.status.success(), "{}", stderr(&drained));
    // The agent sees this VM for the first time after the boot.
    fs::write(host.file("db"), text).unwrap();
    host.wait_for_periods();
    assert_eq!(host.qemu("db"), None);
    host.done(&["host", "undrain"]);
    host.wait_for_qemu("db");
}

#[test]
fn a_defined_vm_gets_memory_that_the_ledger_has_or_waits() {
    let Some(host) = Host::new() else { return };
    host.start_agent();
    host.refused(&["vm", "create", "big", "--memory", "1T", "--accel", "tcg"], "--overcommit");
    assert_eq!(host.state("big"), "stopped");
    host.done(&["vm", "rm", "big"]);
    host.create("db", &[]);
    host.boot();
    let text = fs::read_to_string(host.file("db")).unwrap();
    fs::write(host.file("db"), text.replace("32M", "1T")).unwrap();
    host.start_agent();
    wait_until("the ledger refuses", || host.has_event("db", "of this host's RAM"));
    let shown = stdout(&host.run(&["vm", "show", "db"]));
    assert!(shown.contains("next start") && shown.contains("of this host's RAM"), "{shown}");
    host.done(&["vm", "set", "db", "--memory", "32M"]);
    host.wait_for_qemu("db");
}

#[test]
fn of_two_creates_at_once_one_is_refused() {
    let Some(host) = Host::new() else { return };
    let words = ["vm", "create", "db", "--no-start", "--memory"];
    let create = |memory: &str| {
        let mut command = host.host.command().unwrap();
        command.args(words).arg(memory).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    // Both run before the first one ends.
    let both = ["32M", "64M"].map(create);
    let outputs = both.map(|one| one.wait_with_output().unwrap());
    let refused: Vec<_> = outputs.iter().filter(|output| !output.status.success()).collect();
    let [refused] = &refused[..] else { panic!("{outputs:?}") };
    assert!(stderr(refused).contains("defines VM 'db' already"), "{}", stderr(refused));
}

/// A small file system; its drop unmounts it.
struct Disk(PathBuf);

impl Disk {
    fn new(at: &Path) -> Self {
        fs::create_dir_all(at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=16k", "none"]).arg(at);
        assert!(mount.status().unwrap().success());
        Self(at.to_owned())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_leaves_the_former_definition() {
    let Some(host) = Host::new() else { return };
    let _disk = Disk::new(&host.host.definitions());
    host.create("db", &["--no-start"]);
    let before = fs::read(host.file("db")).unwrap();
    let _ = fs::write(host.host.definitions().join("full"), [1; 1 << 20]);
    host.refused(&["vm", "set", "db", "--cpus", "2"], "db.toml");
    host.refused(&["vm", "create", "web", "--memory", "32M"], "web.toml");
    assert_eq!(fs::read(host.file("db")).unwrap(), before);
    assert!(!host.file("web").exists());
    fs::remove_file(host.host.definitions().join("full")).unwrap();
    host.done(&["vm", "set", "db", "--cpus", "2"]);
    assert_ne!(fs::read(host.file("db")).unwrap(), before);
}
