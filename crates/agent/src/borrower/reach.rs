//! The way to a lease. The lender offers URIs and the configuration says which it wants. Over NVMe
//! the lender also tells the borrower its host name and secrets.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;

use aquifer_api::message::Access;
use aquifer_blockdev::nvme::{SubsystemUri, Transport};
use aquifer_control::BorrowedLease;
use aquifer_nbd::Uri;
use aquifer_nvme::NvmeUri;
use aquifer_nvme::proto::Nqn;
use aquifer_page::{LeaseId, OwnerId, file};
use aquifer_volume::{Claim, Encryption, LeaseTarget, NvmeAccess, Protocol};
use tokio::runtime::Handle;

use crate::config::{Attach, BorrowConfig, Config, PageProtocol};
use crate::peers::Peers;

/// The choice of the way to each lease. Calls may wait for a lender, so they need threads of their
/// own.
#[derive(Debug)]
pub(super) struct Reach {
    config: BorrowConfig,
    peers: Peers,
    runtime: Handle,
    /// Directory of the files from which volumes read their secrets; a lease's id names each file.
    secrets: PathBuf,
}

/// A way to reach a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Through the pool, over NBD.
    Nbd(Uri),
    /// Through the pool, over NVMe/TCP.
    Nvme(NvmeUri),
    /// Through the kernel's own initiator.
    Direct(SubsystemUri),
}

/// The host name and secrets with which this host uses a lease over NVMe.
#[derive(Debug)]
pub(super) struct NvmeHost {
    pub(super) name: Nqn,
    pub(super) access: Access,
}

/// Returns the claim to a lease that the lender keeps for this host alone.
fn claim(lease: LeaseId) -> Claim {
    Claim { owner: OwnerId(lease.0), ..Claim::new(format!("a volume on lease {lease}"), false) }
}

impl Reach {
    /// Creates a `Reach` inside the runtime that calls lenders; elsewhere `Handle::current` panics.
    pub(super) fn new(config: &Config, peers: Peers) -> Self {
        let secrets = config.state.join("secrets");
        Self { config: config.borrow.clone(), peers, runtime: Handle::current(), secrets }
    }

    /// Returns the configured way or, if the lender does not offer it, NBD over TLS.
    pub(super) fn way(&self, lease: &BorrowedLease, attach: Attach) -> Result<Way, String> {
        let way = choose(lease, attach, self.config.protocol)?;
        if !is_wanted(&way, attach, self.config.protocol) {
            let lender = &lease.lender;
            tracing::warn!(
                lease = %lease.lease, %lender,
                "the lender does not offer the configured protocol: using NBD over TLS"
            );
        }
        Ok(way)
    }

    /// Asks the lender for the host name and secrets of a lease.
    pub(super) fn host(&self, lease: &BorrowedLease) -> Result<NvmeHost, String> {
        let access = self.runtime.block_on(self.peers.access(&lease.lender, lease.lease))?;
        let name = access.host.parse();
        let name = name.map_err(|error| {
            format!("{} sent an invalid NQN for this host: {error}", lease.lender)
        })?;
        Ok(NvmeHost { name, access })
    }

    /// Describes a lease to the pool. The server at its address must prove to be the lender.
    pub(super) fn target(&self, lease: &BorrowedLease) -> Result<LeaseTarget, String> {
        let (address, protocol) = match self.way(lease, Attach::Pool)? {
            Way::Nbd(uri) => {
                (uri.address, Protocol::Nbd { export: uri.export, secure: uri.secure })
            }
            Way::Nvme(uri) => {
                let NvmeHost { name, access } = self.host(lease)?;
                let secrets = access.secrets.map(|secrets| {
                    self.keep(lease.lease, &format!("{}\n{}\n", secrets.borrower, secrets.lender))
                });
                let secrets = secrets.transpose()?;
                (
                    uri.address,
                    Protocol::Nvme(NvmeAccess { subsystem: uri.subsystem, host: name, secrets }),
                )
            }
            Way::Direct(uri) => {
                let why = "only the kernel's initiator can use it";
                return Err(format!("{uri}: {why}; set [borrow] attach = \"direct\""));
            }
        };
        Ok(LeaseTarget {
            lease: lease.lease,
            lender: lease.lender.clone(),
            address,
            protocol,
            capacity: lease.bytes,
            // Another host holds the pages, even if its address looks local: encrypt them.
            encryption: Some(Encryption::random()),
            claim: Some(claim(lease.lease)),
        })
    }

    /// Replaces another host's way to a lease by that of this host.
    pub(super) fn take_on(&self, target: &mut LeaseTarget) -> Result<(), String> {
        let LeaseTarget { lease, lender, protocol: Protocol::Nvme(access), .. } = target else {
            return Ok(());
        };
        let here = self.runtime.block_on(self.peers.access(lender, *lease))?;
        let name = here.host.parse();
        access.host =
            name.map_err(|error| format!("{lender} sent an invalid NQN for this host: {error}"))?;
        let secrets = here.secrets.map(|secrets| {
            self.keep(*lease, &format!("{}\n{}\n", secrets.borrower, secrets.lender))
        });
        access.secrets = secrets.transpose()?;
        Ok(())
    }

    /// Writes secrets to a file from which the process of a volume reads them.
    fn keep(&self, lease: LeaseId, secrets: &str) -> Result<PathBuf, String> {
        let path = self.secrets.join(lease.to_string());
        let write = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.secrets)?;
            file::replace(&path, secrets.as_bytes())
        };
        write().map_err(|error: io::Error| format!("cannot write {}: {error}", path.display()))?;
        Ok(path)
    }

    /// Removes the secrets of leases that are no longer in use.
    pub(super) fn forget(&self, leases: impl IntoIterator<Item = LeaseId>) {
        for lease in leases {
            // Most leases have no such file.
            let _ = fs::remove_file(self.secrets.join(lease.to_string()));
        }
    }

    /// Removes the secrets of all leases except `used`.
    pub(super) fn forget_all_but(&self, used: &BTreeSet<LeaseId>) {
        let files = fs::read_dir(&self.secrets).into_iter().flatten().flatten();
        let leases = files.filter_map(|file| file.file_name().to_str()?.parse().ok());
        self.forget(leases.filter(|lease| !used.contains(lease)));
    }
}

/// Chooses the configured way if the lender offers it, else NBD over TLS: no unencrypted way
/// replaces an encrypted one.
fn choose(lease: &BorrowedLease, attach: Attach, protocol: PageProtocol) -> Result<Way, String> {
    let lender = &lease.lender;
    let direct = |transport| {
        let uris = lease.uris.iter().filter_map(|uri| uri.parse::<SubsystemUri>().ok());
        uris.into_iter().find(|uri| uri.transport == transport).map(Way::Direct)
    };
    let wanted = match (attach, protocol) {
        (_, PageProtocol::Nbd) => None,
        (Attach::Pool, PageProtocol::NvmeTcp | PageProtocol::NvmeRdma) => {
            lease.uris.iter().find_map(|uri| uri.parse().ok()).map(Way::Nvme)
        }
        (Attach::Direct, PageProtocol::NvmeTcp) => direct(Transport::Tcp),
        (Attach::Direct, PageProtocol::NvmeRdma) => direct(Transport::Rdma),
    };
    let nbd = || {
        lease
            .uris
            .iter()
            .filter_map(|uri| uri.parse::<Uri>().ok())
            .find(|uri| uri.secure)
            .map(Way::Nbd)
    };
    wanted.or_else(nbd).ok_or_else(|| {
        format!(
            "{lender} serves the lease only as {}: change attach or protocol in [borrow], \
             or backend in [lend] of {lender}",
            lease.uris.join(" and ")
        )
    })
}

fn is_wanted(way: &Way, attach: Attach, protocol: PageProtocol) -> bool {
    match way {
        Way::Nbd(_) => protocol == PageProtocol::Nbd,
        Way::Nvme(_) => attach == Attach::Pool,
        Way::Direct(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NBD: &str = "nbds://10.0.0.2:7071/x";
    const TCP: &str = "nvme+tcp://10.0.0.2:4420/nqn.2014-08.org.example:x";
    const RDMA: &str = "nvme+rdma://10.0.0.2:4420/nqn.2014-08.org.example:x";

    fn lease(uris: &[&str]) -> BorrowedLease {
        BorrowedLease {
            lease: LeaseId(1),
            lender: "b".parse().unwrap(),
            bytes: aquifer_page::Bytes::gib(1),
            uris: uris.iter().map(|&uri| uri.to_owned()).collect(),
            generation: 0,
        }
    }

    #[test]
    fn the_way_is_the_one_that_is_wanted() {
        let lease = lease(&[NBD, TCP, RDMA]);
        for (attach, protocol, uri) in [
            (Attach::Pool, PageProtocol::Nbd, NBD),
            (Attach::Pool, PageProtocol::NvmeTcp, TCP),
            (Attach::Direct, PageProtocol::NvmeTcp, TCP),
            (Attach::Direct, PageProtocol::NvmeRdma, RDMA),
        ] {
            let way = choose(&lease, attach, protocol).unwrap();
            let (chosen, direct) = match &way {
                Way::Nbd(uri) => (uri.to_string(), false),
                Way::Nvme(uri) => (uri.to_string(), false),
                Way::Direct(uri) => (uri.to_string(), true),
            };
            assert_eq!((chosen.as_str(), direct), (uri, attach == Attach::Direct));
            assert!(is_wanted(&way, attach, protocol));
        }
    }

    #[test]
    fn where_a_lender_has_no_such_way_it_is_tls_or_none() {
        for (attach, protocol) in
            [(Attach::Pool, PageProtocol::NvmeTcp), (Attach::Direct, PageProtocol::NvmeRdma)]
        {
            let way = choose(&lease(&[NBD]), attach, protocol).unwrap();
            assert!(matches!(way, Way::Nbd(_)) && !is_wanted(&way, attach, protocol));
        }
        let clear = lease(&["nbd://10.0.0.2:7071/x", TCP]);
        let error = choose(&clear, Attach::Pool, PageProtocol::Nbd).unwrap_err();
        assert!(
            error.contains("b serves the lease only as") && error.contains("[borrow]"),
            "{error}"
        );
    }
}
