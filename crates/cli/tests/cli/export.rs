//! Tests of `aquifer serve export` as a program: real clients can use it, and it leaves nothing
//! behind.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{chown, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use aquifer_hosts::daemon::EXPORT;
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{aquifer, init_two, serve, stderr, stdout, wait_until};

/// Returns the command of an export that is to be refused, or that a test starts by itself.
fn export(run_dir: &Path, words: &[&str]) -> Command {
    let mut export = aquifer(run_dir);
    export.args(EXPORT).args(words);
    export
}

/// Returns whether a program is not installed here.
fn lacks_program(program: &str) -> bool {
    let lacks = Command::new(program).arg("--version").output().is_err();
    if lacks {
        eprintln!("skipped: needs {program}");
    }
    lacks
}

#[test]
fn a_real_client_finds_the_device_it_was_promised() {
    if lacks_program("nbdinfo") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let export = serve(dir.path(), &["100M"]);
    assert_eq!(export.ready["capacity"], 100 << 20);
    let output = Command::new("nbdinfo").args(["--size", export.uri()]).output().unwrap();
    assert_eq!(stdout(&output).trim(), (100 << 20).to_string(), "{}", stderr(&output));
}

#[test]
fn several_addresses_and_a_name_lead_to_the_same_device() {
    if lacks_program("nbdinfo") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", dir.path().join("a.sock").display());
    let export =
        serve(dir.path(), &["1M", "--nbd", &socket, "--nbd", "127.0.0.1:0", "--name", "disk"]);
    let uris: Vec<_> =
        export.ready["uris"].as_array().unwrap().iter().map(|uri| uri.as_str().unwrap()).collect();
    assert_eq!(uris.len(), 2);
    for uri in uris {
        let output = Command::new("nbdinfo").args(["--size", uri]).output().unwrap();
        assert_eq!(stdout(&output).trim(), "1048576", "{uri}: {}", stderr(&output));
    }
}

#[test]
fn nvme_hosts_are_told_where_and_as_what() {
    let dir = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", dir.path().join("n.sock").display());
    let host = "nqn.2014-08.org.example:host";
    let export = serve(
        dir.path(),
        &["1M", "--nvme", &socket, "--nvme", "127.0.0.1:0", "--allow-host", host],
    );
    assert!(export.ready["uri"].is_null() && !dir.path().join("export.sock").exists());
    let nvme = &export.ready["nvme"];
    assert!(nvme["nqn"].as_str().unwrap().starts_with("nqn.2014-08.org.nvmexpress:uuid:"));
    assert_eq!(nvme["addresses"][0], *socket);
    // The URIs can be pasted after 'aquifer volume attach'.
    let nqn = nvme["nqn"].as_str().unwrap();
    let unix = format!("nvme+unix:///{nqn}?socket={}", socket.trim_start_matches("unix:"));
    assert_eq!(nvme["uris"][0], unix);
    assert!(nvme["uris"][1].as_str().unwrap().starts_with("nvme+tcp://127.0.0.1:"), "{nvme}");
    let port = nvme["addresses"][1].as_str().unwrap().strip_prefix("127.0.0.1:").unwrap();
    std::net::TcpStream::connect(("127.0.0.1", port.parse().unwrap())).unwrap();
    assert!(dir.path().join("n.sock").exists());
}

#[test]
fn nvme_serves_this_host_only_or_hosts_with_the_secret() {
    let dir = tempfile::tempdir().unwrap();
    let output = export(dir.path(), &["1M", "--nvme", "0.0.0.0:4420"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("other host could reach it"), "{}", stderr(&output));
    let output = export(dir.path(), &["1M", "--allow-host", "x"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let file = dir.path().join("secret");
    let with_secret = ["1M", "--nvme", "0.0.0.0:0", "--dhchap-secret", file.to_str().unwrap()];
    for (content, why) in [("", "the file is empty"), ("DHHC-1:00:AAAA:", "too short")] {
        fs::write(&file, content).unwrap();
        let output = export(dir.path(), &with_secret).output().unwrap();
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
    }
    fs::write(&file, "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:\n").unwrap();
    serve(dir.path(), &with_secret);
}

#[test]
fn nothing_outlives_it() {
    let dir = tempfile::tempdir().unwrap();
    for signal in [Signal::TERM, Signal::INT] {
        let mut export = serve(dir.path(), &["64M"]);
        assert!(export.pages().exists());
        assert_eq!(export.end(signal).unwrap(), Some(0));
        assert!(!export.pages().exists() && !dir.path().join("export.sock").exists());
    }
}

#[test]
fn a_directory_that_the_user_gave_stays_and_is_empty() {
    let dir = tempfile::tempdir().unwrap();
    let pages = tempfile::tempdir_in("/dev/shm").unwrap();
    let left = || fs::read_dir(pages.path()).unwrap().count();
    for more in [&[][..], &["--share"], &["--report", "10s"]] {
        let words = ["1M", "--dir", pages.path().to_str().unwrap()];
        let mut export = serve(dir.path(), &[&words[..], more].concat());
        assert!(left() > 1);
        assert_eq!(export.end(Signal::TERM).unwrap(), Some(0));
        assert_eq!(left(), 0, "{more:?}");
    }
}

#[test]
fn the_next_export_removes_the_leftovers_of_a_killed_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut killed = serve(dir.path(), &["64M"]);
    killed.end(Signal::KILL).unwrap();
    assert!(killed.pages().exists());
    let next = serve(dir.path(), &["64M"]);
    assert!(!killed.pages().exists() && next.pages().exists());
}

#[test]
fn an_export_leaves_a_directory_with_its_process_id_alone() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root to make a directory for another export");
    }
    let dir = tempfile::tempdir().unwrap();
    // The first export of a host mounts the tmpfs.
    drop(serve(dir.path(), &["1M"]));
    let own = export(dir.path(), &["1M", "--json"]);
    // The shell becomes the export, with the same id.
    let script = "other=/dev/shm/aquifer/export-$$; mkdir -p $other && touch $other/precious && \
                  exec \"$@\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh"]).arg(own.get_program()).args(own.get_args());
    let mut child = shell.stdout(Stdio::piped()).spawn().unwrap();
    let other = Path::new("/dev/shm/aquifer").join(format!("export-{}", child.id()));
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let end = child.wait().unwrap();
    let precious = other.join("precious").exists();
    fs::remove_dir_all(&other).unwrap();
    assert!(end.success() && precious, "{end}: {line}");
}

#[test]
fn strangers_on_the_network_get_nothing_without_tls() {
    let dir = tempfile::tempdir().unwrap();
    let output = export(dir.path(), &["1M", "--nbd", "0.0.0.0:0"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("help: give --tls DIR"), "{}", stderr(&output));
}

#[test]
fn with_tls_a_client_without_a_certificate_gets_nothing() {
    if lacks_program("nbdinfo") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let cluster = dir.path().join("cluster");
    init_two(&cluster);
    let tls = cluster.join("a/tls");
    let export = serve(dir.path(), &["1M", "--nbd", "127.0.0.1:0", "--tls", tls.to_str().unwrap()]);
    assert!(export.uri().starts_with("nbds://127.0.0.1:"), "{}", export.uri());
    let plain = export.uri().replacen("nbds", "nbd", 1);
    assert!(!Command::new("nbdinfo").arg(plain).output().unwrap().status.success());
}

#[test]
fn an_address_that_is_taken_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let first = serve(dir.path(), &["1M", "--nbd", "127.0.0.1:0"]);
    let address = first.uri().trim_start_matches("nbd://").trim_end_matches('/');
    let output = export(dir.path(), &["1M", "--nbd", address]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains(address), "{}", stderr(&output));
    wait_until("the refused export has removed its memory", || {
        fs::read_dir(dir.path().join("exports")).unwrap().count() == 1
    });
}

#[test]
fn it_says_nothing_more_after_it_is_ready() {
    let dir = tempfile::tempdir().unwrap();
    let mut export = serve(dir.path(), &["1M"]);
    assert_eq!(export.end(Signal::TERM).unwrap(), Some(0));
    assert!(export.daemon.report().unwrap_err().why.contains("it ended with"));
}

/// A user id that is neither root's nor this user's.
const OTHER_UID: u32 = 61_234;

#[test]
fn an_export_refuses_a_directory_of_another_user() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root to make another user's directory");
    }
    let dir = tempfile::tempdir().unwrap();
    let pages = tempfile::tempdir_in("/dev/shm").unwrap();
    let precious = dir.path().join("precious");
    fs::write(&precious, "not the store's").unwrap();
    symlink(&precious, pages.path().join("lock")).unwrap();
    chown(pages.path(), Some(OTHER_UID), None).unwrap();
    let output = export(dir.path(), &["1M", "--dir"]).arg(pages.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let named = format!("{} belongs to user {OTHER_UID}", pages.path().display());
    assert!(stderr(&output).contains(&named), "{}", stderr(&output));
    assert_eq!(fs::read_to_string(&precious).unwrap(), "not the store's");
}

#[test]
fn a_users_export_keeps_its_pages_in_the_runtime_directory() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root to run as another user");
    }
    let [dir, runtime] = ["/tmp", "/dev/shm"].map(|at| tempfile::tempdir_in(at).unwrap());
    for own in [&dir, &runtime] {
        chown(own.path(), Some(OTHER_UID), None).unwrap();
    }
    let export = || {
        let mut export = export(dir.path(), &["1M", "--json"]);
        export.env_remove("XDG_RUNTIME_DIR");
        export.uid(OTHER_UID);
        export
    };
    let output = match export().output() {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            return eprintln!("skipped: other users cannot read the program's directory");
        }
        output => output.unwrap(),
    };
    assert!(stderr(&output).contains("XDG_RUNTIME_DIR"), "{}", stderr(&output));
    assert!(stderr(&output).contains("--dir"), "{}", stderr(&output));

    let mut child = export();
    child.env("XDG_RUNTIME_DIR", runtime.path()).stdout(Stdio::piped());
    let mut child = child.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let ready: serde_json::Value = serde_json::from_str(&line).unwrap();
    let pages = std::path::PathBuf::from(ready["dir"].as_str().unwrap());
    let is_there = pages.is_dir() && pages.starts_with(runtime.path().join("aquifer"));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success() && is_there, "{line}");
    assert!(!pages.exists());
}

#[test]
fn limits_that_starve_clients_are_refused_with_the_least() {
    let dir = tempfile::tempdir().unwrap();
    for (words, why, help) in [
        (["--host-bytes", "4K"], "--host-bytes 4KiB is too low", "set at least 1MiB"),
        (["--lease-requests", "0"], "--lease-requests 0 is too low", "set at least 256"),
        (["--host-connections", "1"], "--host-connections 1 is too low", "set at least 8"),
    ] {
        let output = export(dir.path(), &[&["1M"], &words[..]].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let error = stderr(&output);
        assert!(error.contains(why) && error.contains(help), "{error}");
    }
}

#[test]
fn a_client_over_the_limit_of_connections_is_told_why() {
    let dir = tempfile::tempdir().unwrap();
    let export = serve(dir.path(), &["1M", "--host-connections", "8"]);
    let path = dir.path().join("export.sock");
    let open = || {
        let address = aquifer_transport::Address::Unix(path.clone());
        let target = aquifer_nbd::client::Target { address, export: String::new(), tls: None };
        aquifer_nbd::client::Connection::connect(target.into(), std::time::Duration::from_secs(60))
    };
    let all: Vec<_> = (0..8).map(|_| open().unwrap()).collect();
    let refused = open().unwrap_err().to_string();
    let reason = "this host has 8 connections here, the lender's limit for a host";
    assert!(refused.contains(reason), "{refused}");
    drop(all);
    wait_until("the export to have room", || open().is_ok());
    drop(export);
}
