//! An NBD export given on the command line, as a lease to lay a volume over.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::nbd::client::{Connection, Target};
use aquifer_fabric::tls::Identity;
use aquifer_fabric::{Address, Uri};
use aquifer_page::{Bytes, EXTENT_SIZE, HostName, LeaseId};
use aquifer_pool::{LeaseTarget, Protocol};
use clap::Args;

use crate::failure::{Failure, OrFail, Result};

/// How a lender is trusted.
#[derive(Debug, Clone, Default, Args)]
pub struct Trust {
    /// For nbds: the directory with this host's certificate (made by 'aquifer init')
    #[arg(long, value_name = "DIR")]
    tls: Option<PathBuf>,
    /// For nbds: the lender's name as its certificate has it
    ///
    /// The default is the host in the URI, where that is a name.
    #[arg(long, value_name = "HOST")]
    lender_host: Option<HostName>,
}

/// A lender that was found to serve what it should.
#[derive(Debug)]
pub struct Lender {
    /// The export, as a lease.
    pub lease: LeaseTarget,
    /// Where the certificate is with which to reach it.
    pub identity: Option<PathBuf>,
}

/// How long the lender may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

impl Lender {
    /// Connects to the export to learn its size; at most `size` of it will be used.
    ///
    /// # Errors
    /// If the lender cannot be reached or trusted, or its export is of no use.
    pub fn find(uri: &Uri, trust: &Trust, size: Option<Bytes>) -> Result<Self> {
        let what = || format!("using {uri}");
        let identity = trust.identity(uri)?;
        let lender = trust.name(uri)?;
        let tls = match &identity {
            Some(dir) => Some((Identity::load(dir).or_fail(what)?.client_config(), lender.clone())),
            None => None,
        };
        let (address, export) = (uri.address.clone(), uri.export.clone());
        let target = Arc::new(Target { address: address.clone(), export: export.clone(), tls });
        let connection =
            Connection::connect(target, PATIENCE).map_err(|error| Failure::new(what(), error.failure))?;
        if connection.is_read_only() {
            return Err(Failure::new(what(), "the export is read-only").help("serve it writable"));
        }
        let capacity =
            usable(connection.size(), size).map_err(|failure| Failure { what: what(), ..failure })?;
        let secure = identity.is_some();
        let protocol = Protocol::Nbd { export, secure };
        let lease = LeaseTarget { lease: LeaseId::random(), lender, address, protocol, capacity };
        Ok(Self { lease, identity })
    }
}

impl Trust {
    /// Where the certificate is, for a URI that wants one.
    fn identity(&self, uri: &Uri) -> Result<Option<PathBuf>> {
        let misfit = |why: &str, help: &str| Err(Failure::new(format!("using {uri}"), why).help(help));
        match (uri.secure, &self.tls) {
            (true, None) => misfit("nbds is mutual TLS, which takes a certificate", "give --tls DIR"),
            (false, Some(_)) => {
                misfit("--tls is for nbds, this would be in the clear", "write nbds:// instead of nbd://")
            }
            (true, Some(dir)) => Ok(Some(absolute(dir)?)),
            (false, None) => Ok(None),
        }
    }

    /// What the lender is called: as given, or as the URI has it. Without TLS it only stands in messages.
    fn name(&self, uri: &Uri) -> Result<HostName> {
        if let Some(name) = &self.lender_host {
            return Ok(name.clone());
        }
        let host = match &uri.address {
            Address::Unix(_) => "localhost",
            Address::Tcp { host, .. } => host.as_str(),
        };
        let is_name = host.parse::<std::net::IpAddr>().is_err();
        match host.parse() {
            Ok(name) if is_name || !uri.secure => Ok(name),
            _ if uri.secure => {
                Err(Failure::new(format!("using {uri}"), format!("{host} does not tell who the lender is"))
                    .help("give its name, as its certificate has it, by --lender-host"))
            }
            // Brackets and colons of IPv6 cannot stand in a name.
            _ => HostName::try_from("lender".to_owned()).or_fail(|| format!("using {uri}")),
        }
    }
}

/// How much of an export of `size` can be used when at most `wanted` is wanted: whole extents.
fn usable(size: Bytes, wanted: Option<Bytes>) -> Result<Bytes> {
    if let Some(wanted) = wanted.filter(|wanted| *wanted > size) {
        return Err(Failure::new("", format!("the export has {size}, less than {wanted}")));
    }
    let whole = Bytes(wanted.unwrap_or(size).0 / EXTENT_SIZE * EXTENT_SIZE);
    if whole == Bytes::ZERO {
        let why = format!("{} is less than one extent, {}", wanted.unwrap_or(size), Bytes(EXTENT_SIZE));
        return Err(Failure::new("", why).help("use at least one extent"));
    }
    Ok(whole)
}

/// The same directory for a process with another working directory.
fn absolute(dir: &Path) -> Result<PathBuf> {
    dir.canonicalize().or_fail(|| format!("finding {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(uri: &str) -> Result<HostName> {
        Trust::default().name(&uri.parse().unwrap())
    }

    #[test]
    fn only_whole_extents_are_used() {
        let mib = Bytes::mib;
        assert_eq!(usable(mib(200), None), Ok(mib(192)));
        assert_eq!(usable(mib(200), Some(mib(130))), Ok(mib(128)));
        assert!(usable(mib(63), None).unwrap_err().why.contains("one extent"));
        assert!(usable(mib(64), Some(mib(128))).unwrap_err().why.contains("less than 128MiB"));
    }

    #[test]
    fn with_tls_the_lenders_name_must_be_known() {
        assert_eq!(name("nbds://b.example:1/").unwrap().as_str(), "b.example");
        for uri in ["nbds://192.0.2.1/", "nbds://[2001:db8::1]/"] {
            assert!(name(uri).unwrap_err().help.unwrap().contains("--lender-host"), "{uri}");
        }
        for uri in ["nbd://192.0.2.1/", "nbd://[2001:db8::1]/", "nbd+unix:///?socket=/x"] {
            assert!(name(uri).is_ok(), "{uri}");
        }
    }

    #[test]
    fn tls_and_the_uri_must_agree() {
        let trust = Trust { tls: Some("/".into()), lender_host: None };
        assert!(trust.identity(&"nbd://b/".parse().unwrap()).unwrap_err().help.unwrap().contains("nbds://"));
        assert!(
            Trust::default()
                .identity(&"nbds://b/".parse().unwrap())
                .unwrap_err()
                .help
                .unwrap()
                .contains("--tls")
        );
        assert_eq!(trust.identity(&"nbds://b/".parse().unwrap()).unwrap(), Some("/".into()));
    }
}
