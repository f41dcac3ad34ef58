use std::path::PathBuf;

use aquifer_region::process::Status as RegionStatus;
use serde::{Deserialize, Serialize};

use crate::spec::VmSpec;

/// What is on file of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub(super) spec: VmSpec,
    /// QEMU's process, once there is one.
    pub(super) pid: Option<u32>,
    /// How QEMU has ended, if not in order.
    pub(super) ended: Option<String>,
}

/// How a VM is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// QEMU has ended, and how.
    Ended(String),
    /// As QEMU calls it: `running`, `paused`, `io-error`, …; `starting` before it can be asked.
    #[serde(untagged)]
    Qemu(String),
}

/// Everything about a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// What it was made with.
    pub spec: VmSpec,
    /// How it is.
    pub state: State,
    /// QEMU's process.
    pub pid: Option<u32>,
    /// A monitor (QMP) for whoever wants one.
    pub qmp: PathBuf,
    /// The guest's serial port, a socket.
    pub serial: PathBuf,
    /// What the guest has said there.
    pub console: PathBuf,
    /// What QEMU has to say.
    pub log: PathBuf,
    /// Its memory; nothing if no engine serves it.
    pub region: Option<RegionStatus>,
}

/// What a keeper says to who started it: one JSON object, one line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub(super) enum Response {
    Started,
    Failed { error: String },
}
