//! The state that an agent reports.

mod loans;

pub use aquifer_control::node::EventKind;
pub use aquifer_control::{LoanState, Role};
use aquifer_page::{Bytes, Group, HostName, Zone};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use self::loans::{
    AtRisk, DiskCopy, Held, LeaseHealth, LeaseTraffic, LendingLink, Lent, Loans, Region,
    SecondCopy, Volume,
};
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
