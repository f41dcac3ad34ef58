//! URIs of NVMe subsystems.

use std::fmt;
use std::str::FromStr;

use aquifer_transport::address::{parse_rest, write_uri};
use aquifer_transport::{Address, AddressError, through_text};
use serde::{Deserialize, Serialize};

use crate::proto::{DEFAULT_PORT, Nqn};

/// The forms of a URI, for messages.
const FORMS: &str = "nvme+tcp://HOST:PORT/NQN or nvme+unix:///NQN?socket=PATH";

/// URI of an NVMe subsystem: `nvme+tcp://HOST[:PORT]/NQN`, `nvme+unix:///NQN?socket=PATH`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NvmeUri {
    /// The target's address.
    pub address: Address,
    /// The subsystem's name.
    pub subsystem: Nqn,
}

through_text!(NvmeUri);

impl fmt::Display for NvmeUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_uri(f, "nvme", "+tcp", &self.address, self.subsystem.as_str())
    }
}

impl FromStr for NvmeUri {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let error = |why: &str| AddressError::Uri {
            text: text.to_owned(),
            protocol: "NVMe",
            why: why.to_owned(),
            forms: FORMS,
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| error("it has no scheme"))?;
        let unix = match scheme {
            "nvme+tcp" => false,
            "nvme+unix" => true,
            _ => return Err(error("the scheme is unknown")),
        };
        let (address, subsystem) = parse_rest(rest, unix, DEFAULT_PORT).map_err(error)?;
        let subsystem =
            subsystem.parse().map_err(|bad: crate::proto::NqnError| error(&bad.to_string()))?;
        Ok(Self { address, subsystem })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:01234567-89ab-cdef-0011-223344556677";

    #[test]
    fn a_uri_survives_being_written_and_read() {
        for text in
            [format!("nvme+tcp://10.0.0.2:4421/{NQN}"), format!("nvme+unix:///{NQN}?socket=/a%20b")]
        {
            assert_eq!(text.parse::<NvmeUri>().unwrap().to_string(), text);
        }
        let uri: NvmeUri = format!("nvme+tcp://[::1]/{NQN}").parse().unwrap();
        assert_eq!(uri.address, Address::Tcp { host: "::1".to_owned(), port: 4420 });
    }

    #[test]
    fn a_malformed_uri_is_refused_with_the_reason() {
        for (text, why) in [
            ("host:1", "no scheme"),
            ("nvme://host/x", "scheme is unknown"),
            ("nvme+tcp://host:1/", "is not an NQN"),
            ("nvme+tcp://host:1/pages", "is not an NQN"),
            ("nvme+unix:///nqn.2014-08.org.example:a", "socket=PATH is missing"),
            ("nvme+tcp:///nqn.2014-08.org.example:a", "host is missing"),
        ] {
            let error = text.parse::<NvmeUri>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
