use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use aquifer_page::{Bytes, HostName, MigrationId};
use aquifer_region::handover::Frame;
use aquifer_region::process::RegionSpec;
use serde::{Deserialize, Serialize};

use crate::memory::Limits;
use crate::spec::VmSpec;

/// How a VM's memory goes over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// What is dirty in the cache goes to the pool while the VM runs, what is dirty still when it stands still to the other host, and what was
    /// used most is fetched there from the pool.
    #[default]
    Instant,
    /// What is in the cache goes to the other host while the VM runs, round by round (Migration, section 3.3).
    PreCopy,
    /// The VM runs there first, and what is dirty in the cache comes after it: what it waits for before all else.
    PostCopy,
}

/// A VM that comes from another host, as that offers it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Arrival {
    /// This attempt.
    pub migration: MigrationId,
    /// What the VM is like.
    pub vm: VmSpec,
    /// What its memory is like.
    pub memory: RegionSpec,
    /// What that is kept within.
    pub limits: Limits,
}

/// Where and how an arrival is waited for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Awaited {
    /// This attempt.
    pub migration: MigrationId,
    /// The host that it must come from.
    pub from: HostName,
    /// The address to listen at.
    pub listen: IpAddr,
    /// Directory of this host's certificate.
    pub identity: PathBuf,
    /// All has come, and only the other host's word is missing.
    pub prepared: bool,
    /// By which way comes what was left behind of its memory, if something was.
    #[serde(default)]
    pub left: Option<Link>,
}

/// An order to move a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// This attempt.
    pub migration: MigrationId,
    /// The host that it is to move to.
    pub to: HostName,
    /// Where the VM is waited for there.
    pub address: SocketAddr,
    /// Directory of this host's certificate.
    pub identity: PathBuf,
    /// How.
    pub mode: Mode,
    /// Bytes a second that may be sent at most.
    pub bandwidth: Option<Bytes>,
    /// For how long the VM may stand still at most, as far as that can be foreseen.
    pub max_downtime: Duration,
    /// Whether to go on as by [`Mode::PostCopy`] where that would be exceeded.
    pub may_leave: bool,
}

/// That a VM was given away.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Given {
    /// The attempt.
    pub migration: MigrationId,
    /// Whose it is.
    pub to: HostName,
    /// Where that host asks for what it has not of the VM's memory.
    #[serde(default)]
    pub left: Option<Link>,
}

/// The way to the other host, or from it, by which what was left behind of a VM's memory goes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// The attempt.
    pub migration: MigrationId,
    /// The other host.
    pub host: HostName,
    /// Where the VM is, or is now.
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

/// What a move has come to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// From the order until the VM ran there, in milliseconds.
    pub total_ms: f64,
    /// Of that, for how long it stood still.
    pub downtime_ms: f64,
    /// Contents of pages that were sent to the other host.
    pub bytes_pages: u64,
    /// Contents of pages that were written to the pool.
    pub bytes_pool: u64,
    /// All else that was sent to the other host.
    pub bytes_metadata: u64,
    /// Rounds, the last one included.
    pub rounds: u32,
    /// How.
    pub mode: Mode,
    /// Pages in the local cache when the move began.
    pub resident_pages: u64,
    /// Of these, dirty.
    pub dirty_pages: u64,
    /// Pages of the last round.
    pub last_pages: u64,
    /// Pages that were left behind, and came when the VM ran there.
    pub left_pages: u64,
}

/// How far a move is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// What is being done.
    pub phase: String,
    /// Rounds that are over.
    pub rounds: u32,
    /// Sent to the other host so far.
    pub bytes_sent: u64,
    /// Written to the pool so far.
    pub bytes_pool: u64,
    /// Pages of the round before.
    pub pages: u64,
    /// Bytes a second that programs in the VM make dirty, in the round before.
    pub dirty_rate: u64,
    /// Milliseconds since it began.
    pub elapsed_ms: f64,
    /// Milliseconds until it may be over, as the rounds before have it; nothing as long as they do not get smaller.
    pub remaining_ms: Option<f64>,
}

/// What the keepers of a VM on two hosts say to each other; data belongs to some.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// To the new host, first on every connection. Its data is the source's [`Cpu`](super::cpu::Cpu) as JSON, where the destination's is to offer as much.
    /// Answered with `Done`.
    Hello { migration: MigrationId, qemu: String },
    /// There is nothing to say just now.
    Alive,
    /// For the engine there. `Frame::Sync` is answered with `Done`.
    Engine(Frame),
    /// Some of the state of the VM's devices.
    Device,
    /// That was all of it. Answered with `Done` when it is loaded and all is there that the VM needs; before that what was left behind may be asked for.
    Prepare { leaves: bool },
    /// The VM is yours. Answered with `Done` when it runs, if it is to. What was left behind is asked for then, and last of all comes `Done`.
    Own { runs: bool },
    /// The VM stays; forget it.
    Drop,
    /// To the old host: it is done.
    Done,
    /// To the old host: it will not be done.
    Failed(String),
}
