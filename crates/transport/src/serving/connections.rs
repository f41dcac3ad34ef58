//! The start and end of each connection to a lease, for the owner of a server.

use aquifer_page::LeaseId;

/// Learns of the connections to each lease. The threads of the connections call it.
pub trait Connections: Send + Sync {
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
