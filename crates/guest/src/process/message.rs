use std::net::SocketAddr;
use std::path::PathBuf;

use aquifer_page::{Bytes, RegionName};
use aquifer_region::process::Status as RegionStatus;
use serde::{Deserialize, Serialize};

use crate::memory::{self, Ballooned, Limits, Reading, Resized, Share};
use crate::migrate::{Awaited, Given, Link, Order, Progress, Report};
use crate::spec::VmSpec;

/// Where a VM is from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// It was started here, or on the host that it came from.
    Started(Box<VmSpec>),
    /// Somebody else has started it, and it is only resized.
    Adopted {
        /// Its monitor.
        qmp: PathBuf,
        /// Its port for the agent inside it, if it has one.
        agent: Option<PathBuf>,
    },
}

/// What is on file of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub(super) origin: Origin,
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
    /// Of a VM that nothing is known of yet but where it is from.
    pub(super) fn new(origin: Origin) -> Self {
        Self { origin, pid: None, ended: None, awaited: None, given: None, coming: None }
    }

    /// Of a VM that is about to be started, or to come.
    pub(super) fn of(spec: &VmSpec, awaited: Option<Awaited>) -> Self {
        Self { awaited, ..Self::new(Origin::Started(Box::new(spec.clone()))) }
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
    /// Its name.
    pub name: RegionName,
    /// Where it is from, and what it was made with.
    pub origin: Origin,
    /// What it has of the memory that this host has set aside, where that is kept account of.
    pub share: Option<Share>,
    /// What it is kept within.
    pub limits: Limits,
    /// RAM of this host that its memory takes.
    pub host: Bytes,
    /// How it is.
    pub state: State,
    /// QEMU's process.
    pub pid: Option<u32>,
    /// A monitor (QMP) for any program; of an adopted VM the one by which it was adopted.
    pub qmp: PathBuf,
    /// The guest's serial port, a socket; nothing of an adopted VM, whose owner knows where it is.
    pub serial: Option<PathBuf>,
    /// What the guest has said there; nothing of an adopted VM.
    pub console: Option<PathBuf>,
    /// What QEMU has to say; of an adopted VM what its keeper has to say.
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
    Resize(memory::Order),
    /// How its memory is.
    Reading,
    /// What its balloon leaves it; first, if that is said, it is to leave it so much.
    Balloon {
        target: Option<Bytes>,
    },
    /// An adopted VM is not to be kept any more.
    Release,
    /// The VM is to stay, if it is still here.
    Cancel,
}

/// What it answers: a line for each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
pub(super) enum Told {
    Progress(Progress),
    Moved(Report),
    /// It has so much memory by now.
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
