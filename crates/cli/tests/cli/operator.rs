//! Tests of the messages that an operator reads: refusals, waits, leftovers.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use aquifer_hosts::daemon::AGENT;

use crate::common::{aquifer, lacks_cgroups, serve, stderr, stdout};

/// The user id of `nobody`, a user without rights.
const NOBODY_UID: u32 = 65_534;

/// A directory that every user may enter, with the binary in it.
struct Open {
    dir: tempfile::TempDir,
}

impl Open {
    /// Makes the directory; `None` if this process is not root and cannot run as another user.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let binary = env!("CARGO_BIN_EXE_aquifer");
        let copy = dir.path().join("aquifer");
        // Other users may have no access to the build directory.
        fs::hard_link(binary, &copy).or_else(|_| fs::copy(binary, &copy).map(drop)).unwrap();
        Some(Self { dir })
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Runs `aquifer WORDS` as a user without rights.
    fn as_nobody(&self, words: &[&str]) -> Output {
        let mut command = Command::new(self.path().join("aquifer"));
        command.args(words).env("AQUIFER_RUN_DIR", self.path()).env_remove("AQUIFER_SOCKET");
        command.uid(NOBODY_UID).gid(NOBODY_UID).output().unwrap()
    }

    /// Asserts that a user without rights gets that reason, and the remedy.
    #[track_caller]
    fn refuses_nobody(&self, words: &[&str]) {
        let output = self.as_nobody(words);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {}{text}", stdout(&output));
        assert!(text.contains("ermission denied") && text.contains("as root"), "{words:?}: {text}");
        assert_eq!(stdout(&output), "", "{words:?}");
    }
}

#[test]
fn a_missing_right_is_not_taken_for_nothing() {
    let Some(open) = Open::new() else { return };
    for dir in ["vms", "regions", "volumes"] {
        let record = open.path().join(dir).join(if dir == "regions" { ".one" } else { "one" });
        fs::create_dir_all(&record).unwrap();
        fs::set_permissions(record.parent().unwrap(), PermissionsExt::from_mode(0o700)).unwrap();
    }
    for words in [&["vm", "list"] as &[&str], &["region", "list"], &["volume", "detach", "--all"]] {
        open.refuses_nobody(words);
    }
    for (dir, record) in [("vms", "one"), ("regions", ".one")] {
        fs::set_permissions(open.path().join(dir), PermissionsExt::from_mode(0o755)).unwrap();
        fs::set_permissions(open.path().join(dir).join(record), PermissionsExt::from_mode(0o700))
            .unwrap();
    }
    for words in [&["vm", "list"] as &[&str], &["region", "list"]] {
        open.refuses_nobody(words);
    }
}

#[test]
fn a_user_without_access_to_the_agent_is_told_so() {
    let Some(open) = Open::new() else { return };
    let socket = open.path().join("agent.sock");
    let _agent = UnixListener::bind(&socket).unwrap();
    fs::set_permissions(&socket, PermissionsExt::from_mode(0o600)).unwrap();
    for words in [&["status"] as &[&str], &["host", "borrow", "--size", "64M"], &["host", "return"]]
    {
        open.refuses_nobody(words);
    }
}

#[test]
fn commands_of_its_own_processes_are_named_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    for word in ["volume", "region", "vm"] {
        let near = &word[..word.len() - 1];
        let refused = aquifer(dir.path()).args(["serve", near]).output().unwrap();
        assert_eq!(refused.status.code(), Some(2), "{near}");
        assert!(!stderr(&refused).contains(&format!("'{word}'")), "{}", stderr(&refused));
    }
    let refused = aquifer(dir.path()).arg("laod").output().unwrap();
    assert!(!stderr(&refused).contains("'load'"), "{}", stderr(&refused));
}

#[test]
fn warnings_and_failures_are_json_lines_if_asked() {
    let dir = tempfile::tempdir().unwrap();
    let groups = dir.path().join("groups").display().to_string();
    let words = ["region", "create", "one", "--size", "4M", "--cache", "1M", "--group", "blue"];
    let lender = ["--lender", "nbd+unix:///?socket=/nowhere", "--groups", &groups];
    let run = |more: &[&str]| {
        let output = aquifer(dir.path()).args(words).args(lender).args(more).output().unwrap();
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(1), ""));
        stderr(&output)
    };
    let text = run(&[]);
    assert!(text.starts_with("aquifer: warning: joining group 'blue': "), "{text}");
    let lines: Vec<serde_json::Value> =
        run(&["--json"]).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [warning, error] = &lines[..] else { panic!("{lines:?}") };
    assert!(warning["warning"]["why"].as_str().unwrap().contains("blue.toml"), "{warning}");
    assert!(error["error"]["what"].as_str().unwrap().contains("/nowhere"), "{error}");
}

#[test]
fn help_of_subcommands_has_examples_and_exit_status() {
    let dir = tempfile::tempdir().unwrap();
    for words in [["region", "show"], ["serve", "dedup"], ["vm", "start"]] {
        let help = stdout(&aquifer(dir.path()).args(words).arg("--help").output().unwrap());
        for part in ["Examples:", &format!("aquifer {}", words.join(" ")), "Exit status:"] {
            assert!(help.contains(part), "no '{part}' in\n{help}");
        }
    }
}

#[test]
fn a_demo_without_its_program_names_what_to_install() {
    let dir = tempfile::tempdir().unwrap();
    let (binary, alone) = (env!("CARGO_BIN_EXE_aquifer"), dir.path().join("aquifer"));
    fs::hard_link(binary, &alone).or_else(|_| fs::copy(binary, &alone).map(drop)).unwrap();
    let demo = |words: &[&str]| {
        let output = Command::new(&alone).args(words).env("PATH", dir.path()).output().unwrap();
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(1), ""), "{words:?}");
        stderr(&output)
    };
    for words in [&["demo", "sharing"] as &[&str], &["demo", "--help"]] {
        let text = demo(words);
        assert!(text.starts_with("aquifer: running 'aquifer-demo': "), "{text}");
        assert!(text.contains("\n  help: install 'aquifer-demo' beside 'aquifer'"), "{text}");
    }
    let refusal: serde_json::Value =
        serde_json::from_str(&demo(&["--json", "demo", "sharing"])).unwrap();
    assert_eq!(refusal["error"]["what"], "running 'aquifer-demo'");
}

#[test]
fn a_log_level_that_is_none_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    for (value, named) in
        [("loud", "'loud'"), ("aquifer_agent=loud", "AQUIFER_LOG=aquifer_agent=loud")]
    {
        let output = aquifer(dir.path()).args(AGENT).env("AQUIFER_LOG", value).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let text = stderr(&output);
        assert!(text.contains("AQUIFER_LOG") && text.contains(named), "{text}");
    }
}

#[test]
fn init_refuses_an_empty_list_of_hosts_and_duplicates() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = dir.path().join("cluster");
    let init = |words: &[&str]| {
        let output = aquifer(dir.path())
            .args(["cluster", "init", "--dir"])
            .arg(&cluster)
            .args(words)
            .output()
            .unwrap();
        assert!(!cluster.exists(), "{words:?} leaves {cluster:?}");
        (output.status.code(), stderr(&output))
    };
    let (code, text) = init(&[]);
    assert!(code == Some(2) && text.contains("--host"), "{text}");
    let one = ["--host", "a", "--address", "192.0.2.1"];
    let (code, text) = init(&[one.as_slice(), &["--host", "b"]].concat());
    assert!(code == Some(2) && text.contains("2 hosts and 1 addresses"), "{text}");
    let (code, text) = init(&[one, ["--host", "a", "--address", "192.0.2.2"]].concat());
    assert!(code == Some(1) && text.contains("twice"), "{text}");
    let (code, text) = init(&[one, ["--host", "b", "--address", "192.0.2.1"]].concat());
    assert!(code == Some(1) && text.contains("192.0.2.1"), "{text}");
}

#[test]
fn a_vm_of_a_group_that_is_not_there_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let groups = dir.path().join("groups");
    let aquifer = |words: &[&str]| {
        aquifer(dir.path()).args(words).env("AQUIFER_GROUPS", &groups).output().unwrap()
    };
    let start = ["vm", "start", "one", "--memory", "64M"];
    let cached = ["--cache", "64M", "--emulate-link", "1us", "--group", "nosuch"];
    let refused = stderr(&aquifer(&[&start[..], &cached].concat()));
    assert!(refused.contains("'nosuch'") && refused.contains("no group"), "{refused}");
    for group in ["blue", "red"] {
        assert!(aquifer(&["group", "create", group]).status.success());
    }
    let refused = stderr(&aquifer(&[&start[..], &cached].concat()));
    assert!(
        refused.contains("only blue, red") && refused.contains("group create nosuch"),
        "{refused}"
    );
    let refused = aquifer(&[&start[..], &["--cache", "none", "--group", "blue"]].concat());
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("--cache"), "{}", stderr(&refused));
}

#[test]
fn locked_memory_that_is_too_much_asks_for_more_local_ram() {
    if lacks_cgroups() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let lock = "import ctypes, mmap\n\
        libc = ctypes.CDLL(None, use_errno=True)\n\
        assert libc.mlockall(2) == 0\n\
        kept = mmap.mmap(-1, 256 << 20)\n";
    let export = serve(dir.path(), &["512M"]);
    let mut run = aquifer(dir.path());
    run.args([
        "run",
        "--local",
        "64M",
        "--priority",
        "100",
        "--lender",
        export.uri(),
        "--",
        "python3",
        "-c",
        lock,
    ]);
    let output = run.output().unwrap();
    let text = stderr(&output);
    assert!(text.contains("out of memory"), "{:?} {text}", output.status);
    assert!(text.contains("mlock") && text.contains("with --local"), "{text}");
}

/// Writes the record of an adopted VM without a QEMU: enough for `vm show`.
fn adopt(dir: &Path, name: &str) -> PathBuf {
    let vm = dir.join("vms").join(name);
    fs::create_dir_all(&vm).unwrap();
    let qmp = dir.join("theirs.qmp");
    let record = serde_json::json!({
        "origin": {"adopted": {"qmp": qmp, "agent": null}},
        "pid": null, "ended": null, "incoming": null, "handed_over": null,
        "awaiting_source": null,
    });
    fs::write(vm.join("record.json"), record.to_string()).unwrap();
    symlink(&qmp, vm.join("control")).unwrap();
    qmp
}

#[test]
fn an_adopted_vm_is_shown_with_its_own_paths() {
    let dir = tempfile::tempdir().unwrap();
    let qmp = adopt(dir.path(), "theirs");
    let output = aquifer(dir.path()).args(["vm", "show", "theirs"]).output().unwrap();
    let text = stdout(&output);
    assert!(text.contains(qmp.to_str().unwrap()), "{text}{}", stderr(&output));
    for ours in ["serial", "console"] {
        assert!(!text.contains(ours), "{text}");
    }
    let output = aquifer(dir.path()).args(["vm", "show", "theirs", "--json"]).output().unwrap();
    let shown: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(
        (&shown["qmp"], &shown["serial"]),
        (&qmp.to_str().unwrap().into(), &serde_json::Value::Null)
    );
}

/// Imitates a QEMU that obeys its monitor, with a guest that ignores all requests.
fn deaf_guest(monitor: UnixListener) {
    std::thread::spawn(move || {
        for mut client in monitor.incoming().flatten() {
            std::thread::spawn(move || -> std::io::Result<()> {
                client.write_all(
                    b"{\"QMP\": {\"version\": {\"qemu\": {}, \"package\": \"\"}, \
                      \"capabilities\": []}}\r\n",
                )?;
                for order in BufReader::new(client.try_clone()?).lines() {
                    let id = serde_json::from_str::<serde_json::Value>(&order?)?["id"].clone();
                    let answer = serde_json::json!({
                        "return": {"status": "running", "running": true},
                        "id": id,
                    });
                    client.write_all(format!("{answer}\r\n").as_bytes())?;
                }
                Ok(())
            });
        }
    });
}

#[test]
fn a_stop_says_at_once_how_long_it_waits_for_a_deaf_guest() {
    let dir = tempfile::tempdir().unwrap();
    let vm = dir.path().join("vms/one");
    fs::create_dir_all(&vm).unwrap();
    let spec = serde_json::json!({
        "name": "one", "memory": 64 << 20, "max_memory": 64 << 20,
        "backing": {"local": {"huge": null}}, "cpus": 1,
        "accelerator": "tcg", "machine": "q35", "disks": [],
        "kernel": null, "initrd": null, "append": null,
        "qemu": "qemu", "preload": "preload", "extra": [],
    });
    let record = serde_json::json!({"origin": {"started": spec}, "pid": null, "ended": null});
    fs::write(vm.join("record.json"), record.to_string()).unwrap();
    deaf_guest(UnixListener::bind(vm.join("control")).unwrap());

    let mut stop = aquifer(dir.path());
    let mut stop =
        stop.args(["vm", "stop", "one", "--timeout", "2s"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(stop.stderr.take().unwrap()).lines().map(Result::unwrap);
    let first = said.next().unwrap();
    assert!(
        first.contains("waiting for the guest of VM 'one'") && first.contains("at most 2s"),
        "{first}"
    );
    assert!(stop.try_wait().unwrap().is_none(), "'vm stop' must print the timeout before it ends");
    assert_eq!(stop.wait().unwrap().code(), Some(1));
    let rest: Vec<_> = said.collect();
    assert!(rest.join("\n").contains("--force"), "{rest:?}");
}
