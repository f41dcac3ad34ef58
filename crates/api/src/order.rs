//! What an operator may ask of the agent on this host, over its unix socket.

use std::net::SocketAddr;
use std::path::PathBuf;

use aquifer_page::{Bytes, HostName, LeaseId, MigrationId, RegionName, VolumeId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Borrow now, whatever the thresholds say. Answered when the memory is swapped on, or with the reason why not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Borrow {
    /// How much, rounded up to whole extents of 64 MiB.
    #[schema(value_type = u64)]
    pub bytes: Bytes,
}

/// What was borrowed by an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Borrowed {
    /// The new volume.
    #[schema(value_type = String)]
    pub volume: VolumeId,
    /// Its block device.
    pub device: String,
    /// The leases under it.
    #[schema(value_type = Vec<String>)]
    pub leases: Vec<LeaseId>,
    /// What was granted in all; may be less than asked for.
    #[schema(value_type = u64)]
    pub bytes: Bytes,
}

/// Give back what was borrowed: swap off, detach, and tell the lenders. Answered when it is done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Return {
    /// One volume; all of them where it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub volume: Option<VolumeId>,
}

/// What was given back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Returned {
    /// The volumes that are gone.
    #[schema(value_type = Vec<String>)]
    pub volumes: Vec<VolumeId>,
}

/// Have another host wait for a VM of this one, which is to move there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Migrate {
    /// The VM.
    #[schema(value_type = String)]
    pub vm: RegionName,
    /// A peer of this host.
    #[schema(value_type = String)]
    pub to: HostName,
    /// What its local cache is to be there; what it is here, if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub cache: Option<Bytes>,
}

/// It waits. What there is to do now is done by the VM's keeper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Awaited {
    /// The attempt.
    #[schema(value_type = String)]
    pub migration: MigrationId,
    /// Where the VM is waited for.
    #[schema(value_type = String)]
    pub address: SocketAddr,
    /// Directory of this host's certificate.
    #[schema(value_type = String)]
    pub identity: PathBuf,
}
