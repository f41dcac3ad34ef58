//! The NVMe/TCP target: leases of a store as subsystems with one namespace each.
//!
//! One thread a connection, which is one queue, and blocking calls: at the sizes of pages it is waking up that costs, so
//! a command that arrives alone takes one receive and one send on a thread that was waiting for it, and commands that
//! arrive together share both. A host can break its own connection and nothing else.
//!
//! The files follow a connection: `connection` takes it from the listener, `handshake` agrees on the form of PDUs, which
//! `link` sends and receives with `parse`; `connect` makes it a queue of a `controller` in the `registry`, and
//! `authenticate` keeps out a host that cannot prove its name: `failures` and `slots` bound what it can cost. Then `admin`
//! tells what there is, and `io` moves blocks: `data` finds what comes with a command, `transfers` remembers what was
//! asked for, `blocks` does what is wanted, `large_read` sends straight from the store.

mod admin;
mod authenticate;
mod bell;
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

use std::fmt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aquifer_page::LeaseId;

pub use crate::nbd::server::ListenError;
pub use namespace::{Namespace, ResizeError};

use super::auth::{Group, Secrets};
use super::proto::Nqn;
use crate::Address;
use crate::ConnectionLimits;
use crate::serving::{Listener, serve_alone};
use broken::{Broken, Fatal};
use connection::Nvme;
use failures::Failures;
use registry::Registry;
use slots::Slots;

/// The namespace's identifier: there is one in a subsystem.
const NSID: u32 = 1;
/// The most data in a command capsule: writes up to here need no round trip more.
const MAX_IN_CAPSULE: usize = 64 << 10;
/// The most data in an H2CData PDU.
const MAX_DATA: usize = 128 << 10;
/// Log 2 of the longest data of a command in pages.
const MAX_TRANSFER_SHIFT: u8 = 8;
/// The longest data of a command.
const MAX_TRANSFER: usize = aquifer_page::PAGE_SIZE << MAX_TRANSFER_SHIFT;
/// As long as with Linux's target (`NVMET_DISC_KATO_MS`).
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(120);
/// The most entries of a queue.
const MAX_QUEUE: u32 = 1024;

/// Which subsystems a target shows to whom.
///
/// Called from the threads of connections, at their beginning and end and for discovery. [`Target::close_lease`] waits for
/// those threads: whoever calls it MUST NOT hold a lock that these functions take.
pub trait Subsystems: Send + Sync {
    /// The namespace of a subsystem, if `host` may use it. MUST be the same one every time.
    ///
    /// # Errors
    /// Why not.
    fn open(&self, subsystem: &Nqn, host: &Host) -> Result<Arc<Namespace>, Refused>;

    /// The subsystems that `host` may open.
    fn list(&self, host: &Host) -> Vec<Nqn>;

    /// What the host must prove that it knows before it may use the subsystem; `None` lets it in by its name alone.
    /// Discovery is open to all: it tells each host only what [`list`](Self::list) says.
    fn secrets(&self, subsystem: &Nqn, host: &Host) -> Option<Secrets> {
        let _ = (subsystem, host);
        None
    }

    /// A queue of a host to the lease begins. Calls of this and the next match in number.
    fn connected(&self, lease: LeaseId) {
        let _ = lease;
    }

    /// A queue of a host to the lease has ended.
    fn disconnected(&self, lease: LeaseId) {
        let _ = lease;
    }
}

/// Who is at the other end of a connection, as it says itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name.
    pub nqn: Nqn,
    /// Its identifier.
    pub id: [u8; 16],
    /// Whether it is on this machine: a unix socket or a loopback address.
    pub local: bool,
    /// Where it comes from, for messages.
    pub from: String,
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.nqn, self.from)
    }
}

/// Why a subsystem is not opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is none of that name.
    #[error("there is no subsystem '{0}'")]
    Unknown(Nqn),
    /// It is not for this host.
    #[error("{0}")]
    Forbidden(String),
}

/// What a target spends on hosts at most.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long a host may take to make a connection a queue.
    pub handshake: Duration,
    /// Connections at the same time, for each address on which it listens.
    pub connections: ConnectionLimits,
    /// I/O queues of a controller.
    pub queues: u16,
    /// The largest Diffie-Hellman group by which hosts may authenticate: they choose it before they have proved anything.
    pub largest_group: Group,
    /// How long a host may be silent that discovers without a keep alive time-out.
    pub discovery: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        // Linux and the initiator here offer all groups, of which the target takes the smallest.
        let largest_group = Group::Ffdhe4096;
        let (handshake, connections) = (Duration::from_secs(10), ConnectionLimits::default());
        Self { handshake, connections, queues: 64, largest_group, discovery: DISCOVERY_TIMEOUT }
    }
}

/// What all connections have in common.
struct Core {
    subsystems: Arc<dyn Subsystems>,
    limits: Limits,
    registry: Registry,
    failures: Mutex<Failures>,
    /// For modular exponentiations.
    slots: Slots,
}

impl Core {
    fn failures(&self) -> MutexGuard<'_, Failures> {
        // Records come and go whole, so a panic elsewhere cannot have left one half written.
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A target, on any number of addresses. Dropping it is shutting it down.
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
    /// A target that does not listen yet.
    pub fn new(subsystems: Arc<dyn Subsystems>, limits: Limits) -> Self {
        let (registry, failures, slots) = (Registry::new(), Mutex::default(), Slots::new());
        let core = Core { subsystems, limits, registry, failures, slots };
        Self { core: Arc::new(core), listeners: Mutex::default() }
    }

    /// Listens on `address` too, and says where that is: as asked for, with the port that the kernel chose for port 0.
    ///
    /// A unix socket can be used by its owner only; one that a dead process left behind is replaced. Discovery tells hosts
    /// that came over a TCP port of that port; on a unix socket it has nothing to tell, unless hosts find it at
    /// `announced`.
    ///
    /// # Errors
    /// [`ListenError`], naming the address.
    pub fn listen(
        &self,
        address: &Address,
        announced: Option<&Address>,
    ) -> Result<Address, ListenError> {
        let service = Nvme { core: Arc::clone(&self.core), announced: announced.cloned() };
        let listener = Listener::start(address, self.core.limits.connections, service);
        let listener =
            listener.map_err(|source| ListenError { address: address.clone(), source })?;
        let address = listener.address().clone();
        self.locked().push(listener);
        Ok(address)
    }

    /// Serves one host that is connected already, on this thread, until it has had enough. As for
    /// [`listen`](Self::listen), discovery tells it of `announced`.
    ///
    /// For fuzzing, where a listener's threads would cost most of the time.
    #[doc(hidden)]
    pub fn serve(&self, host: UnixStream, announced: &Address) {
        serve_alone(
            Nvme { core: Arc::clone(&self.core), announced: Some(announced.clone()) },
            host,
        );
    }

    /// Ends all connections to a lease and waits until they are gone. [`Subsystems::open`] must refuse new ones before.
    pub fn close_lease(&self, lease: LeaseId) {
        for listener in &*self.locked() {
            listener.close_lease(lease);
        }
    }

    /// What [`Subsystems::list`] answers has changed: tells the hosts that wait for that.
    pub fn subsystems_changed(&self) {
        self.core.registry.changed();
    }

    /// Stops listening, ends all connections and waits until they are gone; removes unix sockets.
    pub fn shutdown(self) {
        drop(self);
    }

    fn locked(&self) -> MutexGuard<'_, Vec<Listener<Nvme>>> {
        // Listeners are only added, so a panic elsewhere cannot have left the list half written.
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
