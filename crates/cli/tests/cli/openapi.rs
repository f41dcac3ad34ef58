//! Tests of the API's description by public tools: it is valid, and a real agent keeps to it.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;

use aquifer_store::tmpfs::stores;

use crate::common::{aquifer, eventually, stderr, stdout};
use rustix::process::{Pid, Signal, kill_process};

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
    child: Child,
    dir: tempfile::TempDir,
    store: PathBuf,
    address: Ipv4Addr,
}

impl Agent {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Loopback addresses that no other test process has.
        let [.., two, one] = std::process::id().to_be_bytes();
        let [a, b] = [10, 11].map(|host| Ipv4Addr::new(127, host, two, one.clamp(1, 254)));
        let mut init = aquifer(dir.path());
        init.args(["cluster", "init", "--dir"]).arg(dir.path());
        init.args([
            "--host",
            "a",
            "--address",
            &a.to_string(),
            "--host",
            "b",
            "--address",
            &b.to_string(),
        ]);
        let output = init.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let store = stores().unwrap().join(format!("openapi-{}", std::process::id()));
        let path = |name: &str| toml::Value::from(dir.path().join(name).to_str().unwrap());
        let config = dir.path().join("a/agent.toml");
        let mut table: toml::Table = fs::read_to_string(&config).unwrap().parse().unwrap();
        table.insert("tls".to_owned(), path("a/tls"));
        table.insert("socket".to_owned(), path("agent.sock"));
        table.insert("state".to_owned(), path("state"));
        table.insert("store".to_owned(), store.to_str().unwrap().into());
        let borrow = toml::Table::from_iter([
            ("enabled".to_owned(), false.into()),
            ("spill".to_owned(), path("spill")),
        ]);
        table.insert("borrow".to_owned(), borrow.into());
        fs::write(&config, table.to_string()).unwrap();
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let mut agent = aquifer(dir.path());
        agent
            .args(["serve", "agent"])
            .arg("--config")
            .arg(config)
            .stderr(log)
            .env_remove("AQUIFER_LOG");
        let child = agent.spawn().unwrap();
        let agent = Self { child, dir, store, address: a };
        eventually("the agent answers", || UnixStream::connect(agent.path("agent.sock")).is_ok());
        agent
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Asserts that the agent keeps to the description of one tag, in tests of `seconds`.
    #[track_caller]
    fn keeps_to(&mut self, tag: &str, url: &str, seconds: u32) {
        let tls = self.path("b/tls");
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
        let log = fs::read_to_string(self.path("log")).unwrap();
        assert!(output.status.success(), "{}{}\n{log}", stdout(&output), stderr(&output));
        assert!(self.child.try_wait().unwrap().is_none() && !log.contains("panicked"), "{log}");
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.store);
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
fn the_description_is_valid() {
    let output = tool("openapi-spec-validator").arg(document()).output().unwrap();
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
}

#[test]
fn an_agent_answers_peers_and_operators_as_described() {
    let mut agent = Agent::start();
    agent.keeps_to("peers", &format!("https://{}:7070", agent.address), 18);
    let orders = forward(agent.path("agent.sock"));
    agent.keeps_to("orders", &format!("http://{orders}"), 8);
}
