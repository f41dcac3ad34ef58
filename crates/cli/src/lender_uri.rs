//! The URI of an export or subsystem to borrow from, as operators write it.

use std::fmt;
use std::str::FromStr;

use aquifer_nbd::Uri;
use aquifer_nvme::NvmeUri;
use aquifer_transport::{Address, AddressError};

/// An NBD export or an NVMe subsystem to borrow from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LenderUri {
    /// `nbd://HOST[:PORT]/EXPORT`, and the other forms of the NBD URI specification.
    Nbd(Uri),
    /// `nvme+tcp://HOST[:PORT]/NQN` or `nvme+unix:///NQN?socket=PATH`.
    Nvme(NvmeUri),
}

impl LenderUri {
    /// Returns the address of the server.
    pub fn address(&self) -> &Address {
        match self {
            Self::Nbd(uri) => &uri.address,
            Self::Nvme(uri) => &uri.address,
        }
    }

    /// Returns whether TLS protects the connection.
    pub fn is_secure(&self) -> bool {
        matches!(self, Self::Nbd(uri) if uri.secure)
    }
}

impl fmt::Display for LenderUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nbd(uri) => uri.fmt(f),
            Self::Nvme(uri) => uri.fmt(f),
        }
    }
}

impl FromStr for LenderUri {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if text.starts_with("nvme") {
            text.parse().map(Self::Nvme)
        } else {
            text.parse().map(Self::Nbd)
        }
    }
}
