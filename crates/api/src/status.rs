//! The state that an agent reports.

use std::fmt;

use aquifer_page::{Bytes, Group, HostName, LeaseId, VolumeId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::schema;

/// The three roles of the paper (Sharing, Fig. 3). There is no direct way between borrower and lender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Neither borrows nor lends.
    Neutral,
    /// Holds leases of others.
    Borrower,
    /// Has granted leases.
    Lender,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Neutral => "neutral",
            Self::Borrower => "borrower",
            Self::Lender => "lender",
        })
    }
}

/// Everything about one host, as its agent sees it.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// The host.
    #[schema(value_type = schema::Name)]
    pub host: HostName,
    /// The agent's process.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// Seconds since the agent started.
    pub uptime_s: f64,
    /// The role now.
    pub role: Role,
    /// Its memory at the last reading.
    pub memory: Memory,
    /// Leases that it has granted.
    pub lent: Vec<Lent>,
    /// Volumes that it has borrowed.
    pub borrowed: Vec<Volume>,
    /// Its peers, as last heard of.
    pub peers: Vec<Peer>,
    /// The latest decisions, oldest first.
    pub decisions: Vec<Decision>,
    /// What happened to pages, lenders, programs and VMs, oldest first.
    #[serde(default)]
    pub events: Vec<Event>,
    /// The latest changes of the role, oldest first.
    pub role_changes: Vec<RoleChange>,
    /// Seconds between two readings.
    pub period_s: f64,
}

/// One reading of memory, in the paper's terms (its Table 1), all in bytes.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Memory {
    /// Where it was read: `host`, or the path of a cgroup.
    pub source: String,
    /// M_t: all there is.
    #[schema(value_type = schema::Size)]
    pub total: Bytes,
    /// M_u: used, without buffers, page cache and slabs; with the pages held for borrowers.
    #[schema(value_type = schema::Size)]
    pub used: Bytes,
    /// S_u: swapped out to borrowed devices.
    #[schema(value_type = schema::Size)]
    pub swap_used: Bytes,
    /// T_upper x M_t: above it the host borrows.
    #[schema(value_type = schema::Size)]
    pub upper: Bytes,
    /// T_lower x M_t: below it (swap included) the host returns.
    #[schema(value_type = schema::Size)]
    pub lower: Bytes,
    /// M_s, eq. 1 or 2 of the paper.
    #[schema(value_type = schema::Size)]
    pub shareable: Bytes,
    /// What would be granted now: M_s less what is promised and not yet stored, and never so much that lending alone
    /// would lift M_u over T_upper.
    #[schema(value_type = schema::Size)]
    pub spare: Bytes,
    /// PSI says that tasks wait for memory.
    pub pressure: bool,
}

/// A lease that this host has granted.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Lent {
    /// The lease.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
    /// Who holds it.
    #[schema(value_type = schema::Name)]
    pub borrower: HostName,
    /// The tenant to whom it is accounted.
    #[schema(value_type = schema::Name)]
    pub group: Group,
    /// What is promised.
    #[schema(value_type = schema::Size)]
    pub capacity: Bytes,
    /// RAM that its pages take now.
    #[schema(value_type = schema::Size)]
    pub stored: Bytes,
    /// Open connections; not known where the kernel serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<u32>,
    /// `opening`, `offered` (the borrower has not shown that it knows), `held`, `asked back` (mem_len_fin), or `freeing`.
    #[schema(value_type = schema::LentState)]
    pub state: String,
    /// Seconds since the borrower was last heard of.
    pub silent_s: f64,
}

/// A volume that this host has borrowed.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// The volume.
    #[schema(value_type = schema::Id)]
    pub volume: VolumeId,
    /// The process that serves it; none where the kernel itself reaches the lender.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Its block device.
    pub device: String,
    /// How it is attached: `ublk`, `nbd` or `fuse-loop`; directly: `nvme-tcp` or `nvme-rdma`.
    pub backend: String,
    /// Its size.
    #[schema(value_type = schema::Size)]
    pub capacity: Bytes,
    /// Swapped out to it now.
    #[schema(value_type = schema::Size)]
    pub swap_used: Bytes,
    /// In the local spill file, because no lender had room.
    #[schema(value_type = schema::Size)]
    pub spilled: Bytes,
    /// What it stands on.
    pub leases: Vec<Held>,
    /// The last error on its page path, naming lender, lease and page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// A lease that this host holds.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Held {
    /// The lease.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
    /// Who granted it.
    #[schema(value_type = schema::Name)]
    pub lender: HostName,
    /// What is promised.
    #[schema(value_type = schema::Size)]
    pub capacity: Bytes,
    /// Extents of the volume that lie on it, in bytes.
    #[schema(value_type = schema::Size)]
    pub placed: Bytes,
    /// How it is, in words: `ok`, `unreachable for 3s`, `moving 3 of 12 extents`.
    pub state: String,
    /// The same for programs.
    #[serde(default)]
    pub health: LeaseHealth,
}

/// How a lease is that this host holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LeaseHealth {
    /// In use.
    #[default]
    Ok,
    /// In use, but its lender has no room for more.
    Full,
    /// Its lender does not answer.
    Unreachable,
    /// Its lender does not have what was stored there. Nothing new goes there.
    Lost,
    /// What is there is moving elsewhere.
    Moving,
}

/// A peer from the configuration.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Peer {
    /// Its name.
    #[schema(value_type = schema::Name)]
    pub host: HostName,
    /// Its address.
    pub address: String,
    /// Whether the configuration names it; else it is a former peer, and leases are on their way back.
    #[serde(default = "yes")]
    pub listed: bool,
    /// Seconds since it last answered; nothing if it never did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_s: Option<f64>,
    /// What it last said it could spare; nothing if it has not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Size>)]
    pub spare: Option<Bytes>,
    /// Seconds since it said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spare_s: Option<f64>,
    /// Whether it answers, but refuses what this host asks.
    #[serde(default)]
    pub refused: bool,
    /// Why it does not answer, or refuses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

fn yes() -> bool {
    true
}

/// Something that an operator should know of, and that nobody decided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Seconds since the epoch.
    pub at: f64,
    /// What kind of thing it is.
    pub kind: EventKind,
    /// What it happened to: a host, a volume, a cgroup, a VM.
    pub who: String,
    /// One sentence.
    pub what: String,
}

/// What kind of thing an [`Event`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A lender does not answer.
    LenderLost,
    /// A lender that did not answer does again.
    LenderBack,
    /// A page could not be read or written.
    PageUnreachable,
    /// A lender has lost a lease that this host holds, with its pages.
    LeaseLost,
    /// A borrower has lost a lease of this host, with its pages: it was silent for too long, or the agent was forced to stop.
    BorrowerLost,
    /// Pages went to the local spill file, because no lender had room.
    Spill,
    /// Pages came back from the spill file.
    SpillBack,
    /// The kernel killed a program for lack of memory.
    OomKill,
    /// A VM ended.
    VmEnded,
    /// Another host has this host's name, or peers call this host where it is not.
    NameTaken,
    /// What is lent is asked back, or all of it is back.
    Drain,
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::LenderLost => "lender lost",
            Self::LenderBack => "lender back",
            Self::PageUnreachable => "page unreachable",
            Self::LeaseLost => "lease lost",
            Self::BorrowerLost => "borrower lost",
            Self::Spill => "spill",
            Self::SpillBack => "spill back",
            Self::OomKill => "oom kill",
            Self::VmEnded => "vm ended",
            Self::NameTaken => "name taken",
            Self::Drain => "drain",
        })
    }
}

/// A decision of the controller, with the numbers that led to it.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Decision {
    /// Seconds since the epoch.
    pub at: f64,
    /// One sentence.
    pub what: String,
}

/// The host had one role and has another now.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RoleChange {
    /// Seconds since the epoch.
    pub at: f64,
    /// The role that it had.
    pub from: Role,
    /// The role that it has since.
    pub to: Role,
}
