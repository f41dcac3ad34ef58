//! Tests of `aquifer run` as a program: signals and exit codes pass through it, and it leaves
//! nothing.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};

use aquifer_cli::cgroup::Hierarchy;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::common::{aquifer, lacks_cgroups, stderr, stdout, wait_until};

/// Returns `aquifer run` without memory in the pool, which needs no agent.
fn run(dir: &Path, command: &[&str]) -> std::process::Command {
    let mut run = aquifer(dir);
    run.args(["run", "--local", "64M", "--remote", "0", "--"]).args(command);
    run
}

/// A run with a command that is ready.
struct Running {
    aquifer: Child,
    output: BufReader<ChildStdout>,
    command: Pid,
}

impl Running {
    /// Starts a shell script that begins with `echo $$`, and waits for that.
    fn start(dir: &Path, script: &str) -> Self {
        let script = format!("echo $$; {script}");
        let mut aquifer = run(dir, &["sh", "-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(aquifer.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        Self { aquifer, output, command: Pid::from_raw(line.trim().parse().unwrap()).unwrap() }
    }

    /// Asserts that the script's next line is `what`.
    fn says(&mut self, what: &str) {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), what);
    }

    fn cgroup(&self) -> std::path::PathBuf {
        Hierarchy::find().unwrap().root().join(format!("aquifer-run-{}", self.aquifer.id()))
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.aquifer), signal).unwrap();
    }

    fn code(&mut self) -> Option<i32> {
        self.aquifer.wait().unwrap().code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.aquifer.kill();
        let _ = self.aquifer.wait();
    }
}

/// Returns whether this run directory has no marks of running commands.
fn no_marks(dir: &Path) -> bool {
    std::fs::read_dir(dir.join("runs")).unwrap().count() == 0
}

#[test]
fn the_exit_code_is_the_commands() {
    if lacks_cgroups() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (script, code) in
        [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 128 + 15), ("kill -KILL $$", 128 + 9)]
    {
        let output = run(dir.path(), &["sh", "-c", script]).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{script}: {}", stderr(&output));
    }
    assert!(no_marks(dir.path()));
}

#[test]
fn a_command_that_cannot_run_has_the_shells_exit_codes() {
    if lacks_cgroups() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (command, code) in [("no-such-command", 127), ("/etc/passwd", 126)] {
        let output = run(dir.path(), &[command]).output().unwrap();
        assert_eq!(output.status.code(), Some(code));
        assert!(stderr(&output).contains(command), "{}", stderr(&output));
    }
}

#[test]
fn the_command_and_its_children_are_limited_together() {
    if lacks_cgroups() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let output = run(
        dir.path(),
        &["sh", "-c", "(grep memory /proc/self/cgroup || cat /proc/self/cgroup) & wait"],
    );
    let output = { output }.output().unwrap();
    assert!(stdout(&output).contains("aquifer-run-"), "{}", stdout(&output));

    let output = run(dir.path(), &["tail", "/dev/zero"]).output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 9));
    assert!(stderr(&output).contains("out of memory at 64MiB"), "{}", stderr(&output));
}

#[test]
fn signals_reach_the_command() {
    if lacks_cgroups() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (signal, name) in
        [(Signal::INT, "INT"), (Signal::TERM, "TERM"), (Signal::HUP, "HUP"), (Signal::USR1, "USR1")]
    {
        // 'wait', as a shell runs a trap only between its own commands.
        let script = format!("trap 'exit 42' {name}; echo ready; sleep 600 & wait");
        let mut running = Running::start(dir.path(), &script);
        running.says("ready");
        running.signal(signal);
        assert_eq!(running.code(), Some(42), "{name}");
        wait_until("the cgroup is gone", || !running.cgroup().exists());
    }
}

#[test]
fn an_ignored_hangup_stays_ignored() {
    if lacks_cgroups() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut outer = std::process::Command::new("sh");
    outer.args(["-c", "trap '' HUP; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_aquifer")]);
    outer.args([
        "run",
        "--local",
        "64M",
        "--remote",
        "0",
        "--",
        "grep",
        "SigIgn",
        "/proc/self/status",
    ]);
    let output = outer.env("AQUIFER_RUN_DIR", dir.path()).output().unwrap();
    let mask = u64::from_str_radix(stdout(&output).split_whitespace().last().unwrap(), 16).unwrap();
    assert_eq!(mask & 1, 1, "{}", stdout(&output));
}

#[test]
fn processes_that_the_command_leaves_running_end_with_it() {
    if lacks_cgroups() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let script = "setsid sleep 600 >/dev/null 2>&1 & echo $!";
    let output = run(dir.path(), &["sh", "-c", script]).output().unwrap();
    let left = Pid::from_raw(stdout(&output).trim().parse().unwrap()).unwrap();
    assert!(output.status.success());
    wait_until("the leftover process is gone", || test_kill_process(left).is_err());
}

#[test]
fn a_killed_run_ends_its_command_and_the_next_one_cleans_up() {
    if lacks_cgroups() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut running = Running::start(dir.path(), "sleep 600 & wait");
    let (cgroup, command) = (running.cgroup(), running.command);
    assert!(cgroup.exists());
    running.signal(Signal::KILL);
    assert_eq!(running.code(), None);
    wait_until("the command is gone", || test_kill_process(command).is_err());
    assert!(cgroup.exists(), "the cgroup must stay while the shell's child runs");

    assert!(run(dir.path(), &["true"]).status().unwrap().success());
    assert!(!cgroup.exists());
    assert!(no_marks(dir.path()));
}

#[test]
fn without_a_pool_it_names_the_way_out() {
    if lacks_cgroups() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let output = aquifer(dir.path())
        .args(["run", "--local", "64M", "--priority", "100", "--", "true"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("help: start 'aquifer serve agent'"), "{}", stderr(&output));
    assert!(no_marks(dir.path()));
}

#[test]
fn a_senseless_command_line_is_misuse() {
    let dir = tempfile::tempdir().unwrap();
    for words in [
        &["run"] as &[&str],
        &["run", "--local", "12parsecs", "--", "true"],
        &["run", "--local", "1M"],
    ] {
        let output = aquifer(dir.path()).args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}");
    }
    let words = ["run", "--local", "1M", "--name", "../x", "--", "true"];
    assert_eq!(aquifer(dir.path()).args(words).output().unwrap().status.code(), Some(2));
}

#[test]
fn the_terminals_interrupt_ends_the_command_and_cleans_up() {
    if lacks_cgroups() {
        return;
    }
    if std::process::Command::new("script").arg("--version").output().is_err() {
        eprintln!("skipped: needs script(1)");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let line = format!(
        "{} run --local 64M --remote 0 -- sh -c 'echo ready; exec sleep 600'",
        env!("CARGO_BIN_EXE_aquifer")
    );
    let mut terminal = std::process::Command::new("script");
    terminal.args(["-q", "-e", "-c", &line, "/dev/null"]).env("AQUIFER_RUN_DIR", dir.path());
    let mut terminal = terminal.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut shown = String::new();
    BufReader::new(terminal.stdout.as_mut().unwrap()).read_line(&mut shown).unwrap();
    assert_eq!(shown.trim(), "ready");
    terminal.stdin.as_mut().unwrap().write_all(b"\x03").unwrap();
    assert_eq!(terminal.wait().unwrap().code(), Some(128 + 2));
    assert!(no_marks(dir.path()));
}
