//! The limits of clients of `aquifer serve export`.

use std::sync::Arc;

use aquifer_page::Bytes;
use aquifer_transport::serving::limits::{Allowance, ByteRate, Gate, LendingLimits, RequestRate};
use clap::Args;

use crate::failure::{Failure, Result};

/// What each client host, and each device, may use.
#[derive(Debug, Args)]
pub(super) struct LimitOptions {
    /// Bytes a second that a host may read and write
    ///
    /// A request over a rate waits, and other hosts go on. Hosts are told apart by certificate, or
    /// else by address. Default: no limit.
    #[arg(long, value_name = "SIZE", conflicts_with = "kernel")]
    host_bytes: Option<Bytes>,
    /// Requests a second of a host
    ///
    /// Default: no limit.
    #[arg(long, value_name = "N", conflicts_with = "kernel")]
    host_requests: Option<u32>,
    /// Connections of a host
    ///
    /// A further connection is refused. A TCP listener takes 384 from one address at most.
    #[arg(long, value_name = "N", conflicts_with = "kernel")]
    host_connections: Option<u32>,
    /// Bytes a second that may be read and written on a device
    ///
    /// Default: no limit.
    #[arg(long, value_name = "SIZE", conflicts_with = "kernel")]
    lease_bytes: Option<Bytes>,
    /// Requests a second to a device
    ///
    /// Default: no limit.
    #[arg(long, value_name = "N", conflicts_with = "kernel")]
    lease_requests: Option<u32>,
    /// Connections to a device
    ///
    /// Default: no limit but those of the listeners.
    #[arg(long, value_name = "N", conflicts_with = "kernel")]
    lease_connections: Option<u32>,
}

impl LimitOptions {
    /// Makes the gate that all servers of the export share.
    pub(super) fn gate(&self, what: impl Fn() -> String) -> Result<Arc<Gate>> {
        let limits = LendingLimits {
            host: Allowance {
                bytes: self.host_bytes.map(ByteRate),
                requests: self.host_requests.map(RequestRate),
                connections: self.host_connections,
            },
            lease: Allowance {
                bytes: self.lease_bytes.map(ByteRate),
                requests: self.lease_requests.map(RequestRate),
                connections: self.lease_connections,
            },
        };
        limits
            .validate(|key, limit| format!("--{key}-{limit}"))
            .map_err(|(why, help)| Failure::new(what(), why).help(help))?;
        Ok(Gate::new(limits))
    }
}
