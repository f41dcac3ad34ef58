//! The NVMe/TCP target: leases as subsystems with one namespace each.
//!
//! Each connection is one queue, with a thread and blocking calls. At page sizes, waking a thread
//! costs most. So a command that arrives alone takes one receive and one send on a thread that
//! waits for it. Commands that arrive together share both. A host can break only its own
//! connection.
//!
//! The files follow a connection. `connection` takes it from the listener and `handshake` agrees on
//! the form of PDUs, which `link` sends and receives with `parse`. `connect` makes it a queue of a
//! `controller` in the `registry`. `authenticate` keeps out a host that cannot prove its name;
//! `failures` and `slots` bound its cost.
//!
//! Then `admin` describes the controller, and `io` moves blocks. For `io`, `data` finds the data of
//! a command, `transfers` records requested data, and `blocks` applies commands to the store.
//! `large_read` sends straight from the store, and `admission` holds commands back that are over
//! the lender's limits.

mod admin;
mod admission;
mod authenticate;
mod blocks;
mod broken;
mod connect;
mod connection;
mod controller;
mod data;
mod failures;
mod handshake;
mod io;
mod large_read;
mod link;
mod namespace;
mod parse;
mod registry;
mod slots;
mod transfers;
mod wakeup;

use std::fmt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use aquifer_page::{LeaseId, lock};
use aquifer_transport::serving::{Connections, ListenError, Listener, serve_alone};
use aquifer_transport::{Address, ConnectionLimits};

pub use namespace::{Namespace, ResizeError};

use super::auth::{Group, Secrets};
use super::proto::Nqn;
use broken::{Broken, Fatal};
use connection::Nvme;
use failures::Failures;
use registry::Registry;
use slots::Slots;

/// The identifier of a subsystem's only namespace.
const NSID: u32 = 1;
/// The most data in a command capsule, in bytes: longer writes cost another round trip.
const MAX_IN_CAPSULE: usize = 64 << 10;
/// The most data in an H2CData PDU, in bytes.
const MAX_DATA: usize = 128 << 10;
/// Log 2 of the longest data of a command, in pages.
const MAX_TRANSFER_SHIFT: u8 = 8;
/// The longest data of a command, in bytes.
const MAX_TRANSFER: usize = aquifer_page::PAGE_SIZE << MAX_TRANSFER_SHIFT;
/// Default of [`Limits::discovery`], as in Linux's target (`NVMET_DISC_KATO_MS`).
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(120);
/// The most entries of a queue.
const MAX_QUEUE: u32 = 1024;

/// The subsystems that a target offers, and the hosts that may use them.
///
/// The threads of connections call these functions, at their start and end and for discovery.
/// [`Target::close_lease`] waits for those threads, so its caller MUST NOT hold a lock that these
/// functions take.
pub trait Subsystems: Connections {
    /// Returns the namespace of a subsystem, if `host` may use it. MUST always return the same one.
    ///
    /// # Errors
    /// If the subsystem does not exist, or `host` may not use it.
    fn open(&self, subsystem: &Nqn, host: &Host) -> Result<Arc<Namespace>, Refused>;

    /// Returns the subsystems that `host` may open.
    fn list(&self, host: &Host) -> Vec<Nqn>;

    /// Returns the secrets that the host must prove to know before it may use the subsystem. `None`
    /// admits it by its name alone. Discovery needs no authentication: it shows each host only the
    /// subsystems of [`list`](Self::list).
    fn secrets(&self, subsystem: &Nqn, host: &Host) -> Option<Secrets> {
        let _ = (subsystem, host);
        None
    }
}

/// The host at the other end of a connection, by its own account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// The host's name.
    pub nqn: Nqn,
    /// The host's identifier.
    pub id: [u8; 16],
    /// Whether the host is on this machine: it uses a unix socket or a loopback address.
    pub local: bool,
    /// The address of the host, for messages.
    pub from: String,
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.nqn, self.from)
    }
}

/// The reason why a subsystem is not opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The subsystem does not exist.
    #[error("there is no subsystem '{0}'")]
    Unknown(Nqn),
    /// The host may not use the subsystem; the text is the reason.
    #[error("{0}")]
    Forbidden(String),
}

/// Limits on the resources that hosts can take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The longest time from accepting a connection to a usable queue.
    pub handshake: Duration,
    /// Simultaneous connections, for each address on which the target listens.
    pub connections: ConnectionLimits,
    /// I/O queues of a controller.
    pub queues: u16,
    /// The largest Diffie-Hellman group accepted: hosts propose groups before they have proved
    /// their name.
    pub largest_group: Group,
    /// The longest silence of a discovering host that sets no keep alive timeout.
    pub discovery: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        // Linux and our initiator offer all groups, and the target picks the smallest.
        let largest_group = Group::Ffdhe4096;
        let (handshake, connections) = (Duration::from_secs(10), ConnectionLimits::default());
        Self { handshake, connections, queues: 64, largest_group, discovery: DISCOVERY_TIMEOUT }
    }
}

/// The state that all connections share.
struct Core {
    subsystems: Arc<dyn Subsystems>,
    limits: Limits,
    registry: Registry,
    failures: Mutex<Failures>,
    /// Bounds concurrent modular exponentiations.
    slots: Slots,
}

impl Core {
    fn failures(&self) -> MutexGuard<'_, Failures> {
        // Records are inserted and removed whole, so a panic leaves no partial change.
        lock(&self.failures)
    }
}

/// A target that listens on any number of addresses. Dropping the target shuts it down.
pub struct Target {
    core: Arc<Core>,
    listeners: Mutex<Vec<Listener<Nvme>>>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target")
            .field("listeners", &self.listeners)
            .field("registry", &self.core.registry)
            .finish_non_exhaustive()
    }
}

impl Target {
    /// Makes a target that does not listen yet.
    pub fn new(subsystems: Arc<dyn Subsystems>, limits: Limits) -> Self {
        let (registry, failures, slots) = (Registry::new(), Mutex::default(), Slots::new());
        let core = Core { subsystems, limits, registry, failures, slots };
        Self { core: Arc::new(core), listeners: Mutex::default() }
    }

    /// Listens on a further `address`, and returns it with the actual port in place of port 0.
    ///
    /// Only the owner can use a unix socket; the socket of a dead process is replaced. Discovery
    /// over a TCP port announces that port. Discovery over a unix socket announces nothing, unless
    /// `announced` gives the address of this listener.
    ///
    /// # Errors
    /// [`ListenError`], with the address.
    pub fn listen(
        &self,
        address: &Address,
        announced: Option<&Address>,
    ) -> Result<Address, ListenError> {
        let service = Nvme { core: Arc::clone(&self.core), announced: announced.cloned() };
        let listener = Listener::start(address, self.core.limits.connections, service)?;
        let address = listener.address().clone();
        self.locked().push(listener);
        Ok(address)
    }

    /// Serves one connected host on this thread until it closes the connection. Discovery announces
    /// `announced`, as with [`listen`](Self::listen).
    ///
    /// Meant for fuzzing, where a listener's threads would take most of the time.
    #[doc(hidden)]
    pub fn serve(&self, host: UnixStream, announced: &Address) {
        serve_alone(
            Nvme { core: Arc::clone(&self.core), announced: Some(announced.clone()) },
            host,
        );
    }

    /// Ends all connections to a lease and waits until they are gone. [`Subsystems::open`] must
    /// already refuse new ones.
    pub fn close_lease(&self, lease: LeaseId) {
        for listener in &*self.locked() {
            listener.close_lease(lease);
        }
    }

    /// Tells discovering hosts that the answer of [`Subsystems::list`] has changed.
    pub fn subsystems_changed(&self) {
        self.core.registry.changed();
    }

    /// Stops listening, ends all connections and waits until they are gone; removes unix sockets.
    pub fn shutdown(self) {
        drop(self);
    }

    fn locked(&self) -> MutexGuard<'_, Vec<Listener<Nvme>>> {
        // The list only grows, so a panic leaves no partial change.
        lock(&self.listeners)
    }
}
