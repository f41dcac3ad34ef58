//! The lending half: leases in the store, and the server by which borrowers reach their pages.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer_control::LentLease;
use aquifer_fabric::nbd::server::{Exports, Peer, Refused, Security, Server};
use aquifer_fabric::{Address, tls::Identity};
use aquifer_page::{Bytes, HostName, LeaseId};
use aquifer_store::{Lease, LeaseRecord, Store};
use serde::{Deserialize, Serialize};

use crate::config::Config;

/// What this host has lent. Its calls may take as long as freeing memory takes; none waits for a peer.
#[derive(Debug)]
pub struct Lender {
    leases: Arc<Leases>,
    server: Server,
    address: String,
}

/// What the agent remembers with a lease besides its pages.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    request: String,
}

impl Lender {
    /// Opens the store with whatever an agent before this one left in it, and serves it.
    ///
    /// # Errors
    /// The store or the address cannot be used; says which and why.
    pub fn open(config: &Config, identity: &Identity) -> Result<Self, String> {
        let store = Store::open(&config.store_dir()).map_err(|error| error.to_string())?;
        let leases = Arc::new(Leases { store, connections: Mutex::default() });
        let security = Security::Tls(identity.server_config());
        let address = Address::Tcp { host: config.pages.ip().to_string(), port: config.pages.port() };
        let server = Server::bind(&address, security, leases.clone()).map_err(|error| error.to_string())?;
        let address = server.address().to_string();
        Ok(Self { leases, server, address })
    }

    /// Where borrowers reach the pages.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The leases that an agent before this one granted, each with its address.
    pub fn restored(&self) -> Vec<(LentLease, String)> {
        self.leases
            .store
            .leases()
            .iter()
            .filter_map(|lease| Some((lent(lease)?, self.address.clone())))
            .collect()
    }

    /// Sets a lease up; answers where its pages are reached.
    ///
    /// # Errors
    /// The store cannot take it.
    pub fn open_lease(&self, lent: &LentLease) -> Result<String, String> {
        let note = Note { request: lent.request.to_string() };
        let record = LeaseRecord {
            id: lent.lease,
            borrower: lent.borrower.clone(),
            group: lent.group.clone(),
            capacity: lent.bytes,
            quota: lent.bytes,
            note: serde_json::to_value(note).map_err(|error| error.to_string())?,
        };
        // The controller may say it twice.
        if self.leases.store.get(lent.lease).is_none() {
            self.leases.store.create(record).map_err(|error| error.to_string())?;
        }
        Ok(self.address.clone())
    }

    /// Drops a lease with its connections and its pages. One that is gone already is no error.
    pub fn free_lease(&self, lease: LeaseId) {
        self.server.close_lease(lease);
        if self.leases.store.get(lease).is_some()
            && let Err(error) = self.leases.store.remove(lease)
        {
            tracing::error!(%lease, "what was left of a lease could not be removed: {error}");
        }
    }

    /// Whether this lease was granted to that host.
    pub fn is_of(&self, lease: LeaseId, borrower: &HostName) -> bool {
        self.leases.store.get(lease).is_some_and(|lease| lease.borrower() == borrower)
    }

    /// RAM that all leases take.
    pub fn stored(&self) -> Bytes {
        self.leases.store.usage().stored
    }

    /// RAM that each lease takes.
    pub fn stored_by_lease(&self) -> BTreeMap<LeaseId, Bytes> {
        self.leases.store.leases().iter().map(|lease| (lease.id(), lease.stored())).collect()
    }

    /// RAM that one lease takes.
    pub fn stored_in(&self, lease: LeaseId) -> Bytes {
        self.leases.store.get(lease).map_or(Bytes::ZERO, |lease| lease.stored())
    }

    /// How many connections each lease has that has any.
    pub fn connections(&self) -> BTreeMap<LeaseId, u32> {
        self.leases.connections().clone()
    }
}

/// The lease of a record that an agent wrote.
fn lent(lease: &Arc<Lease>) -> Option<LentLease> {
    let note: Note = serde_json::from_value(lease.record().note).ok()?;
    Some(LentLease {
        lease: lease.id(),
        borrower: lease.borrower().clone(),
        group: lease.group().clone(),
        bytes: lease.capacity(),
        request: note.request.try_into().ok()?,
    })
}

/// Lets each host at its own leases, and counts who is connected.
#[derive(Debug)]
struct Leases {
    store: Store,
    connections: Mutex<BTreeMap<LeaseId, u32>>,
}

impl Leases {
    fn connections(&self) -> MutexGuard<'_, BTreeMap<LeaseId, u32>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Exports for Leases {
    fn open(&self, name: &str, peer: &Peer) -> Result<Arc<Lease>, Refused> {
        // One answer for what is not there and what is somebody else's: a host learns nothing of the leases of others.
        let refused = || Refused::Unknown(name.to_owned());
        let id: LeaseId = name.parse().map_err(|_| refused())?;
        let lease = self.store.get(id).ok_or_else(refused)?;
        if peer.host.as_ref() == Some(lease.borrower()) { Ok(lease) } else { Err(refused()) }
    }

    fn list(&self, peer: &Peer) -> Vec<String> {
        let own = |lease: &Arc<Lease>| peer.host.as_ref() == Some(lease.borrower());
        self.store.leases().into_iter().filter(own).map(|lease| lease.id().to_string()).collect()
    }

    fn connected(&self, lease: LeaseId) {
        *self.connections().entry(lease).or_default() += 1;
    }

    fn disconnected(&self, lease: LeaseId) {
        let mut connections = self.connections();
        if let Some(count) = connections.get_mut(&lease) {
            *count -= 1;
            if *count == 0 {
                connections.remove(&lease);
            }
        }
    }
}
