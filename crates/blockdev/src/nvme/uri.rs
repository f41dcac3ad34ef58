//! URIs of NVMe subsystems that the kernel's initiator attaches.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::str::FromStr;

use aquifer_nvme::proto::Nqn;
use aquifer_transport::Address;
use serde::{Deserialize, Serialize};

use super::{NvmeError, Transport};

/// The registered port of NVMe over Fabrics, for TCP and RDMA.
const DEFAULT_PORT: u16 = 4420;

/// The address of a subsystem for the kernel's initiator: `nvme+tcp://HOST[:PORT]/NQN` or
/// `nvme+rdma://HOST[:PORT]/NQN`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SubsystemUri {
    /// The transport.
    pub transport: Transport,
    /// A host name or an IP address, without the brackets of IPv6.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The subsystem's NQN.
    pub nqn: Nqn,
}

/// The reason why a text is no such URI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not an NVMe URI for the kernel: {1}; \
     write nvme+tcp://HOST:PORT/NQN or nvme+rdma://HOST:PORT/NQN"
)]
pub struct UriError(String, String);

impl SubsystemUri {
    /// Resolves the host name, which the kernel does not do.
    ///
    /// # Errors
    /// Fails if the name has no address.
    pub fn resolve(&self) -> Result<SocketAddr, NvmeError> {
        let found = (self.host.as_str(), self.port).to_socket_addrs();
        let fail = NvmeError::io(format!("cannot look up {}", self.host));
        let found = found.map_err(fail)?.next();
        found.ok_or_else(|| NvmeError::new(format!("{} has no address", self.host)))
    }
}

impl FromStr for SubsystemUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        let error = |why: &dyn fmt::Display| UriError(text.to_owned(), why.to_string());
        let (scheme, rest) = text.split_once("://").ok_or_else(|| error(&"it has no scheme"))?;
        let transport = Transport::ALL.into_iter().find(|it| scheme == format!("nvme+{it}"));
        let transport = transport.ok_or_else(|| error(&"the scheme is unknown"))?;
        let (place, nqn) = rest.split_once('/').ok_or_else(|| error(&"the NQN is missing"))?;
        let nqn: Nqn = nqn.parse().map_err(|why| error(&why))?;
        if nqn.as_str().contains(',') {
            return Err(error(&"the kernel accepts no NQN with a comma"));
        }
        let has_port = place.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']'));
        let place = if has_port { place.to_owned() } else { format!("{place}:{DEFAULT_PORT}") };
        match place.parse() {
            Ok(Address::Tcp { host, port }) => Ok(Self { transport, host, port, nqn }),
            Ok(Address::Unix(_)) => Err(error(&"the kernel cannot connect to a unix socket")),
            Err(why) => Err(error(&why)),
        }
    }
}

impl fmt::Display for SubsystemUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = Address::Tcp { host: self.host.clone(), port: self.port };
        write!(f, "nvme+{}://{place}/{}", self.transport, self.nqn)
    }
}

impl TryFrom<String> for SubsystemUri {
    type Error = UriError;

    fn try_from(text: String) -> Result<Self, UriError> {
        text.parse()
    }
}

impl From<SubsystemUri> for String {
    fn from(uri: SubsystemUri) -> Self {
        uri.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_survives_being_written_and_read() {
        for text in [
            "nvme+tcp://10.0.0.2:4420/nqn.2014-08.org.nvmexpress:uuid:\
             01234567-89ab-cdef-0011-223344556677",
            "nvme+rdma://[fd00::1]:7/nqn.2014-08.org.example:a/b",
        ] {
            assert_eq!(text.parse::<SubsystemUri>().unwrap().to_string(), text);
        }
        for text in
            ["nvme+tcp://b/nqn.2014-08.org.example:a", "nvme+tcp://[::1]/nqn.2014-08.org.example:a"]
        {
            assert_eq!(text.parse::<SubsystemUri>().unwrap().port, 4420, "{text}");
        }
    }

    #[test]
    fn an_invalid_uri_is_refused_with_the_reason() {
        for (text, why) in [
            ("10.0.0.2:4420", "no scheme"),
            ("nvme+fc://b/nqn.2014-08.org.example:a", "scheme is unknown"),
            ("nvme+tcp://b:4420", "NQN is missing"),
            ("nvme+tcp://b:4420/disk", "not an NQN"),
            ("nvme+tcp://b:x/nqn.2014-08.org.example:a", "not a number"),
            ("nvme+tcp://b/nqn.2014-08.org.example:a,ctrl_loss_tmo=0", "comma"),
        ] {
            let error = text.parse::<SubsystemUri>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
