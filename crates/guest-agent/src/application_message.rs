//! The messages between applications and their guest's agent over a unix socket: one JSON object a
//! line, in both directions.

use std::time::Duration;

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use crate::message::GuestReport;

/// The agent's default socket.
pub const SOCKET: &str = "/run/aquifer-guest.sock";

/// How much longer than the host's timeout an application waits for the agent, which reports a
/// silent host by itself.
pub(crate) const LENIENCE: Duration = Duration::from_secs(5);

/// A request of an application. A connection can carry any number, one at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub(crate) enum Ask {
    /// Grows the guest by `bytes`, or shrinks it if negative.
    Resize {
        bytes: i64,
        timeout_ms: u64,
        #[serde(default)]
        why: String,
    },
    Show,
}

impl Ask {
    /// Returns the request's name for messages.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Resize { .. } => "resize",
            Self::Show => "show",
        }
    }
}

/// The agent's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "tell", rename_all = "snake_case")]
pub(crate) enum Tell {
    Granted(Granted),
    Shown(GuestStatus),
    Failed { reason: Reason, error: String },
}

/// The reason of a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reason {
    HostAway,
    NoAnswer,
    #[serde(other)]
    Other,
}

/// The outcome of a request for memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Granted {
    /// Bytes by which the guest has grown or, if negative, shrunk.
    pub granted: i64,
    /// The guest's size after the request.
    pub size: Bytes,
    /// The part of the request that was not granted.
    pub missing: Bytes,
    /// Why that part is missing.
    pub why: Option<String>,
}

/// The agent's view of the guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GuestStatus {
    /// Whether the host is connected.
    pub connected: bool,
    /// Period of the reports to the host, in ms; `None` without reports.
    pub period_ms: Option<u64>,
    /// Available memory below which the agent asks for more by itself; zero if the host has not
    /// said.
    pub urgent_below: Bytes,
    /// Whether the agent asks for more when tasks stall: the kernel has PSI and lets the agent use
    /// it.
    pub watches_pressure: bool,
    /// Number of requests without an answer.
    pub pending: usize,
    /// The guest's figures.
    pub report: GuestReport,
}
