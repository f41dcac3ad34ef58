//! The start and end of each connection to a lease, for the owner of a server.

use std::sync::Arc;

use aquifer_page::{HostName, LeaseId};

use super::limits::Gate;

/// Learns of the connections to each lease, and limits them. The threads of the connections call
/// it.
pub trait Connections: Send + Sync {
    /// Returns the limits that connections to leases must keep; `None` for none. MUST always return
    /// the same gate.
    fn gate(&self) -> Option<Arc<Gate>> {
        None
    }

    /// Returns the host to which the lease belongs, if that is on record: the limits of that host
    /// apply, whatever name the client gives.
    fn borrower(&self, lease: LeaseId) -> Option<HostName> {
        let _ = lease;
        None
    }

    /// Notes the start of a connection to the lease; [`disconnected`](Self::disconnected) follows
    /// exactly once.
    fn connected(&self, lease: LeaseId) {
        let _ = lease;
    }

    /// Notes the end of a connection to the lease.
    fn disconnected(&self, lease: LeaseId) {
        let _ = lease;
    }
}

/// A guard that reports the start of a connection and, on drop, its end.
#[must_use = "its drop reports the end"]
pub struct Connected<'a> {
    connections: &'a dyn Connections,
    lease: LeaseId,
}

impl std::fmt::Debug for Connected<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Connected({})", self.lease)
    }
}

impl<'a> Connected<'a> {
    /// Reports the start.
    pub fn new(connections: &'a dyn Connections, lease: LeaseId) -> Self {
        connections.connected(lease);
        Self { connections, lease }
    }
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        self.connections.disconnected(self.lease);
    }
}
