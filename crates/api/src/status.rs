//! The state that an agent reports.

use std::collections::BTreeMap;

pub use aquifer_control::node::EventKind;
pub use aquifer_control::{LoanState, Role};
use aquifer_page::{Bytes, Group, HostName, LeaseId, RegionName, VolumeId, Zone};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::schema;

/// The state of one host, as its agent sees it.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// The host.
    #[schema(value_type = schema::Name)]
    pub host: HostName,
    /// The host's part in its cluster.
    #[serde(flatten)]
    pub membership: Membership,
    /// The agent's process.
    #[serde(flatten)]
    pub agent: AgentProcess,
    /// The present role.
    pub role: Role,
    /// The memory at the last reading.
    pub memory: HostMemory,
    /// The account of all memory by class.
    #[serde(default)]
    pub ledger: Ledger,
    /// What is left to drain, while an operator drains the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining: Option<LeftToDrain>,
    /// What the host lends and borrows.
    #[serde(flatten)]
    pub loans: Loans,
    /// The scanners that share equal pages of groups.
    #[serde(default)]
    pub scanners: Vec<GroupScanner>,
    /// The peers, as last heard of.
    pub peers: Vec<Peer>,
    /// What happened lately.
    #[serde(flatten)]
    pub history: History,
    /// Seconds between two readings.
    pub period_s: f64,
}

/// A host's part in its cluster.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Membership {
    /// The address at which other hosts reach the agent.
    #[serde(default)]
    pub address: String,
    /// Whether the host can admit others to its cluster.
    #[serde(default)]
    pub admits: bool,
    /// The zone that the host is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Name>)]
    pub zone: Option<Zone>,
    /// How long the host's certificate holds. Absent at agents of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<Certificate>,
}

/// How long a host's certificate holds, which the host renews by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Certificate {
    /// Whether it is time to act.
    pub state: CertificateState,
    /// Its end, in seconds since 1970.
    pub ends: u64,
    /// Seconds until then; zero if it has ended.
    pub left_s: u64,
    /// Seconds from its issue to its end.
    pub lifetime_s: u64,
    /// Why the last attempt to renew it failed. Absent if it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// What the remaining time of a certificate calls for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CertificateState {
    /// It does not hold yet: the clock of a signer, or of this host, was wrong. The host reaches no
    /// other until a signer renews it.
    Early,
    /// Nothing.
    Good,
    /// Less than a third of its lifetime is left: no signer renews it.
    Ending,
    /// It has ended. The host reaches no other until a signer renews it.
    Ended,
    /// It ended so long ago that no signer renews it: the host must join again.
    Lost,
}

impl Certificate {
    /// Describes its end for people, as in `4d 15h left`.
    pub fn left(&self) -> String {
        let (days, hours) = (self.left_s / 86_400, self.left_s / 3600 % 24);
        let (minutes, seconds) = (self.left_s / 60 % 60, self.left_s % 60);
        match self.state {
            CertificateState::Early => "not valid yet".to_owned(),
            CertificateState::Ended | CertificateState::Lost => "ended".to_owned(),
            _ if days > 0 => format!("{days}d {hours}h left"),
            _ if hours > 0 => format!("{hours}h {minutes}m left"),
            _ => format!("{minutes}m {seconds}s left"),
        }
    }
}

/// The process of an agent.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct AgentProcess {
    /// The process id of the agent.
    pub pid: u32,
    /// The agent's version.
    pub version: String,
    /// Seconds since the agent started.
    pub uptime_s: f64,
}

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

/// What happened lately on a host.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// The latest decisions, oldest first.
    pub decisions: Vec<Decision>,
    /// Events of pages, lenders, programs and VMs, oldest first.
    #[serde(default)]
    pub events: Vec<Event>,
    /// The latest changes of the role, oldest first.
    pub role_changes: Vec<RoleChange>,
}

/// A process that shares equal pages of a group's regions on the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GroupScanner {
    /// The group.
    #[schema(value_type = schema::Name)]
    pub group: Group,
    /// The process id.
    pub pid: u32,
    /// Whether an agent started it; if not, an operator did.
    pub by_agent: bool,
    /// The number of the group's regions.
    pub regions: u64,
    /// Memory of the regions that is kept once for several pages.
    #[schema(value_type = schema::Size)]
    pub shared: Bytes,
    /// The memory that sharing saves.
    #[schema(value_type = schema::Size)]
    pub saved: Bytes,
    /// CPU time of the scanner in its last period, in percent of one processor.
    pub cpu_pct: f64,
    /// Passes over all pages.
    pub passes: u64,
}

/// What is left on a host that drains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeftToDrain {
    /// The number of VMs that are still here.
    pub vms: usize,
    /// The number of leases that are still lent.
    pub leases: usize,
}

/// One reading of memory, in the paper's terms (its Table 1), all in bytes.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct HostMemory {
    /// The source of the reading: `host`, or the path of a cgroup.
    pub source: String,
    /// M_t: the total.
    #[schema(value_type = schema::Size)]
    pub total: Bytes,
    /// M_u: used, without buffers, page cache and slabs, but with the pages held for borrowers.
    #[schema(value_type = schema::Size)]
    pub used: Bytes,
    /// S_u: swapped out to borrowed devices.
    #[schema(value_type = schema::Size)]
    pub swap_used: Bytes,
    /// T_upper x M_t: the host borrows if its use is above it.
    #[schema(value_type = schema::Size)]
    pub upper: Bytes,
    /// T_lower x M_t: the host gives memory back if its use, with swap, is below it.
    #[schema(value_type = schema::Size)]
    pub lower: Bytes,
    /// M_s, eq. 1 or 2 of the paper.
    #[schema(value_type = schema::Size)]
    pub shareable: Bytes,
    /// The bytes that the host would grant now: M_s less the promised bytes that are not stored
    /// yet. Lending alone never lifts M_u over T_upper.
    #[schema(value_type = schema::Size)]
    pub spare: Bytes,
    /// Whether tasks wait for memory, by PSI.
    pub pressure: bool,
}

/// The account of a host's memory, in bytes. Each byte of `total` is in exactly one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Ledger {
    /// M_t: the sum of the classes, if they do not exceed it.
    #[schema(value_type = schema::Size)]
    pub total: Bytes,
    /// What the kernel and programs other than VMs, regions and caches use. At least the part of
    /// `lend.reserved` that VMs, regions and caches leave.
    #[schema(value_type = schema::Size)]
    pub reserved: Bytes,
    /// The least memory of all VMs, and their reserves.
    #[schema(value_type = schema::Size)]
    pub vm_floor: Bytes,
    /// The memory of VMs above that.
    #[schema(value_type = schema::Size)]
    pub vm_elastic: Bytes,
    /// The local caches of regions, as large as they may become, and the pages that regions share.
    #[schema(value_type = schema::Size)]
    pub cache_floor: Bytes,
    /// The memory that groups save by sharing pages, and their caches of disks.
    #[schema(value_type = schema::Size)]
    pub group_surplus: Bytes,
    /// The capacity of leases, and of exports made by hand.
    #[schema(value_type = schema::Size)]
    pub lent: Bytes,
    /// The capacity of leases with second copies of other hosts' pages that go first.
    #[serde(default)]
    #[schema(value_type = schema::Size)]
    pub mirror: Bytes,
    /// All other memory.
    #[schema(value_type = schema::Size)]
    pub free: Bytes,
    /// The bytes by which the classes exceed `total`.
    #[schema(value_type = schema::Size)]
    pub overcommitted: Bytes,
}

impl Ledger {
    /// Returns whether each byte of the total is in exactly one class, as far as they fit.
    pub fn adds_up(&self) -> bool {
        let Self { total, reserved, vm_floor, vm_elastic, cache_floor, .. } = *self;
        let Self { group_surplus, lent, mirror, free, overcommitted, .. } = *self;
        let given = [group_surplus, lent, mirror, free];
        let classes = [reserved, vm_floor, vm_elastic, cache_floor].into_iter().chain(given);
        let sum: u128 = classes.map(|bytes| u128::from(bytes.0)).sum();
        sum == u128::from(total.0) + u128::from(overcommitted.0)
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

/// What a peer is to this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// The configuration names it.
    Listed,
    /// A host of the cluster that is up.
    Up,
    /// A host of the cluster that is down.
    Down,
    /// A host that left the cluster for good, less than a day ago.
    Left,
    /// A former peer, whose leases are on their way back.
    Former,
}

/// Another host.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Peer {
    /// The peer's name.
    #[schema(value_type = schema::Name)]
    pub host: HostName,
    /// The peer's address.
    pub address: String,
    /// What the peer is to this host.
    pub standing: Standing,
    /// Whether the peer can admit hosts to the cluster.
    #[serde(default)]
    pub admits: bool,
    /// The zone that the peer is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Name>)]
    pub zone: Option<Zone>,
    /// Seconds for which the standing has been known here. Absent for peers of the configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_s: Option<f64>,
    /// Seconds since the peer last answered. Absent if it never did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_s: Option<f64>,
    /// The bytes that the peer could spare by its last offer. Absent without an offer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Size>)]
    pub spare: Option<Bytes>,
    /// Seconds since that offer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spare_s: Option<f64>,
    /// Whether the peer answers, but refuses the requests of this host.
    #[serde(default)]
    pub refused: bool,
    /// The reason why the peer does not answer, or refuses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// An event that the operator should know of, outside the controller's decisions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Seconds since the epoch.
    pub at: f64,
    /// The kind of the event.
    pub kind: EventKind,
    /// The subject of the event: a host, a volume, a cgroup, a VM.
    pub who: String,
    /// One sentence.
    pub what: String,
}

/// A decision of the controller, with the numbers that led to it.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Decision {
    /// Seconds since the epoch.
    pub at: f64,
    /// One sentence.
    pub what: String,
    /// The hosts, leases, volumes, VMs and regions that it concerns, besides this host.
    #[serde(default)]
    pub about: Vec<Subject>,
}

/// A thing that a decision concerns.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct Subject {
    /// The kind of the thing.
    pub kind: SubjectKind,
    /// The name of a host, a VM, a region or a group, or the id of a lease or a volume.
    pub name: String,
}

/// The kind of a [`Subject`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SubjectKind {
    /// Another host.
    Host,
    /// A lease, given or held.
    Lease,
    /// A borrowed volume.
    Volume,
    /// A VM of the host.
    Vm,
    /// A region, of the host or of a borrower.
    Region,
    /// A group.
    Group,
}

/// A change of the host's role.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RoleChange {
    /// Seconds since the epoch.
    pub at: f64,
    /// The role before the change.
    pub from: Role,
    /// The role after the change.
    pub to: Role,
}
