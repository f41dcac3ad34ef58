//! The orders that an operator gives the agent on this host, over its unix socket.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use aquifer_page::{Bytes, Group, HostName, LeaseId, MigrationId, RegionName, VolumeId};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Number;
use utoipa::ToSchema;

use crate::schema;

/// Borrow now, regardless of the thresholds. The agent answers when the kernel swaps to the memory,
/// or with the reason for the failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Borrow {
    /// The size, which the agent rounds up to whole extents of 64 MiB.
    #[schema(value_type = schema::Size)]
    pub bytes: Bytes,
    /// The swap priority. Default: the priority in the agent's configuration.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "swap_priority")]
    #[schema(minimum = 0, maximum = 32767)]
    pub priority: Option<u16>,
}

/// The memory borrowed by an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Borrowed {
    /// The new volume.
    #[schema(value_type = schema::Id)]
    pub volume: VolumeId,
    /// The volume's block device.
    pub device: String,
    /// The directory of the files of the volume's process, if it has one.
    #[schema(value_type = String)]
    pub state: PathBuf,
    /// The leases under the volume.
    #[schema(value_type = Vec<schema::Id>)]
    pub leases: Vec<LeaseId>,
    /// The sum of the granted bytes, which may be less than the order asked for.
    #[schema(value_type = schema::Size)]
    pub bytes: Bytes,
}

/// Borrow memory for a region that is about to be made on this host. The agent answers with all the
/// leases, or with the reason for the failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BorrowFor {
    /// The region.
    #[schema(value_type = schema::Name)]
    pub region: RegionName,
    /// The id of the region's volume, which no other region has.
    #[schema(value_type = schema::Id)]
    pub volume: VolumeId,
    /// The size, which the agent rounds up to whole extents of 64 MiB.
    #[schema(value_type = schema::Size)]
    pub bytes: Bytes,
    /// The tenant that the lenders account the leases to.
    #[schema(value_type = schema::Name)]
    pub group: Group,
    /// The directory of the region's files, which must be the one that the agent looks at.
    #[schema(value_type = String)]
    pub directory: PathBuf,
}

/// The leases for a region. Its maker must answer with [`Settle`]. Unless the region exists within
/// a minute, the agent gives them back.
#[derive(Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Provided {
    /// The leases, with their keys, as a region's specification has them.
    #[schema(value_type = Vec<Object>)]
    pub leases: serde_json::Value,
    /// The directory of this host's certificate.
    #[schema(value_type = String)]
    pub identity: PathBuf,
}

impl fmt::Debug for Provided {
    /// Leaves the keys out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Provided").field("identity", &self.identity).finish_non_exhaustive()
    }
}

/// The region of a [`BorrowFor`] exists with its leases, or will not. The agent refuses the first
/// if it holds the leases no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Settle {
    /// The region's volume.
    #[schema(value_type = schema::Id)]
    pub volume: VolumeId,
    /// Whether the region exists.
    pub exists: bool,
}

/// Give back borrowed memory: swap off, detach, and tell the lenders. The agent answers when it is
/// done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Return {
    /// One volume. Default: all volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Id>)]
    pub volume: Option<VolumeId>,
}

/// The volumes given back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Returned {
    /// The volumes that are gone.
    #[schema(value_type = Vec<schema::Id>)]
    pub volumes: Vec<VolumeId>,
}

/// Replace the keys of leases: other leases with new keys take their pages. The agent answers at
/// once, and replaces one lease after the other while nothing else moves and lenders have room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RotateKeys {
    /// One lease. Default: all leases with keys of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Id>)]
    pub lease: Option<LeaseId>,
}

/// The leases whose keys the agent replaces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RotatesKeys {
    /// These leases.
    #[schema(value_type = Vec<schema::Id>)]
    pub leases: Vec<LeaseId>,
}

/// Drain this host, or end that. While it drains, it takes its leases back, lends nothing, moves
/// its VMs to other hosts and takes none. Borrowers move their pages to other lenders, or to a
/// local file, while I/O continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// Whether to drain; else this host lends and takes VMs again.
    pub on: bool,
}

/// Leave the cluster for good. The agent then ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Leave {}

/// End the membership of a host, which may be gone or hostile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Forget {
    /// The host.
    #[schema(value_type = schema::Name)]
    pub host: HostName,
    /// Whether the host may be in wrong hands: the tokens that it knows end, too.
    #[serde(default)]
    pub force: bool,
}

/// No host accepts the certificates that the host has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Forgotten {
    /// The host.
    #[schema(value_type = schema::Name)]
    pub host: HostName,
    /// The hosts that know of it.
    #[schema(value_type = Vec<schema::Name>)]
    pub told: Vec<HostName>,
    /// The hosts that could not be told. They learn of it from the others when they are back.
    #[schema(value_type = Vec<schema::Name>)]
    pub untold: Vec<HostName>,
    /// Hosts that run a version which knows nothing of this. Without `force`, the key of the gossip
    /// stays because of them, and the host can hear it. With `force`, they hear no gossip.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<schema::Name>)]
    pub older: Vec<HostName>,
}

/// This host has left the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Departed {
    /// Why the host's name stays taken, if no signer has heard that it left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name_taken: Option<String>,
}

/// The progress of a drain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Draining {
    /// Whether an operator drains this host.
    pub on: bool,
    /// The leases that are still lent.
    pub left: Vec<Left>,
    /// The VMs that are still here.
    #[serde(default)]
    pub vms: Vec<VmLeft>,
    /// The number of volumes that this host borrows: a drain does not return them.
    #[serde(default)]
    pub borrows: usize,
}

/// A VM of a host that drains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmLeft {
    /// The VM.
    #[schema(value_type = schema::Name)]
    pub vm: RegionName,
    /// Whether it moves, waits for its turn, or stays.
    pub state: VmLeftState,
    /// The reason why it waits or stays, or the phase of its move.
    pub why: String,
    /// The destination of its move, once it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Name>)]
    pub to: Option<HostName>,
    /// The bytes that its move has sent to the destination and to lenders.
    #[serde(default)]
    #[schema(value_type = schema::Size)]
    pub sent: Bytes,
}

/// The state of a VM of a host that drains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmLeftState {
    /// It moves.
    Moves,
    /// It waits for its turn, or for another attempt.
    Waits,
    /// It cannot move, however long the host waits.
    Stays,
}

/// A lease that is still lent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Left {
    /// The lease.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
    /// The host that holds the lease.
    #[schema(value_type = schema::Name)]
    pub borrower: HostName,
    /// The bytes still stored in the lease.
    #[schema(value_type = schema::Size)]
    pub bytes: Bytes,
    /// The reason why the lease is not free yet.
    pub why: String,
    /// The time in milliseconds for which the borrower's I/O waits for a page of the lease before
    /// it fails. Absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_timeout_ms: Option<u64>,
}

/// Promise memory of this host to a VM, a region or an export, before it gets the memory. The agent
/// refuses if the memory is promised already. The promise ends if none of that name shows within a
/// minute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// The VM, the region, or the export: `export-` and the id of its process.
    #[schema(value_type = schema::Name)]
    pub name: RegionName,
    /// What the memory is for.
    pub purpose: ClaimPurpose,
    /// The group of the region. Default: `default`.
    #[serde(default)]
    #[schema(value_type = schema::Name)]
    pub group: Group,
    /// All memory of the VM, the region's whole cache, or the export's maximum. Zero ends the claim
    /// of a command that failed.
    #[schema(value_type = schema::Size)]
    pub bytes: Bytes,
    /// The memory beyond that which only this VM gets. Default: none.
    #[serde(default)]
    #[schema(value_type = schema::Size)]
    pub reserve: Bytes,
    /// The process that makes the VM, the region or the export. Absent if that exists. An agent
    /// that watches a cgroup counts only what processes of the cgroup make.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = "uint32", maximum = 4_294_967_295_u64)]
    pub pid: Option<u32>,
    /// Whether to promise the memory in any case.
    #[serde(default)]
    pub overcommit: bool,
}

impl Claim {
    /// Makes the claim of something that exists, without group and reserve.
    pub fn new(name: RegionName, purpose: ClaimPurpose, bytes: Bytes) -> Self {
        let (group, reserve) = (Group::default(), Bytes::ZERO);
        Self { name, purpose, group, bytes, reserve, pid: None, overcommit: false }
    }
}

/// What claimed memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClaimPurpose {
    /// The memory of a VM in RAM of this host.
    Vm,
    /// The local cache of a region.
    Cache,
    /// The pages of an export made by hand.
    Export,
}

/// Prepare another host to receive a VM of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Migrate {
    /// The VM.
    #[schema(value_type = schema::Name)]
    pub vm: RegionName,
    /// The destination, a peer of this host. Default: the peer that can spare most and takes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Name>)]
    pub to: Option<HostName>,
    /// The size of the VM's local cache at the destination. Default: its present size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Size>)]
    pub cache: Option<Bytes>,
}

/// The destination waits for the VM. The VM's supervisor does the rest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Awaited {
    /// The destination.
    #[schema(value_type = schema::Name)]
    pub to: HostName,
    /// The id of the attempt.
    #[schema(value_type = schema::Id)]
    pub migration: MigrationId,
    /// The address at which the destination waits for the VM.
    #[schema(value_type = schema::Socket)]
    pub address: SocketAddr,
    /// The directory of this host's certificate.
    #[schema(value_type = String)]
    pub identity: PathBuf,
    /// Whether the destination has the VM's definition now.
    #[serde(default)]
    pub defined: bool,
}

/// Reads a swap priority that the kernel accepts: 0 to 32767 (swapon(2)). JSON does not tell 5 from
/// 5.0.
fn swap_priority<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u16>, D::Error> {
    let Some(number) = Option::<Number>::deserialize(deserializer)? else { return Ok(None) };
    let value =
        number.as_f64().filter(|value| value.fract() == 0.0 && (0.0..=32_767.0).contains(value));
    let value = value
        .ok_or_else(|| D::Error::custom("a swap priority is a whole number from 0 to 32767"))?;
    Ok(Some(value as u16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_may_be_any_whole_number_that_json_can_write() {
        for (text, bytes) in [("4096", 4096), ("4096.0", 4096), ("4.096e3", 4096), ("\"4K\"", 4096)]
        {
            let order: Borrow = serde_json::from_str(&format!("{{\"bytes\":{text}}}")).unwrap();
            assert_eq!(order.bytes, Bytes(bytes), "{text}");
        }
        for text in ["-1", "0.5", "1e300", "-4096.0"] {
            assert!(
                serde_json::from_str::<Borrow>(&format!("{{\"bytes\":{text}}}")).is_err(),
                "{text}"
            );
        }
    }

    #[test]
    fn a_swap_priority_is_one_that_the_kernel_takes() {
        let order =
            |text| serde_json::from_str::<Borrow>(&format!("{{\"bytes\":1,\"priority\":{text}}}"));
        for (text, priority) in
            [("0", Some(0)), ("5.0", Some(5)), ("32767", Some(32_767)), ("null", None)]
        {
            assert_eq!(order(text).unwrap().priority, priority, "{text}");
        }
        for text in ["-1", "32768", "0.5", "1e300", "\"5\"", "true"] {
            assert!(order(text).is_err(), "{text}");
        }
    }
}
