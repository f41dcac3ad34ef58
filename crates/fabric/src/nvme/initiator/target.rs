use std::fmt;
use std::time::Duration;

use crate::nvme::auth::Secrets;
use crate::nvme::proto::Nqn;
use crate::nvme::proto::pdu::digests;
use crate::{Address, NvmeUri};

/// A namespace somewhere, who asks for it, and how.
#[derive(Clone)]
pub struct Target {
    /// The target.
    pub address: Address,
    /// The subsystem.
    pub subsystem: Nqn,
    /// The namespace's identifier in it.
    pub namespace: u32,
    /// The name of this host: what the target knows it by.
    pub host: Nqn,
    /// This host's identifier. Targets want one name to have one identifier, see [`Nqn::host_id`].
    pub host_id: [u8; 16],
    /// What this host proves its name by if the target asks for that; with a secret of the controller, it must ask, and
    /// prove who it is too.
    pub secrets: Option<Secrets>,
    /// How long the controller waits for a sign of life, of which there are three in that time. A host that is gone keeps its
    /// controller for as long as this.
    pub keep_alive: Duration,
    /// Have a digest over every header.
    pub header_digest: bool,
    /// Have a digest over all data.
    pub data_digest: bool,
}

impl Target {
    /// A host that swaps may be stuck for a while, and is not to lose its controller by that.
    pub const DEFAULT_KEEP_ALIVE: Duration = Duration::from_secs(30);

    /// The first namespace of a subsystem, without secrets and digests.
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

    /// The digests wanted, as ICReq has them.
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
    /// As a URI.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        NvmeUri { address: self.address.clone(), subsystem: self.subsystem.clone() }.fmt(f)
    }
}
