//! The lending half: leases, the holders of their pages, and the servers for borrowers.
//!
//! - `store`: pages in the store, which this process serves over NBD and NVMe/TCP.
//! - `kernel`: pages in zram devices, which the kernel's own NVMe target serves over TCP and RDMA.

mod connections;
mod kernel;
pub(crate) mod limits;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use aquifer_api::message::{Access, AccessSecrets};
use aquifer_control::{LentLease, Owner};
use aquifer_nvme::auth::Secret;
use aquifer_page::{Bytes, HostName, LeaseId};
use aquifer_store::LeaseRecord;
use aquifer_transport::serving::limits::Gate;
use aquifer_transport::tls::Identity;
use serde::{Deserialize, Serialize};

use self::kernel::KernelLeases;
use self::store::StoreLeases;
use crate::config::{Config, LeaseBackend};

/// The memory that this host has lent. Calls may take as long as freeing memory; none waits for a
/// peer.
#[derive(Debug)]
pub struct Lender {
    leases: Box<dyn Leases>,
    /// Whether borrowers must authenticate with secrets.
    secrets: bool,
}

/// A holder of leases' pages, with the servers for borrowers.
trait Leases: fmt::Debug + Send + Sync {
    /// Describes for people where borrowers reach the pages.
    fn place(&self) -> String;
    /// Returns the records of all leases.
    fn records(&self) -> Vec<LeaseRecord>;
    /// Returns the record of one lease.
    fn record(&self, lease: LeaseId) -> Option<LeaseRecord>;
    /// Sets up a lease, which outlives this process.
    fn open(&self, record: LeaseRecord) -> Result<(), String>;
    /// Gives a lease to another host, and replaces its note.
    fn give_to(
        &self,
        lease: LeaseId,
        borrower: HostName,
        note: serde_json::Value,
    ) -> Result<(), String>;
    /// Returns whether another host can take over a lease: a server keeps the former host out.
    fn can_move(&self) -> bool;
    /// Removes a lease with its pages and connections; a missing lease is no error.
    fn remove(&self, lease: LeaseId) -> Result<(), String>;
    /// Returns a lease's URIs, one per protocol.
    fn uris(&self, record: &LeaseRecord) -> Vec<String>;
    /// Returns the RAM that each lease takes.
    fn stored(&self) -> BTreeMap<LeaseId, Bytes>;
    /// Returns the number of connections of each connected lease; `None` if unknown.
    fn connections(&self) -> Option<BTreeMap<LeaseId, u32>>;
    /// Returns the limits of borrowers; `None` if the kernel serves the leases, which has none.
    fn gate(&self) -> Option<Arc<Gate>> {
        None
    }
    /// Returns the leases that have, or may have, a connection: a device may live on their pages,
    /// even without its host's agent.
    fn in_use(&self) -> Vec<LeaseId>;
}

/// The agent's data in a lease's record.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    request: String,
    /// The owner of the pages; absent in records of older agents, which lent to swap only.
    #[serde(default, rename = "region")]
    owner: Owner,
    /// `None` in the record of an agent without NVMe.
    #[serde(default)]
    access: Option<Access>,
    /// How often the lease has moved with its region.
    #[serde(default)]
    generation: u32,
    /// The hosts to which its region may be moving.
    #[serde(default)]
    next: BTreeSet<HostName>,
    /// Whether the lease holds second copies that this host takes back first.
    #[serde(default)]
    goes_first: bool,
}

/// Reads the agent's data from a record; `None` if no agent wrote it.
fn note(record: &LeaseRecord) -> Option<Note> {
    Note::deserialize(&record.note).ok()
}

impl Lender {
    /// Finds the leases that the previous agent granted, and serves them again.
    ///
    /// # Errors
    /// If the store, the address or the kernel's target cannot be used; says which and why.
    pub fn open(config: &Config, identity: &Identity) -> Result<Self, String> {
        let leases: Box<dyn Leases> = match config.lend.backend {
            LeaseBackend::Store => Box::new(StoreLeases::open(config, identity)?),
            LeaseBackend::Kernel => Box::new(KernelLeases::open(config)?),
        };
        Ok(Self { leases, secrets: config.lend.secrets })
    }

    /// Describes for people where borrowers reach the pages.
    pub fn place(&self) -> String {
        self.leases.place()
    }

    /// Returns the leases of the previous agent, each with its URIs.
    pub fn restored(&self) -> Vec<(LentLease, Vec<String>)> {
        let records = self.leases.records();
        records
            .iter()
            .filter_map(|record| Some((lent(record)?, self.leases.uris(record))))
            .collect()
    }

    /// Sets up a lease; returns the URIs of its pages.
    ///
    /// # Errors
    /// If there is no room for the lease, or the host cannot serve it.
    pub fn open_lease(&self, lent: &LentLease) -> Result<Vec<String>, String> {
        // The controller may order the same lease twice.
        if let Some(record) = self.leases.record(lent.lease) {
            return Ok(self.leases.uris(&record));
        }
        let note = noted(lent, Some(self.new_access()?))?;
        let record = LeaseRecord {
            id: lent.lease,
            group: lent.group.clone(),
            note,
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
        Ok(Access { host: aquifer_blockdev::nvme::target::new_name().to_string(), secrets })
    }

    /// Returns how a host reaches its lease over NVMe; `None` if the host has no such lease.
    pub fn access(&self, lease: LeaseId, borrower: &HostName) -> Option<Access> {
        let record = self.leases.record(lease).filter(|record| admits(record, borrower))?;
        note(&record)?.access
    }

    /// Writes down which hosts may use a lease.
    ///
    /// # Errors
    /// If there is no such lease, or its record cannot be written.
    pub fn record_lease(&self, lent: &LentLease) -> Result<(), String> {
        let lease = lent.lease;
        let record = self.leases.record(lease).ok_or_else(|| format!("lease {lease} is gone"))?;
        let access = note(&record).and_then(|note| note.access);
        self.leases.give_to(lease, lent.borrower.clone(), noted(lent, access)?)
    }

    /// Returns whether another host can take over a lease of this one.
    pub fn can_move(&self) -> bool {
        self.leases.can_move()
    }

    /// Drops a lease with its connections and pages; a missing lease is no error.
    ///
    /// # Errors
    /// If not all of the lease's memory is free.
    pub fn free_lease(&self, lease: LeaseId) -> Result<(), String> {
        self.leases.remove(lease)
    }

    /// Tells whether this host granted `lease` to `borrower`.
    pub fn is_of(&self, lease: LeaseId, borrower: &HostName) -> bool {
        self.leases.record(lease).is_some_and(|record| record.borrower == *borrower)
    }

    /// Returns the hosts that hold leases of this one.
    pub fn borrowers(&self) -> BTreeSet<HostName> {
        self.leases.records().into_iter().map(|record| record.borrower).collect()
    }

    /// Returns the leases that have, or may have, a connection.
    pub fn in_use(&self) -> Vec<LeaseId> {
        self.leases.in_use()
    }

    /// Returns the limits of borrowers; `None` if the kernel serves the leases, which has none.
    pub fn gate(&self) -> Option<Arc<Gate>> {
        self.leases.gate()
    }

    /// Returns the RAM that all leases take.
    pub fn stored(&self) -> Bytes {
        self.leases.stored().into_values().sum()
    }

    /// Returns the RAM that each lease takes.
    pub fn stored_by_lease(&self) -> BTreeMap<LeaseId, Bytes> {
        self.leases.stored()
    }

    /// Returns the number of connections of each connected lease; `None` if unknown.
    pub fn connections(&self) -> Option<BTreeMap<LeaseId, u32>> {
        self.leases.connections()
    }
}

/// Returns the agent's data for a lease's record.
fn noted(lent: &LentLease, access: Option<Access>) -> Result<serde_json::Value, String> {
    let LentLease { owner, request, generation, next, goes_first, .. } = lent.clone();
    let request = request.to_string();
    let note = Note { request, owner, access, generation, next, goes_first };
    serde_json::to_value(note).map_err(|error| error.to_string())
}

/// Returns whether a host may use a lease: its borrower, or one to which the region may be moving.
fn admits(record: &LeaseRecord, host: &HostName) -> bool {
    record.borrower == *host || note(record).is_some_and(|note| note.next.contains(host))
}

/// Converts a record to a lease; `None` if no agent wrote the record.
fn lent(record: &LeaseRecord) -> Option<LentLease> {
    let note = note(record)?;
    Some(LentLease {
        lease: record.id,
        borrower: record.borrower.clone(),
        owner: note.owner,
        group: record.group.clone(),
        bytes: record.capacity,
        request: note.request.try_into().ok()?,
        generation: note.generation,
        next: note.next,
        goes_first: note.goes_first,
    })
}
