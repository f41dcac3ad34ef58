//! Tests of the agent with a fake host and a fake root directory.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use aquifer_page::Bytes;

use super::Options;
use super::event_loop::Agent;
use crate::client::{Client, RequestError};
use crate::message::{ToGuest, ToHost, VERSION, encode};

const DEADLINE: Duration = Duration::from_secs(120);
const TIMEOUT: Duration = Duration::from_secs(120);

/// A machine with an agent.
struct Machine {
    dir: tempfile::TempDir,
    host: UnixListener,
    stop: Arc<AtomicBool>,
    agent: Option<JoinHandle<()>>,
}

impl Machine {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir(root.join("proc")).unwrap();
        fs::write(root.join("proc/vmstat"), "oom_kill 0\n").unwrap();
        let block = root.join("sys/devices/system/memory/memory8");
        fs::create_dir_all(&block).unwrap();
        fs::write(block.join("state"), "online\n").unwrap();
        fs::write(block.parent().unwrap().join("block_size_bytes"), "8000000\n").unwrap();
        let host = UnixListener::bind(root.join("port")).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let mut machine = Self { dir, host, stop, agent: None };
        machine.has_available(Bytes::mib(900));
        let options = Options {
            port: Some(machine.dir.path().join("port")),
            socket: machine.socket(),
            root: machine.dir.path().to_owned(),
            ..Options::default()
        };
        let mut agent = Agent::start(options).unwrap();
        let stop = Arc::clone(&machine.stop);
        machine.agent = Some(thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                agent.run_once().unwrap();
            }
        }));
        machine
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    fn client(&self) -> Client {
        Client::at(&self.socket())
    }

    /// Sets the available memory. A concurrent reader sees the old or the new value.
    fn has_available(&self, bytes: Bytes) {
        let text = format!("MemTotal: 1048576 kB\nMemAvailable: {:>10} kB\n", bytes.0 >> 10);
        let path = self.dir.path().join("proc/meminfo");
        let file = File::options().write(true).create(true).truncate(false).open(path).unwrap();
        file.write_all_at(text.as_bytes(), 0).unwrap();
    }

    /// Accepts the agent's connection and its `Hello`.
    fn host(&self) -> FakeHost {
        let (stream, _) = self.host.accept().unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut host = FakeHost { stream: BufReader::new(stream) };
        let mut line = String::new();
        host.stream.read_line(&mut line).unwrap();
        assert_eq!(line, "\n");
        assert!(matches!(host.hear(), ToHost::Hello { version: VERSION, .. }));
        host
    }

    fn ask_for(&self, bytes: Bytes) -> JoinHandle<Result<crate::Granted, RequestError>> {
        let client = self.client();
        thread::spawn(move || client.request(bytes, TIMEOUT, "a test"))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the agent.
        let _ = UnixStream::connect(self.socket());
        if let Some(agent) = self.agent.take() {
            let ended = agent.join();
            assert!(thread::panicking() || ended.is_ok(), "the agent has failed");
        }
    }
}

struct FakeHost {
    stream: BufReader<UnixStream>,
}

impl FakeHost {
    fn say(&mut self, message: &ToGuest) {
        self.stream.get_mut().write_all(&encode(message).unwrap()).unwrap();
    }

    fn hear(&mut self) -> ToHost {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    fn hear_request(&mut self) -> (u64, i64, bool) {
        match self.hear() {
            ToHost::Request { id, bytes, urgent, .. } => (id, bytes, urgent),
            other => panic!("no request: {other:?}"),
        }
    }

    fn grant(&mut self, id: u64, granted: i64) {
        let (size, missing) = (Bytes::gib(1), Bytes::ZERO);
        self.say(&ToGuest::Answer { id, granted, size, missing, why: None });
    }
}

#[test]
fn every_host_that_comes_is_greeted() {
    let machine = Machine::start();
    drop(machine.host());
    let mut host = machine.host();
    host.stream.get_mut().write_all(b"{\"say\":\"nonsense\"}\n\n").unwrap();
    assert!(
        matches!(host.hear(), ToHost::Hello { .. }),
        "an empty line may be another host's first"
    );
}

#[test]
fn a_check_brings_memory_online_and_says_what_there_is() {
    let machine = Machine::start();
    let block = machine.dir.path().join("sys/devices/system/memory/memory9");
    fs::create_dir(&block).unwrap();
    fs::write(block.join("state"), "offline\n").unwrap();
    let mut host = machine.host();
    host.say(&ToGuest::Check { id: 5, total: Bytes::ZERO });
    let ToHost::Checked { id: 5, report } = host.hear() else { panic!("no answer to the check") };
    assert_eq!(fs::read_to_string(block.join("state")).unwrap(), "online_movable");
    assert_eq!((report.total, report.available), (Bytes::gib(1), Bytes::mib(900)));
    assert_eq!((report.blocks.online, report.blocks.block), (Bytes::mib(128), Bytes::mib(128)));
}

#[test]
fn reports_keep_the_period_of_the_host_and_end_on_request() {
    let machine = Machine::start();
    let mut host = machine.host();
    host.say(&ToGuest::Watch { period_ms: 50, urgent_below: Bytes::ZERO });
    for _ in 0..3 {
        assert!(matches!(host.hear(), ToHost::Report(_)));
    }
    host.say(&ToGuest::Watch { period_ms: 0, urgent_below: Bytes::ZERO });
    host.say(&ToGuest::Check { id: 1, total: Bytes::ZERO });
    while !matches!(host.hear(), ToHost::Checked { id: 1, .. }) {}
    host.say(&ToGuest::Check { id: 2, total: Bytes::ZERO });
    assert!(matches!(host.hear(), ToHost::Checked { id: 2, .. }));
}

#[test]
fn each_of_many_applications_gets_the_answer_to_its_own_request() {
    let machine = Machine::start();
    let mut host = machine.host();
    let asking: Vec<_> = (1..=20).map(|n| machine.ask_for(Bytes::mib(n))).collect();
    let mut asked: Vec<_> = asking.iter().map(|_| host.hear_request()).collect();
    asked.reverse();
    for (id, bytes, urgent) in asked {
        assert!(!urgent);
        host.grant(id, bytes);
    }
    for (n, one) in (1..=20).zip(asking) {
        assert_eq!(one.join().unwrap().unwrap().granted, n << 20);
    }
}

#[test]
fn memory_is_given_back_by_a_negative_request() {
    let machine = Machine::start();
    let mut host = machine.host();
    let client = machine.client();
    let asking = thread::spawn(move || client.give_back(Bytes::mib(64), TIMEOUT, "a test"));
    let (id, bytes, _) = host.hear_request();
    assert_eq!(bytes, -(64 << 20));
    host.grant(id, -(32 << 20));
    assert_eq!(asking.join().unwrap().unwrap().granted, -(32 << 20));
}

#[test]
fn an_application_that_leaves_or_sends_nonsense_harms_no_other() {
    let machine = Machine::start();
    let mut host = machine.host();
    let mut gone = UnixStream::connect(machine.socket()).unwrap();
    gone.write_all(b"nonsense\n{\"ask\":\"resize\",\"bytes\":1,\"timeout_ms\":1000}\n").unwrap();
    let (first, bytes, _) = host.hear_request();
    assert_eq!(bytes, 1);
    drop(gone);
    let other = machine.ask_for(Bytes::mib(2));
    let (second, ..) = host.hear_request();
    host.grant(first, 1);
    host.grant(second, 2 << 20);
    assert_eq!(other.join().unwrap().unwrap().granted, 2 << 20);
}

#[test]
fn an_application_that_only_listens_still_gets_its_answer() {
    let machine = Machine::start();
    let mut host = machine.host();
    let mut stream = UnixStream::connect(machine.socket()).unwrap();
    stream.write_all(b"{\"ask\":\"resize\",\"bytes\":4096,\"timeout_ms\":1000}\n").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let (id, ..) = host.hear_request();
    host.grant(id, 4096);
    let mut answer = String::new();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    assert!(answer.contains("\"granted\":4096"), "{answer}");
}

#[test]
fn without_an_agent_or_a_host_an_application_is_told_so_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let absent = Client::at(&dir.path().join("socket"));
    let error = absent.request(Bytes::mib(1), TIMEOUT, "").unwrap_err();
    assert!(error.to_string().contains("start 'aquifer-guest run'"), "{error}");

    let machine = Machine::start();
    let host = machine.host();
    assert!(machine.client().show().unwrap().connected);
    let asking = machine.ask_for(Bytes::mib(1));
    let mut host = host;
    host.hear_request();
    drop(host);
    assert!(matches!(asking.join().unwrap(), Err(RequestError::HostAway(_))));
    assert!(!machine.client().show().unwrap().connected);
    let error = machine.client().request(Bytes::mib(1), TIMEOUT, "").unwrap_err();
    assert!(matches!(error, RequestError::HostAway(_)), "{error}");
}

#[test]
fn memory_that_runs_out_is_asked_for_at_once_and_once() {
    let machine = Machine::start();
    let mut host = machine.host();
    host.say(&ToGuest::Watch { period_ms: 0, urgent_below: Bytes::mib(100) });
    host.say(&ToGuest::Check { id: 1, total: Bytes::ZERO });
    assert!(matches!(host.hear(), ToHost::Checked { .. }), "there is enough at first");
    machine.has_available(Bytes::mib(50));
    let (id, bytes, urgent) = host.hear_request();
    assert!(urgent);
    assert_eq!(bytes, 256 << 20);
    assert_eq!(machine.client().show().unwrap().pending, 1);
    host.grant(id, 128 << 20);
    let answered = Instant::now();
    let (next, ..) = host.hear_request();
    assert!(next > id);
    assert!(
        answered.elapsed() >= Duration::from_millis(900),
        "what was granted is given time to do good"
    );
}

#[test]
fn a_kernel_that_does_not_trace_is_said_to_show_no_stage() {
    let machine = Machine::start();
    let mut host = machine.host();
    for on in [true, false] {
        host.say(&ToGuest::Trace { id: 3, on });
        let ToHost::Stages { id: 3, stages, missing } = host.hear() else { panic!("no answer") };
        assert!(stages.is_empty());
        assert!(missing.contains(&"onlining".to_owned()));
    }
}
