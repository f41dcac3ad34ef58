//! The NBD server: leases and other disks as network block devices.
//!
//! Each connection has a thread and blocking calls, because at page size the wakeups dominate the
//! cost. A request that arrives alone takes one receive and one send on a thread that already
//! waits. Requests that arrive together share both. A client can break its own connection and
//! nothing else.
//!
//! The files follow a connection. `connection` takes it from the listener, and `handshake`
//! negotiates the export and the modes. `session` executes requests on the export's `storage`;
//! `answer` formats the replies, and `large_read` sends long ones straight from the lease.
//! `admission` holds requests back that are over the lender's limits.

mod admission;
mod answer;
mod connection;
mod handshake;
mod large_read;
mod session;
mod storage;

use std::fmt;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use aquifer_page::{HostName, LeaseId};
use aquifer_transport::serving::{Connections, ListenError, Listener, serve_alone};
use aquifer_transport::tls;
use aquifer_transport::{Address, ConnectionLimits};

use connection::Nbd;
pub use storage::{Disk, Storage, Zeroes};

/// The exports of a server, and the peers that may use them.
///
/// The threads of connections call it, only at the start and the end of a connection.
/// [`Server::close_lease`] waits for those threads: its caller MUST NOT hold a lock that these
/// functions take.
pub trait Exports: Connections {
    /// Opens an export if `peer` may use it. The default export has the name `""`.
    ///
    /// # Errors
    /// The reason for the refusal, worded for the client.
    fn open(&self, name: &str, peer: &Peer) -> Result<Storage, Refused>;

    /// Returns the names that `peer` may open.
    fn list(&self, peer: &Peer) -> Vec<String>;
}

/// The client at the other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The host that the client's certificate proves; `None` without TLS.
    pub host: Option<HostName>,
    /// Whether the client is on this machine: a unix socket or a loopback address.
    pub local: bool,
    /// The client's process id at the time it connected, on a unix socket.
    pub process: Option<u32>,
    /// The client's IP address; `None` on a unix socket.
    pub ip: Option<IpAddr>,
    /// The client's address, for messages.
    pub from: String,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Some(host) => write!(f, "{host} ({})", self.from),
            None => f.write_str(&self.from),
        }
    }
}

/// The reason why a server does not open an export.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// No export has that name.
    #[error("there is no export '{0}'")]
    Unknown(String),
    /// The peer may not use the export; the client receives the text.
    #[error("{0}")]
    Forbidden(String),
}

/// The protection of connections.
#[derive(Clone, Debug)]
pub enum Security {
    /// Plain text: for unix sockets and loopback.
    Plain,
    /// Mutual TLS, required before any other option.
    Tls(tls::Server),
}

/// Limits on the resources that clients take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The time within which a client must choose an export.
    pub handshake: Duration,
    /// Limits on simultaneous connections.
    pub connections: ConnectionLimits,
}

impl Default for Limits {
    fn default() -> Self {
        Self { handshake: Duration::from_secs(10), connections: ConnectionLimits::default() }
    }
}

/// A listening server; dropping it shuts it down.
#[derive(Debug)]
pub struct Server {
    listener: Listener<Nbd>,
}

impl Server {
    /// Serves `exports` on `address`, on its own threads, with the default [`Limits`].
    ///
    /// Only the owner of a unix socket can connect to it. The server replaces a socket that a dead
    /// process left behind.
    ///
    /// # Errors
    /// [`ListenError`] if the server cannot listen on `address`.
    pub fn bind(
        address: &Address,
        security: Security,
        exports: Arc<dyn Exports>,
    ) -> Result<Self, ListenError> {
        Self::bind_with(address, security, exports, Limits::default())
    }

    /// Serves as [`bind`](Self::bind) does, with other limits.
    ///
    /// # Errors
    /// [`ListenError`] if the server cannot listen on `address`.
    pub fn bind_with(
        address: &Address,
        security: Security,
        exports: Arc<dyn Exports>,
        limits: Limits,
    ) -> Result<Self, ListenError> {
        let service = Nbd { security, exports, limits };
        Ok(Self { listener: Listener::start(address, limits.connections, service)? })
    }

    /// Returns the address, with the port that the kernel chose in place of port 0.
    pub fn address(&self) -> &Address {
        self.listener.address()
    }

    /// Ends all connections to a lease and waits until they are closed.
    ///
    /// [`Exports::open`] must refuse new ones beforehand.
    pub fn close_lease(&self, lease: LeaseId) {
        self.listener.close_lease(lease);
    }

    /// Stops listening, ends all connections, waits until they are closed, and removes the unix
    /// socket.
    pub fn shutdown(self) {
        drop(self);
    }
}

/// Serves one connected client in plain text, on the calling thread, until the client disconnects.
///
/// For fuzzing, where a listener's threads would take most of the time.
#[doc(hidden)]
pub fn serve(client: UnixStream, exports: Arc<dyn Exports>, limits: Limits) {
    serve_alone(Nbd { security: Security::Plain, exports, limits }, client);
}
