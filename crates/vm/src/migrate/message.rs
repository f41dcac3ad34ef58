//! The orders, records and messages of a migration.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use aquifer_page::{Bytes, HostName, MigrationId};
use aquifer_region::handover::Frame;
use aquifer_region::process::RegionSpec;
use serde::{Deserialize, Serialize};

use super::cpu::Cpu;
use crate::memory::Limits;
use crate::spec::VmSpec;

/// The algorithm that moves a VM's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Writes dirty pages back to the pool while the VM runs, and sends the rest to the destination
    /// during the downtime. The destination fetches the hottest pages from the pool.
    #[default]
    Instant,
    /// Sends the pages of the cache to the destination while the VM runs, round by round (\[Jo20\],
    /// section 3.3).
    PreCopy,
    /// Starts the VM at the destination, and sends the cache's dirty pages after it. Pages that the
    /// VM waits for come first.
    PostCopy,
}

/// A VM that moves here, as the source offers it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Arrival {
    /// Id of this attempt.
    pub migration: MigrationId,
    /// The VM's specification.
    pub vm: VmSpec,
    /// The specification of the VM's region.
    pub memory: RegionSpec,
    /// The present size of the VM's memory.
    pub size: Bytes,
    /// The limits of the VM's memory.
    pub limits: Limits,
    /// The processor whose features the guest uses, if it uses all of its host's. An older release
    /// sends none.
    #[serde(default)]
    pub cpu: Option<Cpu>,
    /// The text of the VM's definition, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub definition: Option<String>,
}

impl Arrival {
    /// Returns the RAM that the destination promises: the cache, or the present size of a VM whose
    /// cache the agent sizes, if that is less.
    pub fn room(&self) -> Bytes {
        let RegionSpec { cache, auto, .. } = self.memory;
        if auto { cache.min(self.size) } else { cache }
    }
}

/// The arrival that a destination waits for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Incoming {
    /// Id of this attempt.
    pub migration: MigrationId,
    /// The source, which must be the peer.
    pub from: HostName,
    /// The address to listen at.
    pub listen: IpAddr,
    /// Directory of this host's certificate.
    pub identity: PathBuf,
    /// Whether everything has arrived, and only the source's hand-over is missing.
    pub prepared: bool,
    /// The link to the memory that was left behind, if any was.
    #[serde(default)]
    pub left_at_source: Option<Link>,
    /// The processor that the destination must match, until it does.
    #[serde(default)]
    pub cpu: Option<Cpu>,
}

/// An order to migrate a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// Id of this attempt.
    pub migration: MigrationId,
    /// The destination.
    pub to: HostName,
    /// The address at which the destination waits for the VM.
    pub address: SocketAddr,
    /// Directory of this host's certificate.
    pub identity: PathBuf,
    /// The algorithm.
    pub mode: Mode,
    /// Limit of the bandwidth, in bytes a second.
    pub bandwidth: Option<Bytes>,
    /// Limit of the downtime, as far as it can be predicted.
    pub max_downtime: Duration,
    /// Whether to switch to [`Mode::PostCopy`] if the downtime would exceed that limit.
    pub may_leave: bool,
    /// Whether the destination has the VM's definition.
    #[serde(default)]
    pub defined: bool,
}

/// The record that a VM was handed over.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HandedOver {
    /// Id of the attempt.
    pub migration: MigrationId,
    /// The destination, which owns the VM.
    pub to: HostName,
    /// The link by which the destination asks for the memory that was left behind.
    #[serde(default)]
    pub left_at_source: Option<Link>,
    /// Whether the destination has the VM's definition, so that this host need not keep it.
    #[serde(default)]
    pub defined: bool,
}

/// A link between two hosts for the memory that was left behind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Id of the attempt.
    pub migration: MigrationId,
    /// The other host.
    pub host: HostName,
    /// The destination's address.
    pub address: SocketAddr,
    /// Directory of this host's certificate.
    pub identity: PathBuf,
}

impl Order {
    pub(super) fn link(&self) -> Link {
        Link {
            migration: self.migration,
            host: self.to.clone(),
            address: self.address,
            identity: self.identity.clone(),
        }
    }
}

/// The outcome of a migration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MigrationReport {
    /// From the order until the VM runs at the destination, in milliseconds. With post-copy, until
    /// the last page has arrived.
    pub total_ms: f64,
    /// The downtime within that, in milliseconds.
    pub downtime_ms: f64,
    /// Bytes of pages sent to the destination.
    pub bytes_pages: u64,
    /// Bytes of pages written to the pool.
    pub bytes_pool: u64,
    /// Bytes of everything else sent to the destination.
    pub bytes_metadata: u64,
    /// Number of rounds, including the last one.
    pub rounds: u32,
    /// The algorithm that was used.
    pub mode: Mode,
    /// Pages in the local cache at the start.
    pub resident_pages: u64,
    /// Dirty pages among those.
    pub dirty_pages: u64,
    /// Pages of the last round.
    pub last_pages: u64,
    /// Pages that were left behind, and sent while the VM ran at the destination.
    pub left_pages: u64,
}

/// The progress of a migration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The current phase.
    pub phase: String,
    /// Rounds that are over.
    pub rounds: u32,
    /// Bytes sent to the destination so far.
    pub bytes_sent: u64,
    /// Bytes written to the pool so far.
    pub bytes_pool: u64,
    /// Pages of the previous round.
    pub pages: u64,
    /// Bytes a second that the VM dirtied in the previous round.
    pub dirty_rate: u64,
    /// Milliseconds since the start.
    pub elapsed_ms: f64,
    /// Estimate of the milliseconds left, from the previous rounds; none while rounds do not get
    /// smaller.
    pub remaining_ms: Option<f64>,
}

/// A message between the supervisors of a VM on two hosts. Some carry data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// The source's first message on every connection, with whether the VM runs. The message's data
    /// is the source's [`Cpu`] as JSON, if the destination must offer its features. Answered with
    /// `Done`.
    Hello {
        migration: MigrationId,
        qemu: String,
        #[serde(default)]
        runs: bool,
    },
    /// Keeps the connection from timing out.
    Alive,
    /// A frame for the destination's engine. `Frame::Sync` is answered with `Done`.
    Engine(Frame),
    /// A chunk of device state.
    Device,
    /// The end of device state. Until QEMU has loaded it, the destination may ask for pages left
    /// behind. Answered with `Done` once it is loaded.
    Prepare { leaves: bool },
    /// Hands the VM over. The destination answers with `Done` once the VM runs, if it is to run.
    /// The destination asks for pages left behind meanwhile and afterwards, and ends with another
    /// `Done`.
    CommitOwnership { runs: bool },
    /// Tells the destination to forget the VM, which stays at the source.
    Drop,
    /// Success, sent to the source.
    Done,
    /// Failure, sent to the source.
    Failed(String),
}
