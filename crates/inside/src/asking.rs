//! What applications and the agent of their guest say to each other, over a unix socket: one JSON object a line, both ways.

use std::time::Duration;

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use crate::message::Report;

/// Where an agent listens if it was not told otherwise.
pub const SOCKET: &str = "/run/aquifer-guest.sock";

/// For how much longer than their patience applications wait for an agent: it says so itself if the host does not answer.
pub(crate) const LENIENCE: Duration = Duration::from_secs(5);

/// What an application wants; any number of times a connection, one at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub(crate) enum Ask {
    /// The guest is to be larger by so many bytes, or if negative, smaller.
    Resize {
        bytes: i64,
        patience_ms: u64,
        #[serde(default)]
        why: String,
    },
    Show,
}

impl Ask {
    /// What it is called in messages.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Resize { .. } => "resize",
            Self::Show => "show",
        }
    }
}

/// What the agent answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "tell", rename_all = "snake_case")]
pub(crate) enum Tell {
    Granted(Granted),
    Shown(Status),
    Failed { reason: Reason, error: String },
}

/// Why nothing came of what was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reason {
    HostAway,
    NoAnswer,
    #[serde(other)]
    Other,
}

/// What came of a request for memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Granted {
    /// Bytes by which the guest is larger now, or if negative, smaller.
    pub granted: i64,
    /// What the guest has now.
    pub size: Bytes,
    /// What is missing of what was asked for.
    pub missing: Bytes,
    /// Why it is missing.
    pub why: Option<String>,
}

/// A guest as its agent sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Whether its host is connected.
    pub connected: bool,
    /// How often it reports to the host, if it does.
    pub period_ms: Option<u64>,
    /// The available memory under which it asks for more by itself; zero if its host has not said.
    pub urgent_below: Bytes,
    /// Whether it asks for more when its tasks wait for memory: its kernel has PSI and lets the agent use it.
    pub watches_pressure: bool,
    /// Requests that have no answer yet.
    pub pending: usize,
    /// Its figures.
    pub report: Report,
}
