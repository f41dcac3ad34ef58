//! A target to test, with a temporary store.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use aquifer_nvme::auth::Secrets;
use aquifer_nvme::proto::Nqn;
use aquifer_nvme::target::{Host as Peer, Limits, Namespace, Refused, Subsystems, Target};
use aquifer_page::{Bytes, HostName, LeaseId};
use aquifer_store::{Lease, Store};
use aquifer_transport::Address;
use aquifer_transport::serving::Connections;
use aquifer_transport::serving::limits::Gate;

use super::host::Host;
use crate::common::pattern;
use crate::stores::{record, temporary_store};

/// The name of a host that may use no subsystem.
pub const STRANGER: &str = "nqn.2014-08.org.example:stranger";

/// The subsystems served: the namespaces by name, and the number of queues.
#[derive(Default)]
pub struct SubsystemRegistry {
    pub namespaces: Mutex<BTreeMap<Nqn, Arc<Namespace>>>,
    pub queues: AtomicUsize,
    /// The secrets of every subsystem; `None` demands no authentication.
    pub secrets: Mutex<Option<Secrets>>,
    /// The limits of connections, if the test sets any.
    pub gate: OnceLock<Arc<Gate>>,
    /// The hosts to which leases belong, for limits.
    pub borrowers: Mutex<BTreeMap<LeaseId, HostName>>,
}

impl Connections for SubsystemRegistry {
    fn gate(&self) -> Option<Arc<Gate>> {
        self.gate.get().cloned()
    }

    fn borrower(&self, lease: LeaseId) -> Option<HostName> {
        self.borrowers.lock().unwrap().get(&lease).cloned()
    }

    fn connected(&self, _lease: LeaseId) {
        self.queues.fetch_add(1, Ordering::SeqCst);
    }

    fn disconnected(&self, _lease: LeaseId) {
        self.queues.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Subsystems for SubsystemRegistry {
    fn open(&self, subsystem: &Nqn, host: &Peer) -> Result<Arc<Namespace>, Refused> {
        if host.nqn.as_str() == STRANGER {
            return Err(Refused::Forbidden("it belongs to another host".to_owned()));
        }
        let found = self.namespaces.lock().unwrap().get(subsystem).cloned();
        found.ok_or_else(|| Refused::Unknown(subsystem.clone()))
    }

    fn list(&self, host: &Peer) -> Vec<Nqn> {
        if host.nqn.as_str() == STRANGER {
            return Vec::new();
        }
        self.namespaces.lock().unwrap().keys().cloned().collect()
    }

    fn secrets(&self, _subsystem: &Nqn, _host: &Peer) -> Option<Secrets> {
        self.secrets.lock().unwrap().clone()
    }
}

/// A target on a unix socket, with one subsystem.
pub struct Served {
    pub target: Target,
    pub registry: Arc<SubsystemRegistry>,
    pub subsystem: Nqn,
    pub namespace: Arc<Namespace>,
    pub lease: Arc<Lease>,
    pub store: Store,
    pub dir: tempfile::TempDir,
}

impl Served {
    pub fn new(capacity: Bytes) -> Self {
        Self::with(capacity, capacity, Limits::default())
    }

    pub fn with(capacity: Bytes, quota: Bytes, limits: Limits) -> Self {
        let (dir, store) = temporary_store();
        let registry = Arc::new(SubsystemRegistry::default());
        let target = Target::new(registry.clone(), limits);
        target.listen(&Address::Unix(dir.path().join("socket")), None).unwrap();
        let (subsystem, namespace, lease) = add(&store, &registry, capacity, quota);
        Self { target, registry, subsystem, namespace, lease, store, dir }
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// Adds a subsystem and returns its name.
    pub fn add(&self, capacity: Bytes) -> Nqn {
        add(&self.store, &self.registry, capacity, capacity).0
    }

    pub fn queues(&self) -> usize {
        self.registry.queues.load(Ordering::SeqCst)
    }

    /// Connects an admin queue and enables its controller; returns the controller's identifier too.
    pub fn admin(&self) -> (Host, u16) {
        self.admin_with(0, 0)
    }

    /// As [`admin`](Self::admin), with these digests and this keep alive timeout in milliseconds.
    pub fn admin_with(&self, digests: u8, keep_alive: u32) -> (Host, u16) {
        let mut host = Host::connect(&self.socket(), digests);
        let id = host.connect_admin(&self.subsystem, keep_alive);
        host.enable();
        (host, id)
    }

    /// Connects an I/O queue of this controller.
    pub fn io(&self, controller: u16, queue: u16, digests: u8) -> Host {
        let mut host = Host::connect(&self.socket(), digests);
        host.connect_io(&self.subsystem, controller, queue);
        host
    }

    /// Asserts that a new host can write and read.
    pub fn assert_serves(&self) {
        let (_admin, controller) = self.admin();
        let mut io = self.io(controller, 1, 0);
        let data = pattern(4096, 77);
        io.write(0, &data);
        assert!(io.read(0, 1) == data);
    }
}

fn add(
    store: &Store,
    registry: &SubsystemRegistry,
    capacity: Bytes,
    quota: Bytes,
) -> (Nqn, Arc<Namespace>, Arc<Lease>) {
    let lease = store.create(record(capacity, quota)).unwrap();
    let subsystem = Nqn::of_lease(lease.id());
    let namespace = Arc::new(Namespace::new(lease.clone()));
    registry.namespaces.lock().unwrap().insert(subsystem.clone(), Arc::clone(&namespace));
    (subsystem, namespace, lease)
}
