//! Tests of the API's description by public tools: it is valid, and a real agent keeps to it.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use aquifer_hosts::Host;
use aquifer_store::tmpfs::stores;

use crate::common::{binary, stderr, stdout, wait_until};

/// Returns the root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn document() -> PathBuf {
    root().join("docs/reference/openapi.json")
}

/// Returns a public tool, and installs it if need be.
fn tool(name: &str) -> Command {
    let installed = Command::new(root().join("scripts/openapi-tools")).output().unwrap();
    assert!(installed.status.success(), "{}", stderr(&installed));
    Command::new(Path::new(stdout(&installed).trim()).join(name))
}

/// A running agent of host `a`, of a cluster with `b`.
struct Agent {
    hosts: Vec<Host>,
    dir: tempfile::TempDir,
}

impl Agent {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Loopback addresses that no other test process has.
        let [.., two, one] = std::process::id().to_be_bytes();
        let [a, b] = [10, 11].map(|host| Ipv4Addr::new(127, host, two, one.clamp(1, 254)));
        let stores = stores().unwrap().join(format!("openapi-{}", std::process::id()));
        let hosts = Host::admit(&binary(), dir.path(), &stores, &[("a", a), ("b", b)]).unwrap();
        let agent = Self { hosts, dir };
        let spill = agent.dir.path().join("spill");
        let sections = format!("[borrow]\nenabled = false\nspill = {spill:?}");
        agent.host().set(&sections).unwrap();
        agent.host().start(|command| _ = command.env_remove("AQUIFER_LOG")).unwrap();
        wait_until("the agent answers", || agent.host().is_ready().unwrap());
        agent
    }

    fn host(&self) -> &Host {
        &self.hosts[0]
    }

    /// Asserts that the agent keeps to the description of one tag, in tests of `seconds`.
    #[track_caller]
    fn keeps_to(&self, tag: &str, url: &str, seconds: u32) {
        let tls = self.hosts[1].tls();
        let mut schemathesis = tool("schemathesis");
        schemathesis.arg("run").arg(document()).args([
            "--url",
            url,
            "--include-tag",
            tag,
            "--checks",
            "all",
        ]);
        schemathesis.args([
            "--seed",
            "1",
            "--max-time",
            &seconds.to_string(),
            "--warnings",
            "off",
            "--no-color",
        ]);
        schemathesis.arg("--tls-verify").arg(tls.join("ca.pem"));
        schemathesis.arg("--request-cert").arg(tls.join("host.pem"));
        schemathesis.arg("--request-cert-key").arg(tls.join("host.key"));
        let output =
            schemathesis.current_dir(self.dir.path()).stdin(Stdio::null()).output().unwrap();
        let log = self.host().log_text();
        assert!(output.status.success(), "{}{}\n{log}", stdout(&output), stderr(&output));
        assert!(self.host().check().is_ok() && !log.contains("panicked"), "{log}");
    }
}

/// Makes a unix socket reachable over TCP while this process lives, for tools that know TCP only.
fn forward(socket: PathBuf) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = UnixStream::connect(&socket) else { return };
            thread::spawn(move || exchange(&client, &server));
        }
    });
    address
}

fn exchange(client: &TcpStream, server: &UnixStream) {
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = io::copy(&mut &*client, &mut &*server);
            let _ = server.shutdown(Shutdown::Write);
        });
        let _ = io::copy(&mut &*server, &mut &*client);
        let _ = client.shutdown(Shutdown::Both);
    });
}

#[test]
fn a_refusal_leaves_the_connection_open_unless_it_says_so() {
    let agent = Agent::start();
    let mut stream = UnixStream::connect(agent.host().socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut refused = |line: &str, kind: &str, length: usize| {
        let head = format!(
            "{line} HTTP/1.1\r\nhost: a\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n"
        );
        // The body comes after the agent has read the head.
        stream.write_all(head.as_bytes()).unwrap();
        thread::sleep(Duration::from_millis(50));
        let sent = stream.write_all(&vec![b' '; length.min(4 << 20)]);
        let mut answer = vec![0; 4096];
        let length = stream.read(&mut answer).unwrap();
        answer.truncate(length);
        (sent.is_ok(), String::from_utf8(answer).unwrap())
    };
    for (line, kind, status) in [
        ("POST /v1/claim", "text/plain", "415"),
        ("PUT /v1/claim", "application/json", "405"),
        ("POST /v1/nothing", "application/json", "404"),
        ("POST /v1/claim", "application/json", "400"),
    ] {
        let (sent, answer) = refused(line, kind, 7);
        assert!(sent && answer.contains(status) && !answer.contains("close"), "{line}: {answer}");
    }
    let (_, answer) = refused("POST /v1/claim", "application/json", 1 << 30);
    assert!(answer.contains("413") && answer.contains("connection: close"), "{answer}");
}

#[test]
fn the_description_is_valid() {
    let output = tool("openapi-spec-validator").arg(document()).output().unwrap();
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
}

#[test]
fn an_agent_answers_peers_and_operators_as_described() {
    let agent = Agent::start();
    agent.keeps_to("peers", &format!("https://{}", agent.host().api()), 18);
    let orders = forward(agent.host().socket());
    agent.keeps_to("orders", &format!("http://{orders}"), 8);
}
