//! What a host lends and borrows, for its status.

use std::collections::BTreeMap;

use aquifer_control::LoanState;
use aquifer_page::{Bytes, Group, HostName, LeaseId, RegionName, VolumeId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::schema;

/// What a host lends and borrows.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Loans {
    /// The leases that the host has granted.
    pub lent: Vec<Lent>,
    /// The volumes that the host has borrowed.
    pub borrowed: Vec<Volume>,
    /// The regions with memory that the agent borrowed for them.
    #[serde(default)]
    pub regions: Vec<Region>,
    /// What would be lost with each lender, if it died now.
    #[serde(default)]
    pub at_risk: Vec<AtRisk>,
    /// The link over which the host lends. Absent if the kernel serves the leases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lending_link: Option<LendingLink>,
}

/// What would be lost with a lender.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AtRisk {
    /// The lender.
    #[schema(value_type = schema::Name)]
    pub lender: HostName,
    /// The bytes of extents of which no other copy is whole, or of pages that only this lender has.
    #[schema(value_type = schema::Size)]
    pub bytes: Bytes,
}

impl Loans {
    /// Fills in what would be lost with each lender. A lease without second copies counts with all
    /// its extents that are in use.
    pub fn note_risks(&mut self) {
        let mut risks: BTreeMap<HostName, Bytes> = BTreeMap::new();
        let volumes = self.borrowed.iter().flat_map(|volume| &volume.leases);
        for held in volumes.chain(self.regions.iter().flat_map(|region| &region.leases)) {
            let (alone, at_copy) = match &held.copy {
                None if held.disk.is_some() => {
                    (held.disk.as_ref().map_or(Bytes::ZERO, |copy| copy.lacks), None)
                }
                None => (held.placed, None),
                Some(copy) if !copy.answers => (held.placed, Some((copy, copy.first_lacks))),
                Some(copy) if !copy.first_answers => (copy.lacks, Some((copy, held.placed))),
                Some(copy) => (copy.lacks, Some((copy, copy.first_lacks))),
            };
            let at_copy = at_copy.map(|(copy, bytes)| (copy.lender.clone(), bytes));
            for (lender, bytes) in [(held.lender.clone(), alone)].into_iter().chain(at_copy) {
                let sum = risks.entry(lender).or_insert(Bytes::ZERO);
                *sum = sum.saturating_add(bytes);
            }
        }
        let risk = |(lender, bytes)| AtRisk { lender, bytes };
        self.at_risk = risks.into_iter().map(risk).collect();
    }
}

/// A lease that this host has granted.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Lent {
    /// The lease.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
    /// The host that holds the lease.
    #[schema(value_type = schema::Name)]
    pub borrower: HostName,
    /// The borrower's region that the lease is for. Absent if it is for swap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Name>)]
    pub region: Option<RegionName>,
    /// The tenant that the lease is accounted to.
    #[schema(value_type = schema::Name)]
    pub group: Group,
    /// The capacity of the lease.
    #[schema(value_type = schema::Size)]
    pub capacity: Bytes,
    /// The RAM that its pages take now.
    #[schema(value_type = schema::Size)]
    pub stored: Bytes,
    /// Whether it holds second copies that this host takes back before anything else.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub goes_first: bool,
    /// The number of open connections. Absent if the kernel serves the lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<u32>,
    /// What the borrower read and wrote, and how limits held it back. Absent if the kernel serves
    /// the lease, or if the borrower has not connected since the agent started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<LeaseTraffic>,
    /// The state of the lease.
    pub state: LoanState,
    /// Seconds since the borrower's last sign of life.
    pub silent_s: f64,
}

/// The link over which a host lends, and the rate that all borrowers share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LendingLink {
    /// The network interface. Absent for loopback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// Its speed in one direction, in bytes a second. Absent if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Size>)]
    pub speed: Option<Bytes>,
    /// The part of the speed that lending may use beside the host's own traffic.
    pub share: f64,
    /// The bytes a second that all borrowers share now. Absent if there is no such limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Size>)]
    pub rate: Option<Bytes>,
    /// The reason for the rate, or for none.
    pub why: String,
}

/// What a borrower did with a lease since the agent started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LeaseTraffic {
    /// The bytes that it read.
    #[schema(value_type = schema::Size)]
    pub read: Bytes,
    /// The bytes that it wrote.
    #[schema(value_type = schema::Size)]
    pub written: Bytes,
    /// The number of connections whose request waits for a limit now.
    pub waiting: u64,
    /// Seconds that its requests waited for limits, all connections together.
    pub waited_s: f64,
    /// The limit for which a request waited last: `host_bytes`, `host_requests`, `lease_bytes`,
    /// `lease_requests`, or `share` for the borrower's share of this host. Absent if none did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
}

/// A volume that this host has borrowed.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// The volume.
    #[schema(value_type = schema::Id)]
    pub volume: VolumeId,
    /// The process that serves the volume. Absent if the kernel itself reaches the lender.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The volume's block device.
    pub device: String,
    /// The backend that attaches the volume: `ublk`, `nbd` or `fuse-loop`; without a process of
    /// Aquifer: `nvme-tcp` or `nvme-rdma`.
    pub backend: String,
    /// The volume's size.
    #[schema(value_type = schema::Size)]
    pub capacity: Bytes,
    /// The bytes swapped out to the volume now.
    #[schema(value_type = schema::Size)]
    pub swap_used: Bytes,
    /// The bytes in the local spill file, because no lender had room.
    #[schema(value_type = schema::Size)]
    pub spilled: Bytes,
    /// The leases under the volume.
    pub leases: Vec<Held>,
    /// The last error of a page's I/O, with lender, lease and page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// A region with memory that the agent borrowed for it.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Region {
    /// The region; a VM's region has the VM's name.
    #[schema(value_type = schema::Name)]
    pub region: RegionName,
    /// The region's volume.
    #[schema(value_type = schema::Id)]
    pub volume: VolumeId,
    /// The leases under the region.
    pub leases: Vec<Held>,
    /// The bytes in the local spill file.
    #[serde(default)]
    #[schema(value_type = schema::Size)]
    pub spilled: Bytes,
    /// The last error of a page's I/O, or the reason why the region's engine does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// A lease that this host holds.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Held {
    /// The lease.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
    /// The host that granted the lease.
    #[schema(value_type = schema::Name)]
    pub lender: HostName,
    /// The capacity of the lease.
    #[schema(value_type = schema::Size)]
    pub capacity: Bytes,
    /// The bytes of the volume's extents in the lease.
    #[schema(value_type = schema::Size)]
    pub placed: Bytes,
    /// The state as text: `ok`, `unreachable for 3s`, `moving 3 of 12 extents`.
    pub state: String,
    /// The state for programs.
    #[serde(default)]
    pub health: LeaseHealth,
    /// The second copies of its pages, if a region has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<SecondCopy>,
    /// The copy of its pages on this host's disk, if a region keeps one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskCopy>,
    /// The age of the key of its pages, as far as agents of this host have counted it. Absent if
    /// the lease has no key of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_age_s: Option<f64>,
}

/// The copy of the pages in a lease on the borrower's own disk. It lags behind.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct DiskCopy {
    /// The id that stands for the copy.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
    /// Whether the lender answers, and has what it stored.
    pub lender_answers: bool,
    /// The pages that the copy has, in bytes.
    #[schema(value_type = schema::Size)]
    pub held: Bytes,
    /// The pages of these that are still in memory, in bytes.
    #[schema(value_type = schema::Size)]
    pub in_ring: Bytes,
    /// The pages that only the lender has, in bytes. They would be lost with it.
    #[schema(value_type = schema::Size)]
    pub lacks: Bytes,
    /// The pages that only the copy has, in bytes.
    #[schema(value_type = schema::Size)]
    pub lender_lacks: Bytes,
    /// Why the disk takes no pages at present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<String>,
}

/// Second copies of the pages in a lease.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct SecondCopy {
    /// The lease that holds the copies.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
    /// The host that granted that lease.
    #[schema(value_type = schema::Name)]
    pub lender: HostName,
    /// Whether the lender of the first copies answers, and has what it stored.
    pub first_answers: bool,
    /// Whether the lender of the second copies answers, and has what it stored.
    pub answers: bool,
    /// The pages without a second copy, in bytes. They would be lost with the lender of the first.
    #[schema(value_type = schema::Size)]
    pub lacks: Bytes,
    /// The pages of which only the second copy is left, in bytes.
    #[schema(value_type = schema::Size)]
    pub first_lacks: Bytes,
    /// For a copy that lags behind: the pages that have yet to reach its lender, in bytes. They
    /// would be lost if the lender of the first and the owner's process died now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Size>)]
    pub in_ring: Option<Bytes>,
}

/// The state of a lease that this host holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LeaseHealth {
    /// The lease is in use.
    #[default]
    Ok,
    /// The lease is in use, but its lender has no room for more pages.
    Full,
    /// The lender does not answer.
    Unreachable,
    /// The lender has lost the stored pages. No new pages go there.
    Lost,
    /// The pages are moving elsewhere.
    Moving,
}
