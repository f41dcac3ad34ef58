use std::sync::Arc;

use aquifer_fabric::nbd::server::{Exports, Peer, Refused};
use aquifer_store::Lease;

/// One lease for everybody who gets as far as asking.
pub(super) struct OneLease {
    pub(super) name: String,
    pub(super) lease: Arc<Lease>,
}

impl Exports for OneLease {
    fn open(&self, name: &str, _peer: &Peer) -> Result<Arc<Lease>, Refused> {
        if name.is_empty() || name == self.name {
            Ok(Arc::clone(&self.lease))
        } else {
            Err(Refused::Unknown(name.to_owned()))
        }
    }

    fn list(&self, _peer: &Peer) -> Vec<String> {
        vec![self.name.clone()]
    }
}
