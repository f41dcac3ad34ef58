use std::net::SocketAddr;
use std::path::PathBuf;

use aquifer_region::process::Status as RegionStatus;
use serde::{Deserialize, Serialize};

use crate::migrate::{Awaited, Given, Link, Order, Progress, Report};
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
    /// It comes from another host, and is that host's until it says otherwise.
    #[serde(default)]
    pub(super) awaited: Option<Awaited>,
    /// It is another host's now.
    #[serde(default)]
    pub(super) given: Option<Given>,
    /// It is here, and what was left behind of its memory comes by this.
    #[serde(default)]
    pub(super) coming: Option<Link>,
}

impl Record {
    /// Of a VM that is about to be started, or to come.
    pub(super) fn of(spec: &VmSpec, awaited: Option<Awaited>) -> Self {
        Self { spec: spec.clone(), pid: None, ended: None, awaited, given: None, coming: None }
    }
}

/// How a VM is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// QEMU has ended, and how.
    Ended(String),
    /// As QEMU calls it: `running`, `paused`, `io-error`, …; `starting` before it can be asked, `unresponsive` where it does not answer.
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
    /// Where it comes from, if it is that host's still.
    pub awaited: Option<Awaited>,
    /// Whose it is now, if not this host's.
    pub given: Option<Given>,
    /// Where what comes from that is not here yet of its memory, if something is not.
    pub coming: Option<Link>,
    /// Its memory; nothing if no engine serves it.
    pub region: Option<RegionStatus>,
}

/// What a keeper says to who started it: one JSON object, one line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub(super) enum Response {
    Started,
    /// The VM can come, to this address.
    Awaits {
        address: SocketAddr,
    },
    Failed {
        error: String,
    },
}

/// What a keeper is asked by its socket, one a connection: a JSON object, one line. Who hangs up does not want it any more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub(super) enum Request {
    Migrate(Box<Order>),
    /// The VM is to stay, if it is still here.
    Cancel,
}

/// What it answers: a line for each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub(super) enum Told {
    Progress(Progress),
    Moved(Report),
    Cancelled,
    Failed { error: String },
}
