//! Where servers listen, and which export there is meant.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::nbd::proto;

/// Where a server listens: `unix:PATH` or `HOST:PORT` (`[::1]:10809` for IPv6).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP port.
    Tcp {
        /// A name or an IP address, without the brackets of IPv6.
        host: String,
        /// The port; 0 lets the kernel choose when listening.
        port: u16,
    },
}

/// An export somewhere: `nbd://HOST[:PORT]/EXPORT`, `nbds://...`, `nbd+unix:///EXPORT?socket=PATH`, `nbds+unix://...`.
///
/// An empty export is the server's default one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Uri {
    /// Whether TLS is required.
    pub secure: bool,
    /// The server.
    pub address: Address,
    /// The export's name.
    pub export: String,
}

/// Why a text is not an address or URI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Neither of the two forms of an address.
    #[error(
        "'{0}' is not an address: {1}; write unix:PATH or HOST:PORT, for example unix:/run/nbd.sock or 10.0.0.2:10809"
    )]
    Address(String, &'static str),
    /// None of the four forms of a URI.
    #[error(
        "'{0}' is not an NBD URI: {1}; write nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH (nbds for TLS)"
    )]
    Uri(String, &'static str),
}

impl Address {
    /// Whether only this machine can reach it: a unix socket, or a loopback IP address or `localhost`.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Unix(_) => true,
            Self::Tcp { host, .. } => {
                host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
            }
        }
    }

    /// Reads `HOST:PORT`, or `HOST` where there is a port to fall back to.
    fn parse_tcp(text: &str, default_port: Option<u16>) -> Result<Self, &'static str> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, after) = rest.split_once(']').ok_or("the bracket is not closed")?;
                (
                    host,
                    if after.is_empty() {
                        None
                    } else {
                        Some(after.strip_prefix(':').ok_or("a ':' must follow the bracket")?)
                    },
                )
            }
            None => match text.rsplit_once(':') {
                Some((host, _)) if host.contains(':') => return Err("an IPv6 address needs brackets"),
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        if host.is_empty() || host.contains(['/', ' ', '[', ']']) {
            return Err("the host is missing or malformed");
        }
        let port = match port {
            Some(port) => port.parse().map_err(|_| "the port is not a number from 0 to 65535")?,
            None => default_port.ok_or("the port is missing")?,
        };
        Ok(Self::Tcp { host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let error = |why| AddressError::Address(text.to_owned(), why);
        match text.strip_prefix("unix:") {
            Some("") => Err(error("the path is missing")),
            Some(path) => Ok(Self::Unix(path.into())),
            None => Self::parse_tcp(text, None).map_err(error),
        }
    }
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.secure { "nbds" } else { "nbd" };
        let export = Escaped(&self.export);
        match &self.address {
            Address::Unix(path) => {
                write!(f, "{scheme}+unix:///{export}?socket={}", Escaped(&path.to_string_lossy()))
            }
            tcp @ Address::Tcp { .. } => write!(f, "{scheme}://{tcp}/{export}"),
        }
    }
}

impl FromStr for Uri {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let error = |why| AddressError::Uri(text.to_owned(), why);
        let (scheme, rest) = text.split_once("://").ok_or_else(|| error("it has no scheme"))?;
        let (secure, unix) = match scheme {
            "nbd" => (false, false),
            "nbds" => (true, false),
            "nbd+unix" => (false, true),
            "nbds+unix" => (true, true),
            _ => return Err(error("the scheme is unknown")),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = unescape(export).ok_or_else(|| error("the export is not well escaped"))?;
        let address = if unix {
            if !authority.is_empty() {
                return Err(error("a unix socket has no host"));
            }
            let socket = query.split('&').find_map(|pair| pair.strip_prefix("socket="));
            let socket =
                socket.filter(|path| !path.is_empty()).ok_or_else(|| error("socket=PATH is missing"))?;
            Address::Unix(unescape(socket).ok_or_else(|| error("the socket is not well escaped"))?.into())
        } else {
            Address::parse_tcp(authority, Some(proto::DEFAULT_PORT)).map_err(error)?
        };
        Ok(Self { secure, address, export })
    }
}

macro_rules! through_text {
    ($type:ident) => {
        impl TryFrom<String> for $type {
            type Error = AddressError;

            fn try_from(text: String) -> Result<Self, AddressError> {
                text.parse()
            }
        }

        impl From<$type> for String {
            fn from(value: $type) -> String {
                value.to_string()
            }
        }
    };
}

through_text!(Address);
through_text!(Uri);

/// Percent-encodes what may not stand in a path or query.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0.bytes() {
            if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
                write!(f, "{}", char::from(byte))?;
            } else {
                write!(f, "%{byte:02X}")?;
            }
        }
        Ok(())
    }
}

/// The inverse of [`Escaped`]; `None` where it is malformed or not UTF-8.
fn unescape(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let (hex, after) = rest.split_at_checked(2)?;
        if !hex.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        bytes.push(u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()?);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn an_address_survives_being_written_and_read() {
        for (text, address) in [
            ("unix:/run/a b.sock", Address::Unix("/run/a b.sock".into())),
            ("127.0.0.1:10809", tcp("127.0.0.1", 10809)),
            ("[::1]:1", tcp("::1", 1)),
            ("host-a.lan:65535", tcp("host-a.lan", 65535)),
        ] {
            assert_eq!(text.parse(), Ok(address.clone()));
            assert_eq!(address.to_string(), text);
        }
    }

    #[test]
    fn what_is_not_an_address_is_refused_with_the_reason() {
        for (text, why) in [
            ("", "the host is missing"),
            ("unix:", "path is missing"),
            ("host", "port is missing"),
            ("::1:80", "needs brackets"),
            ("[::1", "not closed"),
            ("[::1]80", "must follow"),
            ("host:65536", "not a number"),
            (":80", "host is missing"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

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
        assert_eq!(uri, Uri { secure: false, address: tcp("host", 10809), export: String::new() });
    }

    #[test]
    fn what_is_not_a_uri_is_refused_with_the_reason() {
        for (text, why) in [
            ("host:1", "no scheme"),
            ("http://host/", "scheme is unknown"),
            ("nbd+unix:///x", "socket=PATH is missing"),
            ("nbd+unix://host/x?socket=/s", "has no host"),
            ("nbd:///x", "host is missing"),
            ("nbd://h/%zz", "not well escaped"),
            ("nbd://h/%4", "not well escaped"),
        ] {
            let error = text.parse::<Uri>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn only_loopback_and_unix_sockets_are_local() {
        for (text, local) in [
            ("unix:/x", true),
            ("127.3.2.1:1", true),
            ("[::1]:1", true),
            ("0.0.0.0:1", false),
            ("10.0.0.1:1", false),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().is_local(), local, "{text}");
        }
    }
}
