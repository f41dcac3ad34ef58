//! The client of a control socket.
//!
//! One deadline ends every wait for an answer. So it does not matter whether the other process is
//! stopped, busy with other callers, or sends its answer byte by byte. The error names the order
//! and the time waited; the caller adds the name of the process.

use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A connection to a control socket, with the deadline of the current wait.
#[derive(Debug)]
pub struct ControlCall {
    stream: UnixStream,
    order: String,
    io_timeout: Duration,
    deadline: Instant,
}

impl ControlCall {
    /// Connects to the socket at `path`. The connect and all I/O until [`begin`](Self::begin) take
    /// at most `io_timeout` together.
    ///
    /// # Errors
    /// The system's; `TimedOut` if the other process does not accept.
    pub fn connect(path: &Path, order: &str, io_timeout: Duration) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // If the listener's queue is full, connect(2) waits for the send timeout.
        set_socket_timeout(&socket, Timeout::Send, Some(io_timeout))?;
        let mut call = Self {
            stream: UnixStream::from(socket),
            order: String::new(),
            io_timeout,
            deadline: Instant::now(),
        };
        call.begin(order, io_timeout);
        loop {
            match connect(&call.stream, &address) {
                Ok(()) => return Ok(call),
                Err(Errno::INTR) if Instant::now() < call.deadline => {}
                Err(Errno::INTR | Errno::AGAIN) => return Err(call.late()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Starts a wait for this order, of at most `io_timeout`.
    pub fn begin(&mut self, order: &str, io_timeout: Duration) {
        order.clone_into(&mut self.order);
        self.wait(io_timeout);
    }

    /// Starts another wait for the same order, of at most `io_timeout`.
    pub fn wait(&mut self, io_timeout: Duration) {
        (self.io_timeout, self.deadline) = (io_timeout, Instant::now() + io_timeout);
    }

    /// Returns the connection, without timeouts.
    ///
    /// # Errors
    /// The system's.
    pub fn into_stream(self) -> io::Result<UnixStream> {
        self.stream.set_read_timeout(None)?;
        self.stream.set_write_timeout(None)?;
        Ok(self.stream)
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(self.late()) } else { Ok(left) }
    }

    fn late(&self) -> io::Error {
        let why = format!("no answer to '{}' within {:?}", self.order, self.io_timeout);
        io::Error::new(io::ErrorKind::TimedOut, why)
    }

    fn timed<T>(
        &mut self,
        set: fn(&UnixStream, Option<Duration>) -> io::Result<()>,
        mut transfer: impl FnMut(&mut UnixStream) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            set(&self.stream, Some(self.left()?))?;
            match transfer(&mut self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(self.late()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }
}

/// The reason why a call to a socket has no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// No process listens there.
    #[error("no process listens at {path}: {1}", path = .0.display())]
    Absent(PathBuf, io::Error),
    /// This process cannot connect.
    #[error("cannot connect to {path}: {1}", path = .0.display())]
    Unreachable(PathBuf, io::Error),
    /// The process ended before it read the request.
    #[error("the process at {path} ended before it read the request: {1}", path = .0.display())]
    Unread(PathBuf, io::Error),
    /// The process does not answer in time, closes the connection, or sends no valid answer.
    #[error("the process at {path} does not answer: {1}", path = .0.display())]
    Silent(PathBuf, io::Error),
}

impl CallError {
    fn of_connect(socket: &Path, source: io::Error) -> Self {
        let of = match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Self::Absent,
            io::ErrorKind::TimedOut => Self::Silent,
            _ => Self::Unreachable,
        };
        of(socket.to_owned(), source)
    }

    /// Makes an error of a failed write of the request, or read of its first answer. A process that
    /// ends resets those connections whose data it has not read.
    fn of_request(socket: &Path, source: io::Error) -> Self {
        let of = match source.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Self::Unread,
            _ => Self::Silent,
        };
        of(socket.to_owned(), source)
    }
}

impl From<CallError> for io::Error {
    fn from(error: CallError) -> Self {
        let (CallError::Absent(_, source)
        | CallError::Unreachable(_, source)
        | CallError::Unread(_, source)
        | CallError::Silent(_, source)) = error;
        source
    }
}

/// The answers to one request.
#[derive(Debug)]
pub struct Answers {
    socket: PathBuf,
    lines: BufReader<ControlCall>,
    /// Timeout of each answer; that of the first includes the connect.
    silence: Duration,
    answered: bool,
}

impl Answers {
    /// Connects to `socket` and sends a request. Its tag `request` names the order.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn to(
        socket: &Path,
        request: &impl Serialize,
        silence: Duration,
    ) -> Result<Self, CallError> {
        let silent = |error| CallError::Silent(socket.to_owned(), error);
        let request = serde_json::to_value(request).map_err(|error| silent(error.into()))?;
        let order = request["request"].as_str().or(request.as_str()).unwrap_or("request");
        let mut call = ControlCall::connect(socket, order, silence)
            .map_err(|error| CallError::of_connect(socket, error))?;
        let sent = call.write_all(format!("{request}\n").as_bytes());
        sent.map_err(|error| CallError::of_request(socket, error))?;
        let lines = BufReader::new(call);
        Ok(Self { socket: socket.to_owned(), lines, silence, answered: false })
    }

    /// Waits for the next answer.
    ///
    /// # Errors
    /// [`CallError::Silent`]; for the first answer also [`CallError::Unread`].
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<T, CallError> {
        if self.answered {
            self.lines.get_mut().wait(self.silence);
        }
        let answer = next_answer(&mut self.lines);
        let is_first = !std::mem::replace(&mut self.answered, true);
        answer.map_err(|error| match is_first {
            true => CallError::of_request(&self.socket, error),
            false => CallError::Silent(self.socket.clone(), error),
        })
    }

    /// Waits until the process closes the connection, or for another `silence`.
    pub fn wait_for_end(mut self) {
        self.lines.get_mut().wait(self.silence);
        let _ = self.lines.read_line(&mut String::new());
    }

    /// Returns the connection, without timeouts. The process sends nothing unasked.
    ///
    /// # Errors
    /// [`CallError::Silent`].
    pub fn into_stream(self) -> Result<UnixStream, CallError> {
        let silent = |error| CallError::Silent(self.socket, error);
        self.lines.into_inner().into_stream().map_err(silent)
    }
}

/// Receives the next line of a connection.
///
/// # Errors
/// The system's; `TimedOut`; `UnexpectedEof` if the other process closes the connection;
/// `InvalidData`.
pub fn next_answer<T: DeserializeOwned>(lines: &mut BufReader<impl Read>) -> io::Result<T> {
    let mut line = String::new();
    if lines.read_line(&mut line)? == 0 {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the process closed the connection without an answer",
        ));
    }
    Ok(serde_json::from_str(&line)?)
}

impl Read for ControlCall {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.timed(UnixStream::set_read_timeout, |stream| stream.read(into))
    }
}

impl Write for ControlCall {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.timed(UnixStream::set_write_timeout, |stream| stream.write(from))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns whether a process listens at a socket, even if it does not accept now. Does not wait.
pub fn is_listening(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connected = SocketAddrUnix::new(path).and_then(|address| {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &address)
    });
    // If the listener's queue is full, connect(2) would wait.
    matches!(connected, Ok(()) | Err(Errno::AGAIN))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    const SHORT: Duration = Duration::from_millis(300);

    /// Makes a socket that accepts no connection, with a full queue.
    fn full(path: &Path) -> (UnixListener, Vec<UnixStream>) {
        let listener = UnixListener::bind(path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let mut queued = Vec::new();
        while let Ok(call) = ControlCall::connect(path, "fill", Duration::from_millis(50)) {
            queued.push(call.into_stream().unwrap());
        }
        (listener, queued)
    }

    #[test]
    fn a_connect_to_a_full_queue_ends_and_names_the_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _full = full(&path);
        let error = ControlCall::connect(&path, "status", SHORT).unwrap_err();
        assert_eq!(error.to_string(), "no answer to 'status' within 300ms");
        assert!(is_listening(&path));
    }

    #[test]
    fn a_socket_without_a_listener_is_told_from_one_that_is_busy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        assert!(!is_listening(&path));
        drop(UnixListener::bind(&path).unwrap());
        assert!(!is_listening(&path));
    }

    #[test]
    fn an_unread_request_is_told_from_one_without_an_answer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let request = serde_json::json!({ "request": "show" });
        let listener = UnixListener::bind(&path).unwrap();
        let mut answers = Answers::to(&path, &request, SHORT).unwrap();
        drop(listener);
        let error = answers.receive::<serde_json::Value>().unwrap_err();
        assert!(matches!(error, CallError::Unread(..)), "{error}");

        std::fs::remove_file(&path).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        let mut answers = Answers::to(&path, &request, SHORT).unwrap();
        let (client, _) = listener.accept().unwrap();
        BufReader::new(&client).read_line(&mut String::new()).unwrap();
        drop(client);
        let error = answers.receive::<serde_json::Value>().unwrap_err();
        assert!(matches!(error, CallError::Silent(..)), "{error}");
    }

    #[test]
    fn an_answer_that_trickles_ends_by_the_same_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let trickling = thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            // Until the caller hangs up.
            while client.write_all(b" ").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let request = serde_json::json!({ "request": "show" });
        let mut answers = Answers::to(&path, &request, SHORT).unwrap();
        let error = io::Error::from(answers.receive::<serde_json::Value>().unwrap_err());
        assert_eq!(error.to_string(), "no answer to 'show' within 300ms");
        drop(answers);
        trickling.join().unwrap();
    }
}
