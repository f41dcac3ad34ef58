//! The lending half: leases, what holds their pages, and how their borrowers reach them.
//!
//! - `store`: pages in the store, served by this process over NBD and NVMe/TCP.
//! - `kernel`: pages in zram devices, served by the kernel's own NVMe target over TCP and RDMA.

mod connections;
mod kernel;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use aquifer_api::message::{Access, AccessSecrets};
use aquifer_control::LentLease;
use aquifer_fabric::nvme::auth::Secret;
use aquifer_fabric::tls::Identity;
use aquifer_page::{Bytes, HostName, LeaseId};
use aquifer_store::LeaseRecord;
use serde::{Deserialize, Serialize};

use self::kernel::KernelLeases;
use self::store::StoreLeases;
use crate::config::{Config, LeaseBackend};

/// What this host has lent. Its calls may take as long as freeing memory takes; none waits for a peer.
#[derive(Debug)]
pub struct Lender {
    leases: Box<dyn Leases>,
    /// Whether borrowers must prove who they are.
    secrets: bool,
}

/// What holds the pages of leases, and has them reached.
trait Leases: fmt::Debug + Send + Sync {
    /// For people: where that is.
    fn place(&self) -> String;
    /// All that there are.
    fn records(&self) -> Vec<LeaseRecord>;
    /// One of them.
    fn record(&self, lease: LeaseId) -> Option<LeaseRecord>;
    /// Sets one up. It outlives this process.
    fn open(&self, record: LeaseRecord) -> Result<(), String>;
    /// Takes one away, with its pages and whoever is connected. One that is gone already is no error.
    fn remove(&self, lease: LeaseId) -> Result<(), String>;
    /// By what a lease is reached, one URI a protocol.
    fn uris(&self, record: &LeaseRecord) -> Vec<String>;
    /// RAM that each takes.
    fn stored(&self) -> BTreeMap<LeaseId, Bytes>;
    /// How many connections each has that has any; nothing where that is not known.
    fn connections(&self) -> Option<BTreeMap<LeaseId, u32>>;
    /// Those that somebody is connected to, or may be: a device may live on their pages, whatever its host's agent does.
    fn in_use(&self) -> Vec<LeaseId>;
}

/// What the agent remembers with a lease besides its pages.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    request: String,
    /// Nothing with a lease of an agent that knew nothing of NVMe.
    #[serde(default)]
    access: Option<Access>,
}

/// What was noted with a lease; nothing where it is not an agent's.
fn note(record: &LeaseRecord) -> Option<Note> {
    Note::deserialize(&record.note).ok()
}

impl Lender {
    /// Finds whatever an agent before this one has lent, and has it reached again.
    ///
    /// # Errors
    /// The store, the address or the kernel's target cannot be used; says which and why.
    pub fn open(config: &Config, identity: &Identity) -> Result<Self, String> {
        let leases: Box<dyn Leases> = match config.lend.backend {
            LeaseBackend::Store => Box::new(StoreLeases::open(config, identity)?),
            LeaseBackend::Kernel => Box::new(KernelLeases::open(config)?),
        };
        Ok(Self { leases, secrets: config.lend.secrets })
    }

    /// For people: where borrowers reach the pages.
    pub fn place(&self) -> String {
        self.leases.place()
    }

    /// The leases that an agent before this one granted, each with its URIs.
    pub fn restored(&self) -> Vec<(LentLease, Vec<String>)> {
        let records = self.leases.records();
        records
            .iter()
            .filter_map(|record| Some((lent(record)?, self.leases.uris(record))))
            .collect()
    }

    /// Sets a lease up; answers by what its pages are reached.
    ///
    /// # Errors
    /// There is no room for it, or it cannot be served.
    pub fn open_lease(&self, lent: &LentLease) -> Result<Vec<String>, String> {
        // The controller may say it twice.
        if let Some(record) = self.leases.record(lent.lease) {
            return Ok(self.leases.uris(&record));
        }
        let note = Note { request: lent.request.to_string(), access: Some(self.new_access()?) };
        let record = LeaseRecord {
            id: lent.lease,
            group: lent.group.clone(),
            note: serde_json::to_value(note).map_err(|error| error.to_string())?,
            ..LeaseRecord::new(lent.borrower.clone(), lent.bytes)
        };
        let uris = self.leases.uris(&record);
        self.leases.open(record).map(|()| uris)
    }

    fn new_access(&self) -> Result<Access, String> {
        let secret = || Secret::generate().map_err(|error| error.to_string());
        let secrets = match self.secrets {
            true => Some(AccessSecrets { borrower: secret()?, lender: secret()? }),
            false => None,
        };
        Ok(Access { host: aquifer_device::nvme::target::new_name().to_string(), secrets })
    }

    /// How a host gets at a lease over NVMe; nothing if it is not its own.
    pub fn access(&self, lease: LeaseId, borrower: &HostName) -> Option<Access> {
        let record = self.leases.record(lease).filter(|record| record.borrower == *borrower)?;
        note(&record)?.access
    }

    /// Drops a lease with its connections and its pages. One that is gone already is no error.
    ///
    /// # Errors
    /// Its memory is not free, or not all of it.
    pub fn free_lease(&self, lease: LeaseId) -> Result<(), String> {
        self.leases.remove(lease)
    }

    /// Whether this lease was granted to that host.
    pub fn is_of(&self, lease: LeaseId, borrower: &HostName) -> bool {
        self.leases.record(lease).is_some_and(|record| record.borrower == *borrower)
    }

    /// The hosts that hold leases of this one.
    pub fn borrowers(&self) -> BTreeSet<HostName> {
        self.leases.records().into_iter().map(|record| record.borrower).collect()
    }

    /// The leases that somebody is connected to, or may be.
    pub fn in_use(&self) -> Vec<LeaseId> {
        self.leases.in_use()
    }

    /// RAM that all leases take.
    pub fn stored(&self) -> Bytes {
        self.leases.stored().into_values().sum()
    }

    /// RAM that each lease takes.
    pub fn stored_by_lease(&self) -> BTreeMap<LeaseId, Bytes> {
        self.leases.stored()
    }

    /// How many connections each lease has that has any; nothing where that is not known.
    pub fn connections(&self) -> Option<BTreeMap<LeaseId, u32>> {
        self.leases.connections()
    }
}

/// The lease of a record that an agent wrote.
fn lent(record: &LeaseRecord) -> Option<LentLease> {
    Some(LentLease {
        lease: record.id,
        borrower: record.borrower.clone(),
        group: record.group.clone(),
        bytes: record.capacity,
        request: note(record)?.request.try_into().ok()?,
    })
}
