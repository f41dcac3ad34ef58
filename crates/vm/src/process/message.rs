//! The record of a VM, its status, and the messages between a VM's supervisor and its clients.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use aquifer_page::{Bytes, RegionName};
use aquifer_region::process::RegionStatus;
use serde::{Deserialize, Serialize};

use crate::memory::{self, Ballooned, Limits, Reading, Resized, Share};
use crate::migrate::{HandedOver, Incoming, Link, MigrationReport, Order, Progress};
use crate::spec::VmSpec;

/// The origin of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// Aquifer started the VM, here or on the host that it came from.
    Started(Box<VmSpec>),
    /// Another program started the VM; Aquifer only resizes it.
    Adopted {
        /// The VM's monitor.
        qmp: PathBuf,
        /// The port to the agent in the guest, if the VM has one.
        agent: Option<PathBuf>,
    },
}

impl Origin {
    /// Returns whether a group's disk cache serves disks of the VM.
    pub(super) fn has_cached_disks(&self) -> bool {
        matches!(self, Self::Started(spec) if !spec.cached_disks.is_empty())
    }
}

/// The content of a VM's record file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub(super) origin: Origin,
    /// The definition from which the VM was started, or with which it arrived.
    #[serde(default)]
    pub(super) definition: Option<PathBuf>,
    /// QEMU's process, once it runs.
    pub(super) pid: Option<u32>,
    /// The NUMA node that it runs on, if one was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) node: Option<u32>,
    /// QEMU's exit status, if it failed.
    pub(super) ended: Option<String>,
    /// Set while the VM arrives from another host, which owns the VM until it hands it over.
    #[serde(default)]
    pub(super) incoming: Option<Incoming>,
    /// Set once the VM is handed over to another host.
    #[serde(default)]
    pub(super) handed_over: Option<HandedOver>,
    /// Set while the VM runs here and part of its memory is still at the source.
    #[serde(default)]
    pub(super) awaiting_source: Option<Link>,
    /// When the VM came from another host, in milliseconds since the epoch.
    #[serde(default)]
    pub(super) arrived_ms: Option<u64>,
}

impl Record {
    /// Makes the record of a VM of which only the origin is known.
    pub(super) fn new(origin: Origin) -> Self {
        Self {
            origin,
            definition: None,
            pid: None,
            node: None,
            ended: None,
            incoming: None,
            handed_over: None,
            awaiting_source: None,
            arrived_ms: None,
        }
    }

    /// Makes the record of a VM that is about to start or to arrive.
    pub(super) fn of(spec: &VmSpec, definition: Option<&Path>, incoming: Option<Incoming>) -> Self {
        let definition = definition.map(Path::to_owned);
        Self { definition, incoming, ..Self::new(Origin::Started(Box::new(spec.clone()))) }
    }
}

/// The state of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// QEMU has exited, for this reason.
    Ended(String),
    /// QEMU's name of the state: `running`, `paused`, `io-error`, …; also `starting` while the
    /// supervisor starts QEMU, and `unresponsive` while QEMU runs and does not answer.
    #[serde(untagged)]
    Qemu(String),
}

/// The status of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmStatus {
    /// Name of the VM.
    pub name: RegionName,
    /// Origin of the VM, with its specification.
    pub origin: Origin,
    /// The VM's share of the memory that this host has set aside, if that account lists it.
    pub share: Option<Share>,
    /// Limits of the VM's memory.
    pub limits: Limits,
    /// RAM of this host that the VM's memory takes.
    pub host: Bytes,
    /// State of the VM.
    pub state: State,
    /// QEMU's process.
    pub pid: Option<u32>,
    /// The NUMA node whose memory and processors the VM uses; none if the kernel chooses them.
    #[serde(default)]
    pub node: Option<u32>,
    /// Sockets and logs of the VM.
    #[serde(flatten)]
    pub access: Access,
    /// The VM's way from or to another host.
    #[serde(flatten)]
    pub transit: Transit,
    /// The VM's region; none if no engine serves it.
    pub region: Option<RegionStatus>,
}

/// The sockets and logs by which operators reach a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Access {
    /// A monitor (QMP) for other programs; of an adopted VM, the monitor by which it was adopted.
    pub qmp: PathBuf,
    /// The guest's serial port, a socket. An adopted VM has none here.
    pub serial: Option<PathBuf>,
    /// The log of the guest's serial port. An adopted VM has none here.
    pub console: Option<PathBuf>,
    /// QEMU's log; of an adopted VM, its supervisor's.
    pub log: PathBuf,
}

/// A VM's way from one host to another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transit {
    /// Set while the VM arrives and may still belong to the source.
    pub incoming: Option<Incoming>,
    /// Set if the VM belongs to another host.
    pub handed_over: Option<HandedOver>,
    /// Set while part of the VM's memory is still at the source.
    pub awaiting_source: Option<Link>,
}

/// The supervisor's one message to the process that started it: a JSON object on a line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub(super) enum Response {
    Started,
    /// The supervisor listens for the VM's arrival at this address.
    Awaits {
        address: SocketAddr,
    },
    Failed {
        error: String,
    },
}

/// A request to a supervisor's control socket, one a connection: a JSON object on a line. A client
/// that hangs up cancels a resize or a migration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub(super) enum Request {
    Migrate(Box<Order>),
    Resize(memory::Order),
    /// Asks for the state of the VM's memory.
    Reading,
    /// Asks for the balloon's size, after setting it to `target` if given.
    Balloon {
        target: Option<Bytes>,
    },
    /// Ends the supervision of an adopted VM.
    Release,
    /// Cancels the migration, if the VM is still here.
    Cancel,
}

/// An answer of the supervisor: one JSON object a line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub(super) enum Told {
    Progress(Progress),
    Moved(MigrationReport),
    /// The size of the VM's memory so far.
    Has {
        size: Bytes,
    },
    Resized(Box<Resized>),
    Reading(Reading),
    Balloon(Ballooned),
    Cancelled,
    Failed {
        error: String,
    },
}
