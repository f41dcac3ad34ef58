//! A user of the guest: it asks over the guest's serial port and notes the times of the answers.
//!
//! The user asks on the guest's present host only. The port of a QEMU that awaits a guest would
//! queue the questions until the guest comes. When the port's QEMU ends, the guest is on the other
//! host.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::guest::ANSWER;
use aquifer_page::lock;

/// The time between two questions.
const PERIOD: Duration = Duration::from_millis(10);

/// An answer of the guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    pub(super) at: Instant,
    /// The tick of the guest's latest report.
    pub(super) tick: u64,
    /// Pages with wrong content.
    pub(super) wrong: u64,
}

/// A thread that asks until it is dropped.
#[derive(Debug)]
pub(super) struct User {
    answers: Arc<Mutex<Vec<Answer>>>,
    /// The index of the host where it asks.
    host: Arc<AtomicUsize>,
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// One host's end of the serial port.
struct Port {
    path: PathBuf,
    stream: Option<UnixStream>,
    heard: Vec<u8>,
}

impl User {
    /// Asks at the sockets of the guest's serial port on each host; the guest is on the first.
    pub(super) fn start(ports: [PathBuf; 2]) -> Self {
        let answers = Arc::new(Mutex::new(Vec::new()));
        let done = Arc::new(AtomicBool::new(false));
        let host = Arc::new(AtomicUsize::new(0));
        let (noted, asked, over) = (answers.clone(), host.clone(), done.clone());
        let thread = thread::spawn(move || {
            let mut ports = ports.map(|path| Port { path, stream: None, heard: Vec::new() });
            for question in 1_u64.. {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let host = asked.load(Ordering::Relaxed);
                let (heard, ended) = ports[host].ask(question);
                lock(&noted).extend(heard);
                if ended {
                    asked.store(1 - host, Ordering::Relaxed);
                }
                thread::sleep(PERIOD);
            }
        });
        Self { answers, host, done, thread: Some(thread) }
    }

    /// Asks on host 0 or 1 from now on.
    pub(super) fn follow(&self, host: usize) {
        self.host.store(host, Ordering::Relaxed);
    }

    /// Returns the last answer.
    pub(super) fn last(&self) -> Option<Answer> {
        lock(&self.answers).last().copied()
    }

    /// Returns the longest gap between answers from `since` to the last answer; without an answer,
    /// the time since `since`.
    pub(super) fn longest_silence(&self, since: Instant) -> Duration {
        let answers = lock(&self.answers);
        let mut before = since;
        let times = answers.iter().map(|answer| answer.at).filter(|at| *at > since);
        let silences = times.map(|at| at.duration_since(std::mem::replace(&mut before, at)));
        silences.max().unwrap_or_else(|| since.elapsed())
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread returns nothing, and a panic of it is no reason to panic here.
            let _ = thread.join();
        }
    }
}

impl Port {
    /// Asks if the port is open. Returns the answers received in the meantime, and whether the port
    /// has just closed.
    fn ask(&mut self, question: u64) -> (Vec<Answer>, bool) {
        let connect = || {
            let stream = UnixStream::connect(&self.path).ok()?;
            stream.set_nonblocking(true).ok()?;
            Some(stream)
        };
        self.stream = self.stream.take().or_else(connect);
        let Some(stream) = &mut self.stream else { return (Vec::new(), false) };
        // A question for which the socket has no room is dropped.
        let asked = stream.write(format!("{question}\n").as_bytes());
        let mut buffer = [0; 4096];
        let ended = loop {
            match stream.read(&mut buffer) {
                Ok(0) => break true,
                Ok(read) => self.heard.extend(&buffer[..read]),
                Err(error) => break error.kind() != ErrorKind::WouldBlock,
            }
        };
        let ended = ended || asked.is_err_and(|error| error.kind() != ErrorKind::WouldBlock);
        if ended {
            self.stream = None;
        }
        (self.answers(), ended)
    }

    /// Takes the answers from the complete lines.
    fn answers(&mut self) -> Vec<Answer> {
        let Some(end) = self.heard.iter().rposition(|byte| *byte == b'\n') else {
            return Vec::new();
        };
        let lines: Vec<u8> = self.heard.drain(..=end).collect();
        let at = Instant::now();
        String::from_utf8_lossy(&lines).lines().filter_map(|line| parse(line, at)).collect()
    }
}

fn parse(line: &str, at: Instant) -> Option<Answer> {
    let mut words = line.trim().strip_prefix(ANSWER)?.split_whitespace().skip(1).map(str::parse);
    let (Some(Ok(tick)), Some(Ok(wrong))) = (words.next(), words.next()) else { return None };
    Some(Answer { at, tick, wrong })
}
