//! Tests of the command `aquifer-guest` with a fake host.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_guest_agent::message::{ToGuest, ToHost, encode};
use aquifer_page::Bytes;

const DEADLINE: Duration = Duration::from_secs(120);

fn command(socket: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aquifer-guest"));
    command.arg("--socket").arg(socket);
    command
}

fn run(socket: &Path, arguments: &[&str]) -> Output {
    command(socket).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).unwrap()
}

struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts an agent; returns it and the host's end of its port.
fn start(dir: &Path) -> (Agent, BufReader<UnixStream>) {
    let listener = UnixListener::bind(dir.join("port")).unwrap();
    let mut agent = command(&dir.join("socket"));
    // The test must not change this machine's memory.
    agent.args(["run", "--online", "leave", "--port"]).arg(dir.join("port")).stderr(Stdio::null());
    let agent = Agent(agent.spawn().unwrap());
    let (host, _) = listener.accept().unwrap();
    host.set_read_timeout(Some(DEADLINE)).unwrap();
    (agent, BufReader::new(host))
}

/// Answers the next request; returns its bytes and its purpose.
fn answer(
    host: &mut BufReader<UnixStream>,
    granted: i64,
    missing: Bytes,
    why: Option<&str>,
) -> (i64, String) {
    loop {
        let mut line = String::new();
        assert!(host.read_line(&mut line).unwrap() > 0, "the agent closed the port");
        let Ok(ToHost::Request { id, bytes, why: what_for, urgent: false, .. }) =
            serde_json::from_str(&line)
        else {
            continue;
        };
        let why = why.map(str::to_owned);
        let answer = ToGuest::Answer { id, granted, size: Bytes::gib(1), missing, why };
        host.get_mut().write_all(&encode(&answer).unwrap()).unwrap();
        return (bytes, what_for);
    }
}

#[test]
fn a_request_succeeds_only_if_all_is_granted_and_says_why_not() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let (_agent, mut host) = start(dir.path());

    let asking = thread::spawn({
        let socket = socket.clone();
        move || run(&socket, &["request", "+512M", "--why", "an index"])
    });
    let asked = answer(&mut host, 512 << 20, Bytes::ZERO, None);
    assert_eq!(asked, (512 << 20, "an index".to_owned()));
    let said = asking.join().unwrap();
    assert_eq!(text(&said.stdout), "512MiB more: this guest has 1GiB now\n");
    assert!(said.status.success());

    let asking = thread::spawn(move || run(&socket, &["request", "-512M"]));
    let asked = answer(&mut host, -(384 << 20), Bytes::mib(128), Some("the guest uses it"));
    assert_eq!(asked.0, -(512 << 20));
    let said = asking.join().unwrap();
    assert_eq!(
        text(&said.stdout),
        "384MiB less: this guest has 1GiB now\n\
         128MiB of the request is missing: the guest uses it\n"
    );
    assert_eq!(said.status.code(), Some(1));
}

#[test]
fn the_agents_view_is_shown_to_people_and_machines() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let (_agent, _host) = start(dir.path());
    let shown = run(&socket, &["show", "--json"]);
    let status: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert!(status["report"]["total"].as_u64().unwrap() > 0);
    let begun = Instant::now();
    while !text(&run(&socket, &["show"]).stdout).starts_with("host            connected\n") {
        assert!(begun.elapsed() < DEADLINE, "the host is connected");
    }
}

#[test]
fn without_an_agent_the_way_out_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let said = run(&dir.path().join("socket"), &["request", "+1M"]);
    assert_eq!(said.status.code(), Some(1));
    assert!(text(&said.stderr).contains("start 'aquifer-guest run'"), "{said:?}");
}
