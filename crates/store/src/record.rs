use std::fs;
use std::path::Path;

use aquifer_page::{Bytes, Group, HostName, LeaseId, OwnerId, file};
use serde::{Deserialize, Serialize};

use crate::{Claim, StoreError};

/// What is known of a lease besides its pages; kept beside them as `LEASE.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseRecord {
    /// The lease.
    pub id: LeaseId,
    /// Who may use it.
    pub borrower: HostName,
    /// The tenant it is accounted to.
    pub group: Group,
    /// Its size as an address space: a multiple of the page size.
    pub capacity: Bytes,
    /// The most it may store.
    pub quota: Bytes,
    /// Whether its pages are kept once with equal ones of all leases of the group that share.
    // Left out where it is not so, for an older store to understand the record.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
    /// Whose pages it holds, where that is to outlive the connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<Claim>,
    /// Owners that were taken over, and are not let in again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ousted: Vec<OwnerId>,
    /// Whatever the owner of the store wants to remember with the lease.
    #[serde(default)]
    pub note: serde_json::Value,
}

impl LeaseRecord {
    /// A new lease of no tenant's, all of which may be used, and which shares nothing.
    pub fn new(borrower: HostName, capacity: Bytes) -> Self {
        Self {
            id: LeaseId::random(),
            borrower,
            group: Group::default(),
            capacity,
            quota: capacity,
            shared: false,
            claim: None,
            ousted: Vec::new(),
            note: serde_json::Value::Null,
        }
    }

    /// Writes the record so that a crash leaves either the old one or the new one.
    ///
    /// No fsync: a tmpfs outlives the process, and nothing on it outlives the kernel.
    pub(crate) fn save(&self, path: &Path) -> Result<(), StoreError> {
        let text = serde_json::to_vec_pretty(self)
            .map_err(|error| StoreError::file("write", path)(error.into()))?;
        file::replace(path, &text).map_err(StoreError::file("write", path))
    }

    /// Reads a record.
    pub(crate) fn load(path: &Path) -> Result<Self, StoreError> {
        let text = fs::read(path).map_err(StoreError::file("read", path))?;
        serde_json::from_slice(&text)
            .map_err(|error| StoreError::file("understand", path)(error.into()))
    }
}
