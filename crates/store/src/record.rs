//! The record of a lease, a JSON file beside its pages.

use std::fs;
use std::path::Path;

use aquifer_page::{Bytes, Group, HostName, LeaseId, OwnerId, file};
use serde::{Deserialize, Serialize};

use crate::{Claim, StoreError};

/// The metadata of a lease; kept beside its pages as `LEASE.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseRecord {
    /// The lease.
    pub id: LeaseId,
    /// The host that may use it.
    pub borrower: HostName,
    /// The tenant to which it is accounted.
    pub group: Group,
    /// Its size as an address space: a multiple of the page size.
    pub capacity: Bytes,
    /// The most it may store, in bytes.
    pub quota: Bytes,
    /// Whether it keeps equal pages once, with all sharing leases of the group.
    // Omitted if false, so that an older store understands the record.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
    /// The owner of the pages, if its claim outlives the connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<Claim>,
    /// Owners that another owner has replaced by force; the store does not admit them again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ousted: Vec<OwnerId>,
    /// Free for the program that uses the store.
    #[serde(default)]
    pub note: serde_json::Value,
}

impl LeaseRecord {
    /// Makes the record of a new lease of the default group, with a quota as large as its capacity
    /// and without sharing.
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

    /// Writes the record atomically: a crash leaves either the old record or the new one.
    ///
    /// No fsync: a tmpfs outlives the process, and nothing on it outlives the kernel.
    pub(crate) fn save(&self, path: &Path) -> Result<(), StoreError> {
        let text = serde_json::to_vec_pretty(self)
            .map_err(|error| StoreError::file("write", path)(error.into()))?;
        file::replace(path, &text).map_err(StoreError::file("write", path))
    }

    pub(crate) fn load(path: &Path) -> Result<Self, StoreError> {
        let text = fs::read(path).map_err(StoreError::file("read", path))?;
        serde_json::from_slice(&text)
            .map_err(|error| StoreError::file("understand", path)(error.into()))
    }
}
