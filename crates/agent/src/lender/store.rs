//! Leases with pages in the store, which this process serves.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use aquifer_api::message::Access;
use aquifer_nbd::Uri;
use aquifer_nbd::server::{self as nbd, Exports, Peer, Security, Server, Storage};
use aquifer_nvme::NvmeUri;
use aquifer_nvme::auth::Secrets;
use aquifer_nvme::proto::Nqn;
use aquifer_nvme::target::{self as nvme, Host, Limits, Namespace, Subsystems, Target};
use aquifer_page::{Bytes, HostName, LeaseId, lock};
use aquifer_store::{Lease, LeaseRecord, Store};
use aquifer_transport::serving::Connections;
use aquifer_transport::serving::limits::Gate;
use aquifer_transport::{Address, tls::Identity};

use super::{Leases, admits, note};
use crate::config::Config;

/// The store with its NBD server and, if configured, its NVMe/TCP target.
#[derive(Debug)]
pub(super) struct StoreLeases {
    registry: Arc<ExportRegistry>,
    nbd: Server,
    nvme: Option<(Target, Address)>,
}

/// The store as both servers see it: it admits each host to its own leases and counts connections.
struct ExportRegistry {
    store: Store,
    gate: Arc<Gate>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    connections: BTreeMap<LeaseId, u32>,
    namespaces: BTreeMap<LeaseId, Arc<Namespace>>,
    /// Leases in removal: they accept no new connections.
    leaving: BTreeSet<LeaseId>,
}

impl fmt::Debug for ExportRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExportRegistry").field("store", &self.store).finish_non_exhaustive()
    }
}

impl StoreLeases {
    /// Opens the store with the leases of the previous agent, and serves it.
    pub(super) fn open(config: &Config, identity: &Identity) -> Result<Self, String> {
        let store = Store::open(&config.store_dir()).map_err(|error| error.to_string())?;
        let limits = config.lend.limits;
        let (gate, state) = (Gate::new(limits.limits()), Mutex::default());
        let registry = Arc::new(ExportRegistry { store, gate, state });
        let security = Security::Tls(identity.server());
        let address =
            |at: std::net::SocketAddr| Address::Tcp { host: at.ip().to_string(), port: at.port() };
        let connections = limits.of_listener();
        let of_nbd = nbd::Limits { connections, ..nbd::Limits::default() };
        let nbd = Server::bind_with(&address(config.pages), security, registry.clone(), of_nbd);
        let nbd = nbd.map_err(|error| error.to_string())?;
        let listen = |at| {
            let limits = Limits { connections, ..Limits::default() };
            let target = Target::new(registry.clone(), limits);
            let address = target.listen(&address(at), None).map_err(|error| error.to_string())?;
            Ok::<_, String>((target, address))
        };
        let nvme = config.lend.nvme.map(listen).transpose()?;
        Ok(Self { registry, nbd, nvme })
    }
}

impl Leases for StoreLeases {
    fn place(&self) -> String {
        match &self.nvme {
            Some((_, address)) => format!("{}, NVMe/TCP at {address}", self.nbd.address()),
            None => self.nbd.address().to_string(),
        }
    }

    fn records(&self) -> Vec<LeaseRecord> {
        self.registry.store.leases().iter().map(|lease| lease.record()).collect()
    }

    fn record(&self, lease: LeaseId) -> Option<LeaseRecord> {
        self.registry.store.get(lease).map(|lease| lease.record())
    }

    fn open(&self, record: LeaseRecord) -> Result<(), String> {
        self.registry.store.create(record).map(drop).map_err(|error| error.to_string())?;
        self.changed();
        Ok(())
    }

    fn give_to(
        &self,
        lease: LeaseId,
        borrower: HostName,
        note: serde_json::Value,
    ) -> Result<(), String> {
        let lease =
            self.registry.store.get(lease).ok_or_else(|| format!("lease {lease} is gone"))?;
        lease.give_to(borrower, note).map_err(|error| error.to_string())
    }

    fn can_move(&self) -> bool {
        true
    }

    fn remove(&self, lease: LeaseId) -> Result<(), String> {
        if self.registry.store.get(lease).is_none() {
            return Ok(());
        }
        self.registry.state().leaving.insert(lease);
        self.nbd.close_lease(lease);
        if let Some((target, _)) = &self.nvme {
            target.close_lease(lease);
        }
        self.registry.state().namespaces.remove(&lease);
        self.registry.gate.forget(lease);
        let removed = self.registry.store.remove(lease).map_err(|error| error.to_string());
        self.registry.state().leaving.remove(&lease);
        self.changed();
        removed.map(drop)
    }

    fn uris(&self, record: &LeaseRecord) -> Vec<String> {
        let address = self.nbd.address().clone();
        let nbd = Uri { secure: true, address, export: record.id.to_string() }.to_string();
        let nvme =
            self.nvme.as_ref().filter(|_| note(record).is_some_and(|note| note.access.is_some()));
        let nvme = nvme.map(|(_, address)| NvmeUri {
            address: address.clone(),
            subsystem: Nqn::of_lease(record.id),
        });
        [nbd].into_iter().chain(nvme.map(|uri| uri.to_string())).collect()
    }

    fn stored(&self) -> BTreeMap<LeaseId, Bytes> {
        self.registry.store.leases().iter().map(|lease| (lease.id(), lease.stored())).collect()
    }

    fn connections(&self) -> Option<BTreeMap<LeaseId, u32>> {
        Some(self.registry.state().connections.clone())
    }

    fn gate(&self) -> Option<Arc<Gate>> {
        Some(Arc::clone(&self.registry.gate))
    }

    fn in_use(&self) -> Vec<LeaseId> {
        self.registry.state().connections.keys().copied().collect()
    }
}

impl StoreLeases {
    fn changed(&self) {
        if let Some((target, _)) = &self.nvme {
            target.subsystems_changed();
        }
    }
}

impl ExportRegistry {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Returns a lease unless its removal has begun.
    fn get(&self, lease: LeaseId) -> Option<Arc<Lease>> {
        let lease = self.store.get(lease)?;
        (!self.state().leaving.contains(&lease.id())).then_some(lease)
    }

    /// Returns a subsystem's lease and its access data, if `host` is the borrower's name.
    fn for_host(&self, subsystem: &Nqn, host: &Nqn) -> Option<(Arc<Lease>, Access)> {
        let lease = self
            .store
            .leases()
            .into_iter()
            .find(|lease| Nqn::of_lease(lease.id()) == *subsystem)?;
        let access = note(&self.get(lease.id())?.record())?.access?;
        (access.host == host.as_str()).then_some((lease, access))
    }

    fn count(&self, lease: LeaseId, change: impl FnOnce(u32) -> u32) {
        let connections = &mut self.state().connections;
        match change(connections.get(&lease).copied().unwrap_or_default()) {
            0 => connections.remove(&lease),
            count => connections.insert(lease, count),
        };
    }
}

impl Connections for ExportRegistry {
    fn gate(&self) -> Option<Arc<Gate>> {
        Some(Arc::clone(&self.gate))
    }

    fn borrower(&self, lease: LeaseId) -> Option<HostName> {
        self.store.get(lease).map(|lease| lease.borrower())
    }

    fn connected(&self, lease: LeaseId) {
        self.count(lease, |count| count + 1);
    }

    fn disconnected(&self, lease: LeaseId) {
        self.count(lease, |count| count.saturating_sub(1));
    }
}

impl Exports for ExportRegistry {
    fn open(&self, name: &str, peer: &Peer) -> Result<Storage, nbd::Refused> {
        // A missing lease and another host's lease get the same answer: a host learns nothing of
        // others' leases.
        let refused = || nbd::Refused::Unknown(name.to_owned());
        let id: LeaseId = name.parse().map_err(|_| refused())?;
        let lease = self.get(id).ok_or_else(refused)?;
        if peer.host.as_ref().is_some_and(|host| admits(&lease.record(), host)) {
            Ok(Storage::Lease(lease))
        } else {
            Err(refused())
        }
    }

    fn list(&self, peer: &Peer) -> Vec<String> {
        let admitted = |lease: &Arc<Lease>| {
            peer.host.as_ref().is_some_and(|host| admits(&lease.record(), host))
        };
        self.store
            .leases()
            .into_iter()
            .filter(admitted)
            .map(|lease| lease.id().to_string())
            .collect()
    }
}

impl Subsystems for ExportRegistry {
    fn open(&self, subsystem: &Nqn, host: &Host) -> Result<Arc<Namespace>, nvme::Refused> {
        // Missing and foreign leases get the same answer, as in `Exports::open`.
        let unknown = || nvme::Refused::Unknown(subsystem.clone());
        let (lease, access) = self.for_host(subsystem, &host.nqn).ok_or_else(unknown)?;
        if access.secrets.is_some() && secrets(&access).is_none() {
            return Err(nvme::Refused::Forbidden("the recorded secret is malformed".to_owned()));
        }
        let namespaces = &mut self.state().namespaces;
        Ok(namespaces.entry(lease.id()).or_insert_with(|| Arc::new(Namespace::new(lease))).clone())
    }

    fn list(&self, host: &Host) -> Vec<Nqn> {
        let all = self.store.leases().into_iter().map(|lease| Nqn::of_lease(lease.id()));
        all.filter(|subsystem| self.for_host(subsystem, &host.nqn).is_some()).collect()
    }

    fn secrets(&self, subsystem: &Nqn, host: &Host) -> Option<Secrets> {
        secrets(&self.for_host(subsystem, &host.nqn)?.1)
    }
}

fn secrets(access: &Access) -> Option<Secrets> {
    let secrets = access.secrets.as_ref()?;
    Some(Secrets {
        host: secrets.borrower.parse().ok()?,
        controller: Some(secrets.lender.parse().ok()?),
    })
}
