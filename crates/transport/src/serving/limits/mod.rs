//! A lender's limits: connections, requests and bytes a second, by host and by lease.
//!
//! `bucket` and `turns` are the policy's parts. `ledger` is the policy: which request passes now,
//! and which waits how long, for which limit. `books` counts what each borrower moved. `gate` is
//! the mechanism, which connections share. A request over a rate gets no error: it waits, and its
//! connection reads nothing meanwhile.

mod books;
mod bucket;
mod gate;
mod ledger;
mod turns;

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use aquifer_page::{Bytes, HostName, LeaseId};
use serde::Deserialize;

pub use books::{LeaseTraffic, Traffic};
pub use gate::{Gate, Pass};

/// Bytes a second; at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(transparent)]
pub struct ByteRate(pub Bytes);

/// Requests a second; at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(transparent)]
pub struct RequestRate(pub u32);

/// What one host, or one lease, may use; `None` sets no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allowance {
    /// Bytes a second that are read or written.
    pub bytes: Option<ByteRate>,
    /// Requests a second.
    pub requests: Option<RequestRate>,
    /// Connections at a time.
    pub connections: Option<u32>,
}

/// A lender's limits for its borrowers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LendingLimits {
    /// What each host may use with all its leases together.
    pub host: Allowance,
    /// What each lease may use.
    pub lease: Allowance,
}

impl Default for LendingLimits {
    /// Limits connections only: a lease to three NVMe controllers with all their queues, and a host
    /// to half of what a listener serves.
    fn default() -> Self {
        let of = |connections| Allowance { connections: Some(connections), ..Allowance::default() };
        Self { host: of(512), lease: of(256) }
    }
}

/// The least bytes a second that an operator may set.
const LEAST_BYTES: Bytes = Bytes::mib(1);
/// The least requests a second that an operator may set: about [`LEAST_BYTES`] as single pages.
const LEAST_REQUESTS: u32 = 256;
/// The fewest connections that an operator may set.
const FEWEST_CONNECTIONS: u32 = 8;

impl LendingLimits {
    /// Checks limits that an operator sets. `name` returns what the operator calls a limit.
    ///
    /// # Errors
    /// The reason, which names the limit, and the way out.
    pub fn validate(&self, name: impl Fn(&str, &str) -> String) -> Result<(), (String, String)> {
        for (key, of) in [("host", self.host), ("lease", self.lease)] {
            let too_low = |what: &str, is: String, least: String| {
                let name = name(key, what);
                Err((
                    format!("{name} {is} is too low: borrowers would take this host for dead"),
                    format!("set at least {least}, or leave it out"),
                ))
            };
            if let Some(ByteRate(bytes)) = of.bytes.filter(|rate| rate.0 < LEAST_BYTES) {
                return too_low("bytes", bytes.to_string(), LEAST_BYTES.to_string());
            }
            if let Some(RequestRate(count)) = of.requests.filter(|rate| rate.0 < LEAST_REQUESTS) {
                return too_low("requests", count.to_string(), LEAST_REQUESTS.to_string());
            }
            if let Some(count) = of.connections.filter(|count| *count < FEWEST_CONNECTIONS) {
                return too_low("connections", count.to_string(), FEWEST_CONNECTIONS.to_string());
            }
        }
        Ok(())
    }

    /// Returns whether any limit can make a request wait.
    fn has_rates(&self) -> bool {
        [self.host, self.lease].iter().any(|of| of.bytes.is_some() || of.requests.is_some())
    }
}

/// The host at the other end of a connection, as far as the lender can be sure.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Borrower {
    /// A host of the cluster, by its certificate or by the record of its lease.
    Host(HostName),
    /// A host without a proven name. Of an IPv6 address only the first 64 bits count, as one host
    /// can have all addresses of its network.
    Address(IpAddr),
    /// A process of this host, on a unix socket.
    Local,
    /// Several of these that have no connection any more.
    Former,
}

impl Borrower {
    /// Names a host by `host` if that is proven, or else by its address.
    pub fn new(host: Option<HostName>, ip: Option<IpAddr>) -> Self {
        match (host, ip) {
            (Some(host), _) => Self::Host(host),
            (None, Some(ip)) => Self::Address(network(ip.to_canonical())),
            (None, None) => Self::Local,
        }
    }
}

/// Returns the network whose addresses one host can have: an IPv4 address, or 64 bits of IPv6.
fn network(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(ip) if !ip.is_loopback() => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
        ip => ip,
    }
}

impl fmt::Display for Borrower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(host) => write!(f, "host {host}"),
            Self::Address(IpAddr::V6(ip)) if !ip.is_loopback() => {
                write!(f, "the host at {ip}/64")
            }
            Self::Address(ip) => write!(f, "the host at {ip}"),
            Self::Local => f.write_str("this host"),
            Self::Former => f.write_str("former borrowers"),
        }
    }
}

/// A limit for which a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Bytes a second of the lease.
    LeaseBytes,
    /// Requests a second of the lease.
    LeaseRequests,
    /// Bytes a second of the host.
    HostBytes,
    /// Requests a second of the host.
    HostRequests,
    /// Bytes a second of all borrowers together.
    Total,
}

impl fmt::Display for Limit {
    /// Writes the key of the configuration, or `share`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LeaseBytes => "lease_bytes",
            Self::LeaseRequests => "lease_requests",
            Self::HostBytes => "host_bytes",
            Self::HostRequests => "host_requests",
            Self::Total => "share",
        })
    }
}

/// Refusal of a connection by a limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitReached {
    /// The host has as many connections as it may.
    #[error("{0} has {1} connections here, the lender's limit for a host")]
    Host(Borrower, u32),
    /// The lease has as many connections as it may.
    #[error("lease {0} has {1} connections, the lender's limit for a lease")]
    Lease(LeaseId, u32),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_starve_borrowers_are_refused_by_name() {
        let name = |key: &str, what: &str| format!("--{key}-{what}");
        let host = |host| LendingLimits { host, ..LendingLimits::default() }.validate(name);
        let none = Allowance::default();
        assert_eq!(LendingLimits::default().validate(name), Ok(()));
        let bytes = Some(ByteRate(Bytes::kib(4)));
        let (error, help) = host(Allowance { bytes, ..none }).unwrap_err();
        assert!(error.starts_with("--host-bytes 4KiB is too low"), "{error}");
        assert_eq!(help, "set at least 1MiB, or leave it out");
        let (error, _) = host(Allowance { requests: Some(RequestRate(0)), ..none }).unwrap_err();
        assert!(error.starts_with("--host-requests 0 is too low"), "{error}");
        let lease = Allowance { connections: Some(1), ..none };
        let limits = LendingLimits { lease, ..LendingLimits::default() };
        let (error, _) = limits.validate(name).unwrap_err();
        assert!(error.starts_with("--lease-connections 1 is too low"), "{error}");
    }

    #[test]
    fn a_host_without_a_name_is_known_by_its_address() {
        let mapped = IpAddr::from([0, 0, 0, 0, 0, 0xffff, 0x0a00, 1]);
        let borrower = Borrower::new(None, Some(mapped));
        assert_eq!(borrower, Borrower::Address(IpAddr::from([10, 0, 0, 1])));
        assert_eq!(borrower.to_string(), "the host at 10.0.0.1");
        let of = |ip: &str| Borrower::new(None, Some(ip.parse().unwrap()));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:0:2"), "one host can have both");
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("2001:db8::1").to_string(), "the host at 2001:db8::/64");
        assert_eq!(of("::1").to_string(), "the host at ::1");
    }
}
