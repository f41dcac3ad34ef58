//! The lease of `aquifer serve export` as an NVMe/TCP subsystem.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_nvme::NvmeUri;
use aquifer_nvme::auth::Secrets;
use aquifer_nvme::proto::Nqn;
use aquifer_nvme::target::{Host, Limits, Namespace, Refused, Subsystems, Target};
use aquifer_store::Lease;
use aquifer_transport::Address;
use aquifer_transport::serving::Connections;
use aquifer_transport::serving::limits::Gate;
use clap::Args;
use serde::Serialize;

use super::Export;
use crate::failure::{Failure, OrFail, Result};

/// How an export is served over NVMe.
#[derive(Debug, Args)]
pub(super) struct NvmeOptions {
    /// NVMe/TCP address: HOST:PORT or unix:PATH; repeat for more
    ///
    /// The usual port is 4420. TCP needs --dhchap-secret (with --kernel: --allow-host) unless it is
    /// loopback. The subsystem has one namespace with blocks of 4 KiB. Default: no NVMe.
    #[arg(id = "nvme_addresses", long = "nvme", value_name = "ADDRESS")]
    pub(super) addresses: Vec<Address>,
    /// Serve NVMe with the kernel's target from a zram device
    ///
    /// No process handles pages then, and there is one device, without NBD, TLS, secrets, --dir,
    /// --share and --report. See "Kernel target" below.
    #[arg(long, requires = "nvme_addresses",
        conflicts_with_all = ["addresses", "secrets", "names", "dir", "tls"])]
    pub(super) kernel: bool,
    /// With --kernel: serve over RDMA too, at the same addresses
    #[arg(long, requires = "kernel")]
    pub(super) rdma: bool,
    /// NQN of a host that may connect over NVMe; repeat for more
    ///
    /// A host's NQN is in its /etc/nvme/hostnqn. By default every host that reaches the address may
    /// connect; --kernel needs it, unless the address is loopback.
    #[arg(long = "allow-host", value_name = "NQN", requires = "nvme_addresses")]
    pub(super) allowed_hosts: Vec<Nqn>,
    /// File with the secret that NVMe hosts must know
    ///
    /// Create it with 'nvme gen-dhchap-key'. An optional second line is the secret by which this
    /// export authenticates itself to hosts. With secrets, --nvme may be an address that other
    /// hosts reach. The secret does not encrypt traffic: Aquifer's hosts encrypt pages themselves.
    #[arg(long = "dhchap-secret", value_name = "FILE", requires = "nvme_addresses")]
    pub(super) secrets: Option<PathBuf>,
}

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
    gate: Arc<Gate>,
}

impl Nvme {
    /// Listens at the addresses of --nvme; returns `None` if there are none.
    pub(super) fn listen(
        export: &Export,
        lease: &Arc<Lease>,
        gate: Arc<Gate>,
    ) -> Result<Option<Self>> {
        let (options, what) = (&export.nvme, || format!("exporting {}", export.size));
        if options.addresses.is_empty() {
            return Ok(None);
        }
        let secrets = options.secrets.as_deref().map(read_secrets).transpose()?;
        let open = |address: &&Address| secrets.is_none() && !address.is_local();
        if let Some(address) = options.addresses.iter().find(open) {
            let why = "any user of any other host could reach it";
            return Err(Failure::new(format!("listening on {address}"), why).help(
                "add --dhchap-secret FILE, use a loopback or unix address, or use --nbd with --tls",
            ));
        }
        let nqn = Nqn::of_lease(lease.id());
        let namespace = Arc::new(Namespace::new(lease.clone()));
        let allowed = options.allowed_hosts.clone();
        let subsystems = OneSubsystem { nqn: nqn.clone(), namespace, allowed, secrets, gate };
        let target = Target::new(Arc::new(subsystems), Limits::default());
        let listen = |address| {
            target.listen(address, None).or_fail(what).map_err(|failure| {
                failure
                    .help("use another address with --nvme, or stop the program that uses this one")
            })
        };
        let addresses = options.addresses.iter().map(listen).collect::<Result<_>>()?;
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

impl Connections for OneSubsystem {
    fn gate(&self) -> Option<Arc<Gate>> {
        Some(Arc::clone(&self.gate))
    }
}

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
