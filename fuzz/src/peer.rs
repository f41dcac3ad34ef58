use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long a connection may take to answer, or to end when its peer has said all it has to say.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most that is kept of what was received and not taken.
const KEPT: usize = 64 << 10;

/// A thread of a server, for one connection at a time.
pub struct Worker {
    connections: Sender<UnixStream>,
    ended: Receiver<()>,
}

impl Worker {
    /// One that serves connections so.
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

    /// The peer of a new connection.
    pub fn connect(&self) -> Peer<'_> {
        let (stream, theirs) = UnixStream::pair().expect("there are descriptors");
        stream.set_nonblocking(true).expect("it is a socket");
        self.connections.send(theirs).expect("the thread lives");
        Peer { stream, worker: self, received: Vec::new(), closed: false }
    }
}

/// The other end of a server's connection. It always takes in what the server sends, so that this never waits for long.
/// Dropping it is vanishing; it waits until the server is done with the connection.
pub struct Peer<'a> {
    stream: UnixStream,
    worker: &'a Worker,
    received: Vec<u8>,
    closed: bool,
}

impl Peer<'_> {
    /// Sends all of it, unless the server has closed the connection.
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

    /// Takes so many bytes of what the server says, which it must say; `None` if it closes the connection instead.
    pub fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.received.len() < count {
            if self.closed {
                return None;
            }
            self.wait(PollFlags::IN);
            self.receive();
            assert!(self.received.len() < KEPT, "an answer that is too long");
        }
        Some(self.received.drain(..count).collect())
    }

    /// Says that nothing more comes, and hears the server out.
    pub fn finish(mut self) {
        // It fails if the server was faster.
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
                    let room = KEPT - self.received.len();
                    self.received.extend_from_slice(&buffer[..count.min(room)]);
                    continue;
                }
                Err(error) => self.closed = error.kind() != ErrorKind::WouldBlock,
            }
            return;
        }
    }

    fn wait(&self, what: PollFlags) {
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        let begin = Instant::now();
        loop {
            match poll(&mut [PollFd::new(&self.stream, what)], Some(&patience)) {
                Ok(0) => panic!("neither an answer nor an end for {:?}", begin.elapsed()),
                Ok(_) => return,
                Err(_) => assert!(begin.elapsed() < PATIENCE, "interrupted for too long"),
            }
        }
    }
}

impl Drop for Peer<'_> {
    fn drop(&mut self) {
        // It fails if the server was faster.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.worker.ended.recv_timeout(PATIENCE).expect("the connection ends");
    }
}
