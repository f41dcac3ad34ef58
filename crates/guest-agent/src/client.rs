//! The requests of applications for memory: `GM_lib` of \[Bielski18\], sections III-C and III-D.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_page::Bytes;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use crate::application_message::{Ask, Granted, GuestStatus, LENIENCE, Reason, SOCKET, Tell};
use crate::message::{LONGEST, encode};

/// Timeout of the agent's own status; the agent may have to bring memory online first.
const SHOWS_WITHIN: Duration = Duration::from_secs(30);

/// Longest timeout of a request: a day.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// The reason why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// No agent runs.
    #[error(
        "no agent runs in this guest (cannot connect to {socket}: {source}): start \
         'aquifer-guest run' as root",
        socket = .socket.display()
    )]
    NoAgent {
        /// The expected socket.
        socket: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// This user may not connect to the agent.
    #[error(
        "this user may not connect to the agent at {socket}: run the command as root, or start the \
         agent with --socket-group and one of this user's groups",
        socket = .socket.display()
    )]
    NotAllowed {
        /// The agent's socket.
        socket: PathBuf,
    },
    /// The host is not connected, or went before it answered.
    #[error("{0}")]
    HostAway(String),
    /// The host has not answered in time.
    #[error("{0}")]
    NoAnswer(String),
    /// The connection to the agent failed, or the agent did not answer in time.
    #[error(
        "the agent at {socket} did not answer ({source}), and may have carried the request out: \
         check with 'aquifer-guest show' once the agent runs again",
        socket = .socket.display()
    )]
    Gone {
        /// The agent's socket.
        socket: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The agent rejects the request.
    #[error("{0}")]
    Refused(String),
}

/// Asks for `bytes` more. `timeout` is the time that the host may look for them.
///
/// # Errors
/// If there is no answer. An answer may grant less, or nothing.
pub fn request(bytes: Bytes, timeout: Duration) -> Result<Granted, RequestError> {
    Client::default().request(bytes, timeout, "")
}

/// Gives `bytes` back to the host. `timeout` is the time that the host may take.
///
/// # Errors
/// If there is no answer. An answer may say that the guest gave less.
pub fn give_back(bytes: Bytes, timeout: Duration) -> Result<Granted, RequestError> {
    Client::default().give_back(bytes, timeout, "")
}

/// A client of this guest's agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    socket: PathBuf,
}

impl Default for Client {
    fn default() -> Self {
        Self::at(Path::new(SOCKET))
    }
}

impl Client {
    /// Makes a client of the agent that listens at `socket`.
    pub fn at(socket: &Path) -> Self {
        Self { socket: socket.to_owned() }
    }

    /// Asks for memory as [`request()`] does; `why` is for the host's log.
    ///
    /// # Errors
    /// Those of [`request()`].
    pub fn request(
        &self,
        bytes: Bytes,
        timeout: Duration,
        why: &str,
    ) -> Result<Granted, RequestError> {
        self.resize(i64::try_from(bytes.0).unwrap_or(i64::MAX), timeout, why)
    }

    /// Gives memory back as [`give_back()`] does; `why` is for the host's log.
    ///
    /// # Errors
    /// Those of [`give_back()`].
    pub fn give_back(
        &self,
        bytes: Bytes,
        timeout: Duration,
        why: &str,
    ) -> Result<Granted, RequestError> {
        self.resize(i64::try_from(bytes.0).map_or(i64::MIN, |bytes| -bytes), timeout, why)
    }

    /// Returns the agent's view of the guest.
    ///
    /// # Errors
    /// If the agent does not answer.
    pub fn show(&self) -> Result<GuestStatus, RequestError> {
        match self.ask(&Ask::Show, SHOWS_WITHIN)? {
            Tell::Shown(status) => Ok(status),
            other => Err(self.unexpected(&other)),
        }
    }

    fn resize(&self, bytes: i64, timeout: Duration, why: &str) -> Result<Granted, RequestError> {
        let timeout = timeout.min(LONGEST_TIMEOUT);
        let ask =
            Ask::Resize { bytes, timeout_ms: timeout.as_millis() as u64, why: why.to_owned() };
        match self.ask(&ask, timeout + 2 * LENIENCE)? {
            Tell::Granted(granted) => Ok(granted),
            other => Err(self.unexpected(&other)),
        }
    }

    fn ask(&self, ask: &Ask, within: Duration) -> Result<Tell, RequestError> {
        let gone = |source| RequestError::Gone { socket: self.socket.clone(), source };
        let line = encode(ask).map_err(|error| RequestError::Refused(error.to_string()))?;
        // A timeout is reported with the request's name, not as an error of the socket.
        let gone = |source: io::Error| match source.kind() {
            io::ErrorKind::WouldBlock => {
                let why = format!("no answer to '{}' within {within:?}", ask.name());
                gone(io::Error::new(io::ErrorKind::TimedOut, why))
            }
            _ => gone(source),
        };
        let mut stream = connect(&self.socket, within).map_err(|source| match source.kind() {
            io::ErrorKind::PermissionDenied => {
                RequestError::NotAllowed { socket: self.socket.clone() }
            }
            io::ErrorKind::WouldBlock => gone(source),
            _ => RequestError::NoAgent { socket: self.socket.clone(), source },
        })?;
        stream.set_read_timeout(Some(within)).map_err(gone)?;
        stream.write_all(&line).map_err(gone)?;
        let mut answer = String::new();
        let mut stream = BufReader::new(stream.take(LONGEST as u64));
        if stream.read_line(&mut answer).map_err(gone)? == 0 {
            return Err(gone(io::ErrorKind::UnexpectedEof.into()));
        }
        match serde_json::from_str(&answer).map_err(|error| gone(error.into()))? {
            Tell::Failed { reason: Reason::HostAway, error } => Err(RequestError::HostAway(error)),
            Tell::Failed { reason: Reason::NoAnswer, error } => Err(RequestError::NoAnswer(error)),
            Tell::Failed { reason: Reason::Other, error } => Err(RequestError::Refused(error)),
            tell => Ok(tell),
        }
    }

    fn unexpected(&self, tell: &Tell) -> RequestError {
        let source = io::Error::other(format!("unexpected answer: {tell:?}"));
        RequestError::Gone { socket: self.socket.clone(), source }
    }
}

/// Connects to a unix socket with a timeout of `within` for connecting and for each send:
/// connect(2) blocks while the listener's backlog is full.
///
/// Not by `control-socket`: that room stands above this one, and uses `transport`. Each guest's
/// binary would be built with TLS.
fn connect(path: &Path, within: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(within))?;
    rustix::net::connect(&socket, &address)?;
    Ok(UnixStream::from(socket))
}
