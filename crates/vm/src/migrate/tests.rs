//! Tests of the destination: a real QEMU receives a VM through this code, from a forged source.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::io::Read as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, HostName, MigrationId};
use aquifer_transport::tls::Authority;
use serde_json::json;

use super::cpu::Cpu;
use super::destination::{Outcome, take_in};
use super::message::{Incoming, Message};
use super::source::release;
use super::wire::Wire;
use crate::process::Files;
use crate::qmp::Qmp;
use crate::spec::Place;
use crate::{Backing, VmSpec};

const TIMEOUT: Duration = Duration::from_secs(60);

fn spec() -> VmSpec {
    VmSpec::new("one".parse().unwrap(), Bytes::mib(32), Backing::Local { huge: None })
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !is() {
        assert!(Instant::now() < deadline, "still not: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A QEMU that ends with the test.
struct Qemu {
    child: Option<Child>,
    files: Files,
}

impl Qemu {
    /// Starts QEMU; returns `None` if this machine has none.
    fn start(run_dir: &Path, spec: &VmSpec, incoming: Option<&Incoming>) -> Option<Self> {
        let files = Files::new(run_dir, &spec.name);
        fs::create_dir_all(files.qmp().parent().unwrap()).unwrap();
        write(&files, spec, incoming);
        let none = Path::new("");
        let place = Place { region: none, cache: none, node: None, comes: incoming.is_some() };
        let mut command = spec.command(&files, &place);
        let child = command.stdin(Stdio::null()).spawn();
        let Ok(child) = child else {
            eprintln!("skipped: needs {}", spec.qemu.display());
            return None;
        };
        let qemu = Self { child: Some(child), files };
        until("QEMU answers", || Qmp::connect(&qemu.files.control(), TIMEOUT).is_ok());
        Some(qemu)
    }

    fn qmp(&self) -> Qmp {
        Qmp::connect(&self.files.control(), TIMEOUT).unwrap()
    }

    fn runs(&self) -> bool {
        self.qmp().execute("query-status", json!({})).unwrap()["running"] == true
    }

    /// Returns QEMU's device state.
    fn devices(&self, dir: &Path) -> Vec<u8> {
        let path = dir.join("saved");
        let listener = UnixListener::bind(&path).unwrap();
        let reading = thread::spawn(move || {
            let mut devices = Vec::new();
            listener.accept().unwrap().0.read_to_end(&mut devices).unwrap();
            devices
        });
        let mut qmp = self.qmp();
        let capabilities = json!([{ "capability": "x-ignore-shared", "state": true }]);
        qmp.execute("migrate-set-capabilities", json!({ "capabilities": capabilities })).unwrap();
        qmp.execute("migrate", json!({ "uri": format!("unix:{}", path.display()) })).unwrap();
        let devices = reading.join().unwrap();
        until("all is saved", || qmp.migration().unwrap() == "completed");
        devices
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Writes the record of a VM.
fn write(files: &Files, spec: &VmSpec, incoming: Option<&Incoming>) {
    let record =
        json!({ "origin": { "started": spec }, "pid": null, "ended": null, "incoming": incoming });
    fs::write(files.qmp().with_file_name("record.json"), record.to_string()).unwrap();
}

/// Two hosts, and a VM that moves between them.
struct Stage {
    dir: tempfile::TempDir,
    there: HostName,
    incoming: Incoming,
    listener: TcpListener,
    from: Qemu,
    to: Qemu,
}

impl Stage {
    fn new() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let [here, there]: [HostName; 2] = ["here", "there"].map(|host| host.parse().unwrap());
        let authority = Authority::create(&dir.path().join("ca"), "test").unwrap();
        for host in [&here, &there] {
            authority.issue(&dir.path().join(format!("tls-{host}")), host, &[], false).unwrap();
        }
        let listen = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let incoming = Incoming {
            migration: MigrationId::random(),
            from: here,
            listen,
            identity: dir.path().join("tls-there"),
            prepared: false,
            left_at_source: None,
            cpu: None,
        };
        let listener = TcpListener::bind((listen, 0)).unwrap();
        let still = VmSpec { extra: vec!["-S".to_owned()], ..spec() };
        let from = Qemu::start(&dir.path().join("from"), &still, None)?;
        let to = Qemu::start(&dir.path().join("to"), &spec(), Some(&incoming))?;
        Some(Self { dir, there, incoming, listener, from, to })
    }

    fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    /// Receives the VM on a thread of its own, which returns the outcome and QEMU.
    fn take_in(&mut self) -> mpsc::Receiver<(Result<Outcome, String>, Child)> {
        let (told, tells) = mpsc::channel();
        let (files, incoming) = (self.to.files.clone(), self.incoming.clone());
        let listener = self.listener.try_clone().unwrap();
        let mut qemu = self.to.child.take().unwrap();
        thread::spawn(move || {
            let mut note = |incoming: &Incoming| {
                write(&files, &spec(), Some(incoming));
                Ok(())
            };
            let outcome = take_in(&files, &incoming, &listener, &mut qemu, &mut note);
            // No thread receives this if the test has failed.
            let _ = told.send((outcome.map_err(|error| error.to_string()), qemu));
        });
        tells
    }

    /// Connects as the source and sends `Hello`.
    fn hello(&self, cpu: &[u8]) -> (Wire, std::io::Result<()>) {
        let identity = self.dir.path().join("tls-here");
        let mut wire = Wire::connect(self.address(), &self.there, &identity).unwrap();
        let qemu = release(&self.from.qmp().execute("query-version", json!({})).unwrap());
        let hello = Message::Hello { migration: self.incoming.migration, qemu, runs: true };
        wire.send(&hello, cpu).unwrap();
        let answer = wire.done();
        (wire, answer)
    }
}

#[test]
fn a_paused_vm_stays_paused_if_the_confirmation_is_lost() {
    let Some(mut stage) = Stage::new() else { return };
    let devices = stage.from.devices(stage.dir.path());
    let came = stage.take_in();
    let cpu = serde_json::to_vec(&Cpu::of(&mut stage.from.qmp(), "max").unwrap()).unwrap();
    let (mut wire, answer) = stage.hello(&cpu);
    answer.unwrap();
    devices.chunks(64 << 10).for_each(|chunk| wire.send(&Message::Device, chunk).unwrap());
    wire.send(&Message::Prepare { leaves: false }, &[]).unwrap();
    wire.done().unwrap();
    let own = Message::CommitOwnership { runs: false };
    wire.send(&own, &[]).unwrap();
    // The answer is lost.
    wire.reset();
    until("the VM is the destination's", || stage.to.files.is_ours().unwrap());

    // The source repeats the message, and gets the answer.
    let (mut wire, answer) = stage.hello(&[]);
    answer.unwrap();
    wire.send(&own, &[]).unwrap();
    wire.done().unwrap();
    drop(wire);
    let (outcome, qemu) = came.recv_timeout(TIMEOUT).unwrap();
    stage.to.child = Some(qemu);
    assert!(matches!(outcome, Ok(Outcome::Here(_))), "{:?}", outcome.err());
    assert!(!stage.to.runs(), "no message ordered the VM to run");
}

#[test]
fn a_host_with_a_lesser_processor_refuses_before_data_moves() {
    let Some(mut stage) = Stage::new() else { return };
    let came = stage.take_in();
    let mut cpu = serde_json::to_value(Cpu::of(&mut stage.from.qmp(), "max").unwrap()).unwrap();
    cpu["flags"].as_array_mut().unwrap().push(json!("amx-forged"));
    let (_wire, answer) = stage.hello(cpu.to_string().as_bytes());
    let refused = answer.unwrap_err().to_string();
    assert!(
        refused.contains("it lacks amx-forged") && refused.contains("--cpu MODEL"),
        "{refused}"
    );
    let (outcome, qemu) = came.recv_timeout(TIMEOUT).unwrap();
    stage.to.child = Some(qemu);
    let Ok(Outcome::Stays(why)) = outcome else { panic!("the VM arrived: {:?}", outcome.err()) };
    assert_eq!(why, refused);
}
