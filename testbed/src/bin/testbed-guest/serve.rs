//! The server in a guest, which runs the testbed's commands, any number at a time.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use aquifer_page::lock;
use aquifer_testbed::sys::lock_memory;
use aquifer_testbed::wire::{CHUNK, Frame, Kind, PORT};
use rustix::process::{Pid, Signal, kill_process_group};

/// Timeout for the port to appear.
const PORT_TIMEOUT: Duration = Duration::from_secs(20);

/// How long output may follow after a command has ended: its children may hold the pipes forever.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

/// A shell that the kernel may kill when memory runs out, and that then becomes the command.
const KILLABLE_SHELL: &str = r#"echo 0 >/proc/self/oom_score_adj; exec sh -c "$1" sh"#;

/// Serves until the testbed hangs up.
pub(crate) fn run() -> Result<()> {
    // Commands run in guests that are out of memory or have lost their swap.
    lock_memory().context("cannot lock memory")?;
    fs::write("/proc/self/oom_score_adj", "-1000")
        .context("cannot exempt this process from the OOM killer")?;
    let mut port = open_port()?;
    let server =
        Server { port: Arc::new(Mutex::new(port.try_clone()?)), processes: Arc::default() };
    server.say(0, Kind::Ready, []);
    loop {
        let frame = Frame::receive(&mut port).context("the testbed closed the connection")?;
        server.obey(frame);
    }
}

/// Opens the virtio port named [`PORT`].
fn open_port() -> Result<File> {
    let deadline = Instant::now() + PORT_TIMEOUT;
    loop {
        for entry in fs::read_dir("/sys/class/virtio-ports").into_iter().flatten().flatten() {
            if fs::read_to_string(entry.path().join("name")).is_ok_and(|name| name.trim() == PORT) {
                let path = std::path::Path::new("/dev").join(entry.file_name());
                let port = OpenOptions::new().read(true).write(true).open(&path);
                return port.with_context(|| format!("cannot open {}", path.display()));
            }
        }
        if Instant::now() > deadline {
            bail!("there is no virtio port named {PORT}");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// The port to the testbed, and the running commands.
#[derive(Clone)]
struct Server {
    port: Arc<Mutex<File>>,
    processes: Arc<Mutex<HashMap<u32, Running>>>,
}

/// A command that has not ended.
struct Running {
    group: Pid,
    /// Dropping the sender ends the command's input.
    input: Option<Sender<Vec<u8>>>,
}

impl Server {
    fn say(&self, process: u32, kind: Kind, data: impl Into<Vec<u8>>) {
        let port = lock(&self.port);
        // The receiving loop notices a hang-up, so a failed send does not matter.
        let _ = Frame::new(process, kind, data).send(&*port);
    }

    fn obey(&self, frame: Frame) {
        let id = frame.process;
        if frame.kind == Kind::Start {
            let started = self.start(id, &String::from_utf8_lossy(&frame.data));
            return started
                .unwrap_or_else(|error| self.say(id, Kind::Failed, format!("{error:#}")));
        }
        let mut processes = lock(&self.processes);
        let Some(running) = processes.get_mut(&id) else { return };
        match frame.kind {
            Kind::Input => {
                running.input.as_ref().map(|input| input.send(frame.data));
            }
            Kind::InputEnd => running.input = None,
            Kind::Signal => {
                let number = frame.data.first().map(|&number| i32::from(number));
                if let Some(signal) = number.and_then(Signal::from_named_raw) {
                    let _ = kill_process_group(running.group, signal);
                }
            }
            _ => {}
        }
    }

    fn start(&self, id: u32, command: &str) -> Result<()> {
        let mut child = Command::new("/bin/sh")
            .args(["-c", KILLABLE_SHELL, "sh", command])
            .envs([("PATH", "/bin:/sbin"), ("HOME", "/"), ("TERM", "dumb")])
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("cannot run /bin/sh")?;
        let (input, chunks) = mpsc::channel();
        let running = Running { group: Pid::from_child(&child), input: Some(input) };
        lock(&self.processes).insert(id, running);
        if let Some(stdin) = child.stdin.take() {
            thread::spawn(move || feed(stdin, chunks));
        }
        // Each pump holds a sender, and drops it once it has sent all output.
        let (pumping, drained) = mpsc::channel();
        if let Some(stdout) = child.stdout.take() {
            self.pump(id, Kind::Output, stdout, pumping.clone());
        }
        if let Some(stderr) = child.stderr.take() {
            self.pump(id, Kind::Error, stderr, pumping);
        }
        let server = self.clone();
        thread::spawn(move || server.see_off(id, child, &drained));
        Ok(())
    }

    fn pump(&self, id: u32, kind: Kind, mut from: impl Read + Send + 'static, pumping: Sender<()>) {
        let server = self.clone();
        thread::spawn(move || {
            let _pumping = pumping;
            let mut buffer = vec![0; CHUNK];
            while let Ok(len @ 1..) = from.read(&mut buffer) {
                server.say(id, kind, &buffer[..len]);
            }
        });
    }

    fn see_off(&self, id: u32, mut child: Child, drained: &Receiver<()>) {
        let status = child.wait();
        let _ = drained.recv_timeout(DRAIN_TIMEOUT);
        lock(&self.processes).remove(&id);
        match status {
            Ok(status) => {
                let code =
                    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
                self.say(id, Kind::Exit, code.to_le_bytes());
            }
            Err(error) => self.say(id, Kind::Failed, format!("cannot wait for it: {error}")),
        }
    }
}

/// Writes chunks to a command's input until the channel closes or the command takes no more.
fn feed(mut stdin: ChildStdin, chunks: Receiver<Vec<u8>>) {
    for chunk in chunks {
        if stdin.write_all(&chunk).is_err() {
            return;
        }
    }
}
