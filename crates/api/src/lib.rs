//! What agents and the command line say to each other: JSON over HTTP/1.1.
//!
//! Between hosts it runs over mutual TLS and the caller is the host its certificate names; on a host it runs over the
//! agent's unix socket. [`message`] holds the paper's five messages, [`status`] what an agent tells of itself,
//! [`order`] what an operator may ask of it, [`group`] the groups of its host, [`client`] the way to all of them.

pub mod client;
pub mod group;
pub mod message;
pub mod order;
pub mod path;
pub mod schema;
pub mod status;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// What failed and why, naming the thing.
    pub error: String,
    /// What the reader can do about it, where there is something.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
}

/// The body of an answer that has nothing to tell but "done".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Done {}
