//! An NBD export or an NVMe namespace given on the command line, as a lease for a volume.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_nbd::Uri;
use aquifer_nbd::client::Target;
use aquifer_nvme::proto::Nqn;
use aquifer_page::{Bytes, EXTENT_SIZE, HostName, LeaseId, OwnerId, RegionName};
use aquifer_transport::Address;
use aquifer_transport::initiator::Outcome;
use aquifer_transport::tls::Identity;
use aquifer_volume::holder::RemoteHolder;
use aquifer_volume::{Claim, LeaseTarget, NvmeAccess, Protocol};
use clap::Args;

use crate::failure::{Failure, OrFail, Result};
use crate::lender_uri::LenderUri;

/// How a lender over NBD is trusted, and how it is to trust this host.
#[derive(Debug, Clone, Default, Args)]
pub struct Certified {
    /// For nbds: directory of this host's certificate
    ///
    /// 'aquifer cluster create' or 'join' makes it. nbds:// needs it.
    #[arg(long, value_name = "DIR")]
    pub(crate) tls: Option<PathBuf>,
    /// For nbds: name of the lender in its certificate
    ///
    /// The default is the host in the URI if that is a name.
    #[arg(long, value_name = "HOST")]
    lender_host: Option<HostName>,
}

/// How a lender is trusted, and how it is to trust this host.
#[derive(Debug, Clone, Default, Args)]
pub struct Trust {
    #[command(flatten)]
    certified: Certified,
    /// For nvme: file with this host's secret (DH-HMAC-CHAP)
    ///
    /// An optional second line is the lender's secret: then the lender must authenticate too.
    /// Default: no authentication.
    #[arg(long, value_name = "FILE")]
    pub(crate) dhchap_secret: Option<PathBuf>,
    /// For nvme: name of this host
    ///
    /// The default is the name in /etc/nvme/hostnqn, or else a name derived from /etc/machine-id.
    #[arg(long, value_name = "NQN")]
    pub(crate) host_nqn: Option<Nqn>,
    /// Send pages unencrypted; the lender can read them
    ///
    /// By default this host encrypts pages under a key that the lender does not have. That costs
    /// 0.6 us a page with AVX-512, else some 2 us. Pages for a lender at a unix socket are
    /// encrypted only if they are of a group. Pages that the kernel sends itself (volume attach
    /// --direct) never are.
    #[arg(long)]
    pub(crate) unencrypted: bool,
    /// Take the export from its owner, whose pages there are lost
    ///
    /// An export has one owner at a time, and a second one is refused. Use this if the owner is
    /// gone for good.
    #[arg(long)]
    pub(crate) take_over: bool,
}

/// The use of an export.
#[derive(Clone, Copy, Debug)]
pub enum Purpose<'a> {
    /// A volume, by the name of the command that makes it; the claim lasts while the volume is
    /// served.
    Volume(&'a str),
    /// A region; the claim lasts until the region is removed, also while no process serves it. The
    /// owner, if any, is the one that the region had before, for example before a reboot.
    Region(&'a RegionName, Option<PastOwner>),
}

/// The owner that a region had before, as its lenders know it.
#[derive(Clone, Copy, Debug)]
pub struct PastOwner {
    /// Its id.
    pub id: OwnerId,
    /// At least the number of times that it has moved to another host.
    pub generation: u32,
}

impl Purpose<'_> {
    /// Returns the claim, with a name that tells other operators where to look.
    fn claim(self) -> Claim {
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy();
        match self {
            Self::Volume(command) => {
                let process = std::process::id();
                Claim::new(
                    format!("a volume of 'aquifer {command}' on {host} (process {process})"),
                    false,
                )
            }
            Self::Region(name, owner) => {
                let claim = Claim::new(format!("region '{name}' on {host}"), true);
                match owner {
                    Some(PastOwner { id, generation }) => Claim { owner: id, generation, ..claim },
                    None => claim,
                }
            }
        }
    }
}

/// A lender that answered and serves a usable export.
#[derive(Debug)]
pub struct ClaimedLender {
    /// The export, as a lease.
    pub lease: LeaseTarget,
    /// The directory of the certificate for mutual TLS; `None` without TLS.
    pub identity: Option<PathBuf>,
}

/// How long the lender may take to answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The remedy for an export that another owner has claimed.
const CLAIMED: &str = "use another export ('aquifer serve export --name a --name b' serves \
                       several), or end the other use; if its host is gone for good, \
                       --take-over discards its pages";
/// The file in which Linux's own initiator has this host's name.
const HOST_NQN: &str = "/etc/nvme/hostnqn";
const MACHINE_ID: &str = "/etc/machine-id";

impl ClaimedLender {
    /// Connects to the export or namespace, learns its size and claims it; uses at most `size` of
    /// it.
    ///
    /// # Errors
    /// If the lender cannot be reached or trusted. If another owner has claimed the export, or if
    /// it is read-only or too small.
    pub fn find(
        uri: &LenderUri,
        trust: &Trust,
        size: Option<Bytes>,
        purpose: Purpose<'_>,
    ) -> Result<Self> {
        let what = || format!("using {uri}");
        trust.check(uri)?;
        let (identity, protocol) = match uri {
            LenderUri::Nbd(uri) => {
                let protocol = Protocol::Nbd { export: uri.export.clone(), secure: uri.secure };
                (trust.certified.identity(uri)?, protocol)
            }
            LenderUri::Nvme(uri) => (
                None,
                Protocol::Nvme(
                    trust
                        .access(uri.subsystem.clone())
                        .map_err(|failure| Failure { what: what(), ..failure })?,
                ),
            ),
        };
        let lender = trust.certified.name(uri)?;
        let certificate = identity.as_deref().map(Identity::load).transpose().or_fail(what)?;
        let (lease, address) = (LeaseId::random(), uri.address().clone());
        let mut claim = purpose.claim();
        let (capacity, encryption) = (Bytes::ZERO, None);
        let mut lease =
            LeaseTarget { lease, lender, address, protocol, capacity, encryption, claim: None };
        let source = lease.source(certificate.as_ref()).or_fail(what)?;
        let source = source.claimed(claim.clone(), trust.take_over);
        let holder = RemoteHolder::connect(source, 1, TIMEOUT).map_err(|error| {
            let failure = Failure::new(what(), error.failure);
            if error.outcome == Outcome::Claimed { failure.help(CLAIMED) } else { failure }
        })?;
        let (there, read_only) = holder.facts().or_fail(what)?;
        claim.incarnation = holder.incarnation();
        lease.claim = Some(claim);
        if read_only {
            return Err(Failure::new(what(), "the export is read-only").help("export it writable"));
        }
        lease.capacity =
            usable(there, size).map_err(|failure| Failure { what: what(), ..failure })?;
        let lease = if trust.unencrypted { lease } else { lease.encrypted() };
        Ok(Self { lease, identity })
    }
}

impl Trust {
    /// Refuses options that are for the other protocol.
    fn check(&self, uri: &LenderUri) -> Result<()> {
        match uri {
            LenderUri::Nbd(_) if self.dhchap_secret.is_some() || self.host_nqn.is_some() => {
                Err(misfit(uri, "--dhchap-secret and --host-nqn are for nvme, this is NBD"))
            }
            LenderUri::Nbd(_) => Ok(()),
            LenderUri::Nvme(uri) => self.check_nvme(uri),
        }
    }

    /// Refuses options that are for NBD, as `uri` is NVMe.
    pub(crate) fn check_nvme(&self, uri: &impl std::fmt::Display) -> Result<()> {
        if self.certified.tls.is_some() || self.certified.lender_host.is_some() {
            return Err(misfit(uri, "--tls and --lender-host are for nbds, this is NVMe"));
        }
        Ok(())
    }

    /// Returns this host's name and secrets for a subsystem.
    fn access(&self, subsystem: Nqn) -> Result<NvmeAccess> {
        let host = match &self.host_nqn {
            Some(host) => host.clone(),
            None => host_nqn(Path::new(HOST_NQN), Path::new(MACHINE_ID))?,
        };
        let secrets = self.dhchap_secret.as_deref().map(absolute).transpose()?;
        Ok(NvmeAccess { subsystem, host, secrets })
    }
}

impl Certified {
    /// Returns the connection parameters of the server of a URI.
    ///
    /// # Errors
    /// If the URI and the certificate options do not fit together, or if the certificate cannot be
    /// read.
    pub fn target(&self, uri: &Uri) -> Result<Target> {
        let identity = self.identity(uri)?;
        let identity = identity
            .as_deref()
            .map(Identity::load)
            .transpose()
            .or_fail(|| format!("using {uri}"))?;
        let host = self.name(&LenderUri::Nbd(uri.clone()))?;
        Ok(Target {
            address: uri.address.clone(),
            export: uri.export.clone(),
            tls: identity.map(|identity| (identity.client(), host)),
        })
    }

    /// Returns the directory of the certificate, for a URI that needs one.
    fn identity(&self, uri: &Uri) -> Result<Option<PathBuf>> {
        let misfit =
            |why: &str, help: &str| Err(Failure::new(format!("using {uri}"), why).help(help));
        match (uri.secure, &self.tls) {
            (true, None) => {
                misfit("nbds uses mutual TLS, which needs a certificate", "give --tls DIR")
            }
            (false, Some(_)) => misfit(
                "--tls is for nbds, and nbd does not encrypt",
                "write nbds:// instead of nbd://",
            ),
            (true, Some(dir)) => Ok(Some(absolute(dir)?)),
            (false, None) => Ok(None),
        }
    }

    /// Returns the lender's name, from the option or from the URI. Without TLS it is only for
    /// messages.
    fn name(&self, uri: &LenderUri) -> Result<HostName> {
        if let Some(name) = &self.lender_host {
            return Ok(name.clone());
        }
        let host = match uri.address() {
            Address::Unix(_) => "localhost",
            Address::Tcp { host, .. } => host.as_str(),
        };
        let is_name = host.parse::<std::net::IpAddr>().is_err();
        match host.parse() {
            Ok(name) if is_name || !uri.is_secure() => Ok(name),
            _ if uri.is_secure() => Err(Failure::new(
                format!("using {uri}"),
                format!("TLS checks the lender's name, and {host} is not a name"),
            )
            .help("give the name in the lender's certificate with --lender-host")),
            // A name has no brackets and colons as IPv6 addresses have.
            _ => HostName::try_from("lender".to_owned()).or_fail(|| format!("using {uri}")),
        }
    }
}

fn misfit(uri: &impl std::fmt::Display, why: &str) -> Failure {
    Failure::new(format!("using {uri}"), why).help("drop the option, or use another URI")
}

/// Returns how much of an export of `size` to use, at most `wanted`: whole extents.
fn usable(size: Bytes, wanted: Option<Bytes>) -> Result<Bytes> {
    if let Some(wanted) = wanted.filter(|wanted| *wanted > size) {
        return Err(Failure::new("", format!("the export has {size}, less than {wanted}")));
    }
    let whole = Bytes(wanted.unwrap_or(size).0 / EXTENT_SIZE * EXTENT_SIZE);
    if whole == Bytes::ZERO {
        let why =
            format!("{} is less than one extent, {}", wanted.unwrap_or(size), Bytes(EXTENT_SIZE));
        return Err(Failure::new("", why).help("use at least one extent"));
    }
    Ok(whole)
}

/// Returns this host's name from Linux's initiator, or else one made from the machine id.
fn host_nqn(linux: &Path, machine: &Path) -> Result<Nqn> {
    if let Ok(name) = fs::read_to_string(linux) {
        return name.trim().parse().or_fail(|| format!("reading {}", linux.display()));
    }
    let what = || "finding this host's NVMe name";
    let machine = fs::read_to_string(machine)
        .or_fail(what)
        .map_err(|failure| failure.help("give it with --host-nqn"))?;
    let id = u128::from_str_radix(machine.trim(), 16).or_fail(what)?;
    Ok(Nqn::of_lease(LeaseId(id)))
}

/// Returns the path for a process with another working directory.
fn absolute(path: &Path) -> Result<PathBuf> {
    path.canonicalize().or_fail(|| format!("finding {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(uri: &str) -> Result<HostName> {
        Certified::default().name(&uri.parse().unwrap())
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
        let trust = Certified { tls: Some("/".into()), ..Certified::default() };
        assert!(
            trust
                .identity(&"nbd://b/".parse().unwrap())
                .unwrap_err()
                .help
                .unwrap()
                .contains("nbds://")
        );
        assert!(
            Certified::default()
                .identity(&"nbds://b/".parse().unwrap())
                .unwrap_err()
                .help
                .unwrap()
                .contains("--tls")
        );
        assert_eq!(trust.identity(&"nbds://b/".parse().unwrap()).unwrap(), Some("/".into()));
    }

    #[test]
    fn options_of_the_other_protocol_are_refused() {
        let nqn: Nqn = "nqn.2014-08.org.example:h".parse().unwrap();
        let nvme = Trust { host_nqn: Some(nqn), ..Trust::default() };
        let certified = Certified { tls: Some("/".into()), ..Certified::default() };
        let nbd = Trust { certified, ..Trust::default() };
        let uris = ["nbds://b.example/", "nvme+tcp://b.example/nqn.2014-08.org.example:s"];
        let [by_nbd, by_nvme] = uris.map(|uri| uri.parse().unwrap());
        assert!(nbd.check(&by_nbd).is_ok() && nvme.check(&by_nvme).is_ok());
        assert!(nvme.check(&by_nbd).unwrap_err().why.contains("this is NBD"));
        assert!(nbd.check(&by_nvme).unwrap_err().why.contains("this is NVMe"));
    }

    #[test]
    fn a_host_has_the_same_nvme_name_as_for_linux_or_one_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let (linux, machine) = (dir.path().join("hostnqn"), dir.path().join("machine-id"));
        assert!(host_nqn(&linux, &machine).unwrap_err().help.unwrap().contains("--host-nqn"));
        fs::write(&machine, "0123456789abcdef0011223344556677\n").unwrap();
        let own = "nqn.2014-08.org.nvmexpress:uuid:01234567-89ab-cdef-0011-223344556677";
        assert_eq!(host_nqn(&linux, &machine).unwrap().as_str(), own);
        fs::write(&linux, "nqn.2014-08.org.example:h\n").unwrap();
        assert_eq!(host_nqn(&linux, &machine).unwrap().as_str(), "nqn.2014-08.org.example:h");
    }
}
