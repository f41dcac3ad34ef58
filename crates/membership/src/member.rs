//! A host as the gossip names it.

use std::net::SocketAddr;

use aquifer_page::HostName;
use serde::{Deserialize, Serialize};

/// A host of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Member {
    /// Its name, unique in the cluster.
    pub host: HostName,
    /// The address of its agent: TCP for requests, UDP for gossip.
    pub address: SocketAddr,
    /// Grows with each start of its agent, and each time that others take the host for dead.
    pub life: u64,
}

impl foca::Identity for Member {
    type Addr = HostName;

    fn renew(&self) -> Option<Self> {
        Some(Self { life: self.life.checked_add(1)?, ..self.clone() })
    }

    fn addr(&self) -> HostName {
        self.host.clone()
    }

    fn win_addr_conflict(&self, adversary: &Self) -> bool {
        (self.life, self.address) > (adversary.life, adversary.address)
    }
}
