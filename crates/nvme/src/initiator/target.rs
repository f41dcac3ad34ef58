//! The address of a namespace, and the way to connect to it.

use std::fmt;
use std::time::Duration;

use aquifer_transport::Address;

use crate::NvmeUri;
use crate::auth::Secrets;
use crate::proto::Nqn;
use crate::proto::pdu::digests;

/// A namespace to connect to, the host's name, and the options of the connection.
#[derive(Clone)]
pub struct Target {
    /// The target's address.
    pub address: Address,
    /// The subsystem's name.
    pub subsystem: Nqn,
    /// The namespace's identifier in the subsystem, from 1 on.
    pub namespace: u32,
    /// The name by which the target knows this host.
    pub host: Nqn,
    /// This host's identifier. Targets expect a name to keep its identifier, see [`Nqn::host_id`].
    pub host_id: [u8; 16],
    /// Secrets for authentication, if the target demands it. With a controller's secret, the target
    /// must demand authentication and prove its own name too.
    pub secrets: Option<Secrets>,
    /// Keep alive timeout: after this long without a Keep Alive, the controller may end. The host
    /// sends three in that time. The controller of a dead host exists for this long.
    pub keep_alive: Duration,
    /// Whether every header carries a digest.
    pub header_digest: bool,
    /// Whether all data carries a digest.
    pub data_digest: bool,
}

impl Target {
    /// Default keep alive timeout: long enough that a host that stalls while it swaps keeps its
    /// controller.
    pub const DEFAULT_KEEP_ALIVE: Duration = Duration::from_secs(30);

    /// Names the first namespace of a subsystem, without secrets and digests.
    pub fn new(address: Address, subsystem: Nqn, host: Nqn) -> Self {
        let host_id = host.host_id();
        Self {
            address,
            subsystem,
            namespace: 1,
            host,
            host_id,
            secrets: None,
            keep_alive: Self::DEFAULT_KEEP_ALIVE,
            header_digest: false,
            data_digest: false,
        }
    }

    /// Returns the digests wanted, as bits of ICReq.
    pub(super) fn digests(&self) -> u8 {
        let header = if self.header_digest { digests::HEADER } else { 0 };
        header | if self.data_digest { digests::DATA } else { 0 }
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({self} for {})", self.host)
    }
}

impl fmt::Display for Target {
    /// Writes the target's URI.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        NvmeUri { address: self.address.clone(), subsystem: self.subsystem.clone() }.fmt(f)
    }
}
