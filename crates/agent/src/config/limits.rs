//! Settings for what one borrower may use of this host.

use aquifer_transport::serving::ConnectionLimits;
use aquifer_transport::serving::limits::{Allowance, ByteRate, LendingLimits, RequestRate};
use serde::Deserialize;

/// What a host, and what a lease, may use of this lender; `None` sets no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Bytes a second that a host may read and write in all its leases.
    pub host_bytes: Option<ByteRate>,
    /// Requests a second of a host.
    pub host_requests: Option<RequestRate>,
    /// Connections of a host to all its leases.
    pub host_connections: Option<u32>,
    /// Bytes a second that may be read and written in a lease.
    pub lease_bytes: Option<ByteRate>,
    /// Requests a second to a lease.
    pub lease_requests: Option<RequestRate>,
    /// Connections to a lease.
    pub lease_connections: Option<u32>,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        let LendingLimits { host, lease } = LendingLimits::default();
        Self {
            host_bytes: host.bytes,
            host_requests: host.requests,
            host_connections: host.connections,
            lease_bytes: lease.bytes,
            lease_requests: lease.requests,
            lease_connections: lease.connections,
        }
    }
}

impl LimitsConfig {
    /// Returns the limits of the gate.
    pub fn limits(&self) -> LendingLimits {
        LendingLimits {
            host: Allowance {
                bytes: self.host_bytes,
                requests: self.host_requests,
                connections: self.host_connections,
            },
            lease: Allowance {
                bytes: self.lease_bytes,
                requests: self.lease_requests,
                connections: self.lease_connections,
            },
        }
    }

    /// Returns the limits of a listener, which has no names yet: they never come first.
    pub fn of_listener(&self) -> ConnectionLimits {
        let default = ConnectionLimits::default();
        let named = self.host_connections.map_or(0, |most| most as usize);
        let handshakes = default.per_host / 8;
        let per_host = default.per_host.max(named + handshakes);
        ConnectionLimits { per_host, all: default.all.max(2 * per_host), ..default }
    }

    pub(super) fn validate(&self) -> Result<(), String> {
        let checked = self.limits().validate(|key, what| format!("[lend.limits] {key}_{what} ="));
        checked.map_err(|(why, help)| format!("{why}; {help}"))
    }

    /// Returns whether the operator set any limit.
    pub(super) fn is_set(&self) -> bool {
        *self != Self::default()
    }
}
