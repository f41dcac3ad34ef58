//! The lease of `aquifer serve export` as an NVMe/TCP subsystem.

use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use aquifer_nvme::NvmeUri;
use aquifer_nvme::auth::Secrets;
use aquifer_nvme::proto::Nqn;
use aquifer_nvme::target::{Host, Limits, Namespace, Refused, Subsystems, Target};
use aquifer_store::Lease;
use aquifer_transport::Address;
use aquifer_transport::serving::Connections;
use serde::Serialize;

use super::Export;
use crate::failure::{Failure, OrFail, Result};

/// A lease served as an NVMe subsystem.
pub(super) struct Nvme {
    nqn: Nqn,
    addresses: Vec<Address>,
    /// Its drop ends the service.
    _target: Target,
}

/// The answer of `aquifer serve export --nvme` when hosts can connect.
#[derive(Debug, Serialize)]
pub(super) struct Ready {
    /// For 'aquifer volume attach' and --lender.
    uris: Vec<NvmeUri>,
    nqn: Nqn,
    addresses: Vec<Address>,
}

/// One subsystem for every allowed host.
struct OneSubsystem {
    nqn: Nqn,
    namespace: Arc<Namespace>,
    /// All hosts, if empty.
    allowed: Vec<Nqn>,
    /// The DH-HMAC-CHAP secrets that hosts must know.
    secrets: Option<Secrets>,
}

impl Nvme {
    /// Listens at the addresses of --nvme; returns `None` if there are none.
    pub(super) fn listen(export: &Export, lease: &Arc<Lease>) -> Result<Option<Self>> {
        let what = || format!("exporting {}", export.size);
        if export.nvme_addresses.is_empty() {
            return Ok(None);
        }
        let secrets = export.secrets.as_deref().map(read_secrets).transpose()?;
        let open = |address: &&Address| secrets.is_none() && !address.is_local();
        if let Some(address) = export.nvme_addresses.iter().find(open) {
            let why = "any user of any other host could reach it";
            return Err(Failure::new(format!("listening on {address}"), why).help(
                "add --dhchap-secret FILE, use a loopback or unix address, or use --nbd with --tls",
            ));
        }
        let nqn = Nqn::of_lease(lease.id());
        let namespace = Arc::new(Namespace::new(lease.clone()));
        let allowed = export.allowed_hosts.clone();
        let subsystems = OneSubsystem { nqn: nqn.clone(), namespace, allowed, secrets };
        let target = Target::new(Arc::new(subsystems), Limits::default());
        let listen = |address| {
            target.listen(address, None).or_fail(what).map_err(|failure| {
                failure
                    .help("use another address with --nvme, or stop the program that uses this one")
            })
        };
        let addresses = export.nvme_addresses.iter().map(listen).collect::<Result<_>>()?;
        Ok(Some(Self { nqn, addresses, _target: target }))
    }

    pub(super) fn ready(&self) -> Ready {
        let uri =
            |address: &Address| NvmeUri { address: address.clone(), subsystem: self.nqn.clone() };
        let (nqn, addresses) = (self.nqn.clone(), self.addresses.clone());
        Ready { uris: addresses.iter().map(uri).collect(), nqn, addresses }
    }
}

impl fmt::Display for Ready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let uris: Vec<_> = self.uris.iter().map(ToString::to_string).collect();
        f.write_str(&uris.join(" "))
    }
}

impl Connections for OneSubsystem {}

impl Subsystems for OneSubsystem {
    fn open(&self, subsystem: &Nqn, host: &Host) -> Result<Arc<Namespace>, Refused> {
        if *subsystem != self.nqn {
            Err(Refused::Unknown(subsystem.clone()))
        } else if !self.allows(&host.nqn) {
            Err(Refused::Forbidden(format!("--allow-host does not list {}", host.nqn)))
        } else {
            Ok(Arc::clone(&self.namespace))
        }
    }

    fn list(&self, host: &Host) -> Vec<Nqn> {
        if self.allows(&host.nqn) { vec![self.nqn.clone()] } else { Vec::new() }
    }

    fn secrets(&self, _subsystem: &Nqn, _host: &Host) -> Option<Secrets> {
        self.secrets.clone()
    }
}

/// Reads the hosts' secret and, from the optional second line, this end's.
fn read_secrets(path: &Path) -> Result<Secrets> {
    let what = || format!("reading the secrets in {}", path.display());
    let text = fs::read_to_string(path).or_fail(what)?;
    text.parse()
        .or_fail(what)
        .map_err(|failure| failure.help("write the output of 'nvme gen-dhchap-key' into it"))
}

impl OneSubsystem {
    fn allows(&self, host: &Nqn) -> bool {
        self.allowed.is_empty() || self.allowed.contains(host)
    }
}
