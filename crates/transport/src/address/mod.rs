//! Addresses of servers, and the common form of the protocols' URIs.

mod escape;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use escape::{Escaped, unescape};

/// The address of a listening server: `unix:PATH` or `HOST:PORT` (`[::1]:10809` for IPv6).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Address {
    /// The path of a unix socket.
    Unix(PathBuf),
    /// A TCP endpoint.
    Tcp {
        /// A name or an IP address, without the brackets of IPv6.
        host: String,
        /// The port; for a listener, 0 lets the kernel choose.
        port: u16,
    },
}

/// The reason why a text is not an address or URI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The text matches neither form of an address; the second value says why.
    #[error(
        "'{0}' is not an address: {1}; write unix:PATH or HOST:PORT, for example \
         unix:/run/nbd.sock or 10.0.0.2:10809"
    )]
    Address(String, &'static str),
    /// The text matches no form of a protocol's URI.
    #[error("'{text}' is not an {protocol} URI: {why}; write {forms}")]
    Uri {
        /// The text.
        text: String,
        /// The name of the protocol.
        protocol: &'static str,
        /// The reason.
        why: String,
        /// The forms that the protocol knows.
        forms: &'static str,
    },
}

impl Address {
    /// Returns whether only this machine can reach the address: a unix socket, a loopback IP
    /// address or `localhost`.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Unix(_) => true,
            Self::Tcp { host, .. } => {
                host == "localhost"
                    || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
            }
        }
    }

    /// Parses `HOST:PORT`, or `HOST` alone if `default_port` is given.
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
                Some((host, _)) if host.contains(':') => {
                    return Err("an IPv6 address needs brackets");
                }
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

/// Implements the conversions from and to `String` that serde needs, by `FromStr` and `Display`.
#[macro_export]
macro_rules! through_text {
    ($type:ident) => {
        impl TryFrom<String> for $type {
            type Error = $crate::AddressError;

            fn try_from(text: String) -> Result<Self, Self::Error> {
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

/// Splits the part of a URI after `://` into the server's address and the unescaped path.
///
/// The path comes without its leading slash.
///
/// # Errors
/// The reason why the part is malformed.
pub fn parse_rest(
    rest: &str,
    unix: bool,
    default_port: u16,
) -> Result<(Address, String), &'static str> {
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let path = unescape(path).ok_or("the path has a malformed % escape")?;
    if !unix {
        return Ok((Address::parse_tcp(authority, Some(default_port))?, path));
    }
    if !authority.is_empty() {
        return Err("a unix socket has no host");
    }
    let socket = query.split('&').find_map(|pair| pair.strip_prefix("socket="));
    let socket = socket.filter(|path| !path.is_empty()).ok_or("socket=PATH is missing")?;
    let socket = unescape(socket).ok_or("the socket's path has a malformed % escape")?;
    Ok((Address::Unix(socket.into()), path))
}

/// Writes a URI; `tcp` follows the scheme if the address is a TCP endpoint.
///
/// # Errors
/// The formatter's error.
pub fn write_uri(
    f: &mut fmt::Formatter<'_>,
    scheme: &str,
    tcp: &str,
    address: &Address,
    path: &str,
) -> fmt::Result {
    let path = Escaped(path);
    match address {
        Address::Unix(socket) => {
            write!(f, "{scheme}+unix:///{path}?socket={}", Escaped(&socket.to_string_lossy()))
        }
        Address::Tcp { .. } => write!(f, "{scheme}{tcp}://{address}/{path}"),
    }
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
    fn a_malformed_address_is_refused_with_the_reason() {
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
