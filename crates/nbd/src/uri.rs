//! URIs of NBD exports, after `doc/uri.md` of the NetworkBlockDevice/nbd project.

use std::fmt;
use std::str::FromStr;

use aquifer_transport::address::{parse_rest, write_uri};
use aquifer_transport::{Address, AddressError, through_text};
use serde::{Deserialize, Serialize};

use crate::proto;

/// The forms of a URI, for messages.
const FORMS: &str = "nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH (nbds for TLS)";

/// The URI of an NBD export.
///
/// Its forms: `nbd://HOST[:PORT]/EXPORT`, `nbds://...`, `nbd+unix:///EXPORT?socket=PATH` and
/// `nbds+unix://...`. An empty export name means the server's default export.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Uri {
    /// Whether the URI requires TLS.
    pub secure: bool,
    /// The server's address.
    pub address: Address,
    /// The export's name, unescaped.
    pub export: String,
}

through_text!(Uri);

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.secure { "nbds" } else { "nbd" };
        write_uri(f, scheme, "", &self.address, &self.export)
    }
}

impl FromStr for Uri {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let error = |why: &str| AddressError::Uri {
            text: text.to_owned(),
            protocol: "NBD",
            why: why.to_owned(),
            forms: FORMS,
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| error("it has no scheme"))?;
        let (secure, unix) = match scheme {
            "nbd" => (false, false),
            "nbds" => (true, false),
            "nbd+unix" => (false, true),
            "nbds+unix" => (true, true),
            _ => return Err(error("the scheme is unknown")),
        };
        let (address, export) = parse_rest(rest, unix, proto::DEFAULT_PORT).map_err(error)?;
        Ok(Self { secure, address, export })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_survives_being_written_and_read() {
        for text in [
            "nbd://127.0.0.1:10809/",
            "nbds://[::1]:7/lease%20one",
            "nbd+unix:///?socket=/tmp/a%20b%3F",
            "nbds+unix:///x%25y?socket=/s",
        ] {
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), text);
        }
        let uri: Uri = "nbd://host".parse().unwrap();
        assert_eq!(
            uri,
            Uri {
                secure: false,
                address: Address::Tcp { host: "host".to_owned(), port: 10809 },
                export: String::new()
            }
        );
    }

    #[test]
    fn a_malformed_uri_is_refused_with_the_reason() {
        for (text, why) in [
            ("host:1", "no scheme"),
            ("http://host/", "scheme is unknown"),
            ("nbd+unix:///x", "socket=PATH is missing"),
            ("nbd+unix://host/x?socket=/s", "has no host"),
            ("nbd:///x", "host is missing"),
            ("nbd://h/%zz", "malformed % escape"),
            ("nbd://h/%4", "malformed % escape"),
        ] {
            let error = text.parse::<Uri>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
