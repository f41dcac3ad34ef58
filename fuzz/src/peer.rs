//! Peers that attack a server on another thread of this process.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The time within which the server must answer, or end the connection after its peer has finished.
const SERVER_TIMEOUT: Duration = Duration::from_secs(10);
/// The most received bytes that a peer keeps before it takes them.
const MAX_RECEIVED_BYTES: usize = 64 << 10;

/// A thread that serves one connection at a time.
pub struct Worker {
    connections: Sender<UnixStream>,
    ended: Receiver<()>,
}

impl Worker {
    /// Starts a worker that serves connections by `serve`.
    pub fn start(serve: impl Fn(UnixStream) + Send + 'static) -> Self {
        let (connections, ours) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        thread::spawn(move || {
            for connection in ours {
                serve(connection);
                if end.send(()).is_err() {
                    return;
                }
            }
        });
        Self { connections, ended }
    }

    /// Connects a new peer to the worker.
    pub fn connect(&self) -> Peer<'_> {
        let (stream, theirs) = UnixStream::pair().expect("no file descriptor is free");
        stream.set_nonblocking(true).expect("the descriptor is a socket");
        self.connections.send(theirs).expect("the worker thread ended early");
        Peer { stream, worker: self, received: Vec::new(), closed: false }
    }
}

/// The client's end of a connection to a worker.
///
/// It always receives the server's bytes, so that the server never waits long. Dropping it closes
/// the connection abruptly, then waits until the server is done with it.
pub struct Peer<'a> {
    stream: UnixStream,
    worker: &'a Worker,
    received: Vec<u8>,
    closed: bool,
}

impl Peer<'_> {
    /// Sends all bytes, unless the server closes the connection first.
    pub fn send(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && !self.closed {
            match self.stream.write(bytes) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.wait(PollFlags::IN | PollFlags::OUT);
                    self.receive();
                }
                Err(_) => return,
            }
        }
    }

    /// Takes `count` bytes of the server's output; `None` if the server closes the connection
    /// first.
    pub fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.received.len() < count {
            if self.closed {
                return None;
            }
            self.wait(PollFlags::IN);
            self.receive();
            assert!(self.received.len() < MAX_RECEIVED_BYTES, "the program's answer is too long");
        }
        Some(self.received.drain(..count).collect())
    }

    /// Shuts down the sending side and receives until the server closes its end.
    pub fn finish(mut self) {
        // It fails if the server has closed the connection first.
        let _ = self.stream.shutdown(Shutdown::Write);
        while !self.closed {
            self.wait(PollFlags::IN);
            self.receive();
        }
    }

    fn receive(&mut self) {
        let mut buffer = [0; 64 << 10];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.closed = true,
                Ok(count) => {
                    let room = MAX_RECEIVED_BYTES - self.received.len();
                    self.received.extend_from_slice(&buffer[..count.min(room)]);
                    continue;
                }
                Err(error) => self.closed = error.kind() != ErrorKind::WouldBlock,
            }
            return;
        }
    }

    fn wait(&self, what: PollFlags) {
        let timeout = Timespec { tv_sec: SERVER_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
        let begin = Instant::now();
        loop {
            match poll(&mut [PollFd::new(&self.stream, what)], Some(&timeout)) {
                Ok(0) => panic!("no answer and no disconnect within {:?}", begin.elapsed()),
                Ok(_) => return,
                Err(_) => assert!(begin.elapsed() < SERVER_TIMEOUT, "poll(2) fails all the time"),
            }
        }
    }
}

impl Drop for Peer<'_> {
    fn drop(&mut self) {
        // It fails if the server has closed the connection first.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.worker.ended.recv_timeout(SERVER_TIMEOUT).expect("the connection did not end in time");
    }
}
