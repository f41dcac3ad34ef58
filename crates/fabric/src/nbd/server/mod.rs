//! The NBD server: leases of a store, and other disks, as network block devices.
//!
//! One thread a connection and blocking calls: at the sizes of pages it is waking up that costs, so a request that
//! arrives alone takes one receive and one send on a thread that was waiting for it, and requests that arrive together
//! share both. A client can break its own connection and nothing else.
//!
//! The files follow a connection: `connection` takes it from the listener, `handshake` agrees on export and modes,
//! `session` carries out requests on what `export` says an export can be, with `answer` for what its answers look like and
//! `large_read` for what is sent straight from the store.

mod answer;
mod connection;
mod export;
mod handshake;
mod large_read;
mod session;

use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use aquifer_page::{HostName, LeaseId};
use rustls::ServerConfig;

use crate::Address;
use crate::ConnectionLimits;
use crate::serving::{Listener, serve_alone};
use connection::Nbd;
pub use export::{Disk, Export, Zeroes};

/// What a server shows to whom.
///
/// Called from the threads of connections, at their beginning and end only. [`Server::close_lease`] waits for those
/// threads: whoever calls it MUST NOT hold a lock that these functions take.
pub trait Exports: Send + Sync {
    /// What is behind an export, if `peer` may use it. The default export has the name `""`.
    ///
    /// # Errors
    /// Why not, in words for the client.
    fn open(&self, name: &str, peer: &Peer) -> Result<Export, Refused>;

    /// The names that `peer` may open.
    fn list(&self, peer: &Peer) -> Vec<String>;

    /// A connection to the lease begins. Calls of this and the next match in number.
    fn connected(&self, lease: LeaseId) {
        let _ = lease;
    }

    /// A connection to the lease has ended.
    fn disconnected(&self, lease: LeaseId) {
        let _ = lease;
    }
}

/// Who is at the other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The host named by its certificate, verified; `None` without TLS.
    pub host: Option<HostName>,
    /// Whether it is on this machine: a unix socket or a loopback address.
    pub local: bool,
    /// The process that it was when it connected, on a unix socket.
    pub process: Option<u32>,
    /// Where it comes from, for messages.
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

/// Why an export is not opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is none of that name.
    #[error("there is no export '{0}'")]
    Unknown(String),
    /// It is not for this peer; the reason is told to the client.
    #[error("{0}")]
    Forbidden(String),
}

/// How connections are protected.
#[derive(Clone, Debug)]
pub enum Security {
    /// Not at all: for unix sockets and loopback.
    Plain,
    /// Mutual TLS, without which a client can do nothing.
    Tls(Arc<ServerConfig>),
}

/// What a server spends on its clients at most.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long a client may take to choose an export.
    pub handshake: Duration,
    /// Connections at the same time.
    pub connections: ConnectionLimits,
}

impl Default for Limits {
    fn default() -> Self {
        Self { handshake: Duration::from_secs(10), connections: ConnectionLimits::default() }
    }
}

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {source}")]
pub struct ListenError {
    /// Where.
    pub address: Address,
    /// The system's reason.
    pub source: io::Error,
}

/// A listening server. Dropping it is shutting it down.
#[derive(Debug)]
pub struct Server {
    listener: Listener<Nbd>,
}

impl Server {
    /// Listens on `address` and serves `exports`, on threads of its own, with the default [`Limits`].
    ///
    /// A unix socket can be used by its owner only; one that a dead process left behind is replaced.
    ///
    /// # Errors
    /// [`ListenError`], naming the address.
    pub fn bind(
        address: &Address,
        security: Security,
        exports: Arc<dyn Exports>,
    ) -> Result<Self, ListenError> {
        Self::bind_with(address, security, exports, Limits::default())
    }

    /// As [`bind`](Self::bind), with other limits.
    ///
    /// # Errors
    /// [`ListenError`], naming the address.
    pub fn bind_with(
        address: &Address,
        security: Security,
        exports: Arc<dyn Exports>,
        limits: Limits,
    ) -> Result<Self, ListenError> {
        let listener =
            Listener::start(address, limits.connections, Nbd { security, exports, limits });
        let listener =
            listener.map_err(|source| ListenError { address: address.clone(), source })?;
        Ok(Self { listener })
    }

    /// Where it listens: as asked for, with the port that the kernel chose for port 0.
    pub fn address(&self) -> &Address {
        self.listener.address()
    }

    /// Ends all connections to a lease and waits until they are gone. [`Exports::open`] must refuse new ones before.
    pub fn close_lease(&self, lease: LeaseId) {
        self.listener.close_lease(lease);
    }

    /// Stops listening, ends all connections and waits until they are gone; removes the unix socket.
    pub fn shutdown(self) {
        drop(self);
    }
}

/// Serves one client that is connected already, in the clear and on this thread, until it has had enough.
///
/// For fuzzing, where a listener's threads would cost most of the time.
#[doc(hidden)]
pub fn serve(client: UnixStream, exports: Arc<dyn Exports>, limits: Limits) {
    serve_alone(Nbd { security: Security::Plain, exports, limits }, client);
}
