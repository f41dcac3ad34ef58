//! The URI of memory that `aquifer volume attach` can use.

use std::fmt;
use std::str::FromStr;

use aquifer_blockdev::nvme::{SubsystemUri, Transport, UriError};
use aquifer_transport::{Address, AddressError};

use crate::failure::{Failure, Result};
use crate::lender_uri::LenderUri;

/// The URI of an export, by the side that can reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Lent {
    /// An export that a volume process can reach.
    Served(LenderUri),
    /// A subsystem that only the kernel's initiator can reach.
    Rdma(SubsystemUri),
}

/// The reasons for which a text is no such URI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LentError {
    #[error(transparent)]
    Served(#[from] AddressError),
    #[error(transparent)]
    Rdma(#[from] UriError),
}

impl Lent {
    /// Returns the subsystem for the kernel's initiator, or why the kernel cannot reach it.
    pub(super) fn subsystem(&self) -> Result<SubsystemUri> {
        match self {
            Self::Rdma(uri) => Ok(uri.clone()),
            Self::Served(LenderUri::Nvme(uri)) => match &uri.address {
                Address::Tcp { host, port } => Ok(SubsystemUri {
                    transport: Transport::Tcp,
                    host: host.clone(),
                    port: *port,
                    nqn: uri.subsystem.clone(),
                }),
                Address::Unix(_) => Err(self.misfit("the kernel cannot connect to a unix socket")),
            },
            Self::Served(LenderUri::Nbd(_)) => {
                Err(self.misfit("--direct attaches only NVMe subsystems"))
            }
        }
    }

    fn misfit(&self, why: &str) -> Failure {
        Failure::new(format!("attaching {self}"), why)
            .help("use nvme+tcp://HOST:PORT/NQN or nvme+rdma://HOST:PORT/NQN, or drop --direct")
    }
}

impl FromStr for Lent {
    type Err = LentError;

    fn from_str(text: &str) -> Result<Self, LentError> {
        if text.starts_with("nvme+rdma:") {
            Ok(Self::Rdma(text.parse()?))
        } else {
            Ok(Self::Served(text.parse()?))
        }
    }
}

impl fmt::Display for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Served(uri) => uri.fmt(f),
            Self::Rdma(uri) => uri.fmt(f),
        }
    }
}
