//! The exports of servers under test.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use aquifer_nbd::server::{Exports, Peer, Refused, Storage};
use aquifer_page::{HostName, LeaseId};
use aquifer_store::Lease;
use aquifer_transport::serving::Connections;
use aquifer_transport::serving::limits::Gate;

/// Exports of leases by name, with counts of their connections and a record of their peers. A host
/// with a certificate may use only its own leases.
#[derive(Default)]
pub struct ExportRegistry {
    pub leases: Mutex<BTreeMap<String, Arc<Lease>>>,
    pub peers: Mutex<Vec<Peer>>,
    /// The limits of connections, if the test sets any.
    pub gate: OnceLock<Arc<Gate>>,
    /// The hosts to which leases belong, for limits.
    pub borrowers: Mutex<BTreeMap<LeaseId, HostName>>,
    connected: AtomicUsize,
    disconnected: AtomicUsize,
}

impl ExportRegistry {
    /// Makes a registry with one export.
    pub fn with(name: &str, lease: &Arc<Lease>) -> Arc<Self> {
        let registry = Self::default();
        registry.leases.lock().unwrap().insert(name.to_owned(), Arc::clone(lease));
        Arc::new(registry)
    }

    /// Returns how many connections have begun.
    pub fn connected(&self) -> usize {
        self.connected.load(Ordering::SeqCst)
    }

    /// Returns how many connections there are now.
    pub fn connections(&self) -> usize {
        // In this order: a connection that begins and ends meanwhile never makes it negative.
        let disconnected = self.disconnected.load(Ordering::SeqCst);
        self.connected() - disconnected
    }
}

impl Connections for ExportRegistry {
    fn gate(&self) -> Option<Arc<Gate>> {
        self.gate.get().cloned()
    }

    fn borrower(&self, lease: LeaseId) -> Option<HostName> {
        self.borrowers.lock().unwrap().get(&lease).cloned()
    }

    fn connected(&self, _lease: LeaseId) {
        self.connected.fetch_add(1, Ordering::SeqCst);
    }

    fn disconnected(&self, _lease: LeaseId) {
        self.disconnected.fetch_add(1, Ordering::SeqCst);
    }
}

impl Exports for ExportRegistry {
    fn open(&self, name: &str, peer: &Peer) -> Result<Storage, Refused> {
        self.peers.lock().unwrap().push(peer.clone());
        if name == "forbidden" {
            return Err(Refused::Forbidden("it belongs to another host".to_owned()));
        }
        match (self.leases.lock().unwrap().get(name), &peer.host) {
            (None, _) => Err(Refused::Unknown(name.to_owned())),
            (Some(lease), Some(host)) if *host != lease.borrower() => {
                Err(Refused::Forbidden(format!("not lent to {host}")))
            }
            (Some(lease), _) => Ok(Storage::Lease(lease.clone())),
        }
    }

    fn list(&self, _peer: &Peer) -> Vec<String> {
        self.leases.lock().unwrap().keys().cloned().collect()
    }
}
