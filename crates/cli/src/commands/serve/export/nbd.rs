//! The leases of `aquifer serve export` as NBD exports.

use std::sync::Arc;

use aquifer_nbd::server::{Exports, Peer, Refused, Storage};
use aquifer_store::Lease;
use aquifer_transport::serving::Connections;
use aquifer_transport::serving::limits::Gate;

/// Leases by name, open to every client that may connect.
pub(super) struct Leases {
    pub(super) leases: Vec<(String, Arc<Lease>)>,
    pub(super) gate: Arc<Gate>,
}

impl Connections for Leases {
    fn gate(&self) -> Option<Arc<Gate>> {
        Some(Arc::clone(&self.gate))
    }
}

impl Exports for Leases {
    fn open(&self, name: &str, _peer: &Peer) -> Result<Storage, Refused> {
        let is_only = self.leases.len() == 1;
        let found = self.leases.iter().find(|(own, _)| (name.is_empty() && is_only) || name == own);
        found
            .map(|(_, lease)| Storage::Lease(lease.clone()))
            .ok_or_else(|| Refused::Unknown(name.to_owned()))
    }

    fn list(&self, _peer: &Peer) -> Vec<String> {
        self.leases.iter().map(|(name, _)| name.clone()).collect()
    }
}
