//! The messages between agents, and between the command line and its agent: JSON over HTTP/1.1.
//!
//! Between hosts, messages travel over mutual TLS, and the caller is the host that its certificate
//! names. On a host, they travel over the agent's unix socket. [`message`] holds the five messages
//! of \[Ge23\], [`status`] the state that an agent reports, and [`order`] the orders of an
//! operator. [`group`] holds the groups of a host, [`cluster`] what hosts tell each other of their
//! memory, [`agreement`] what they tell each other of groups, and [`client`] the client for all.

pub mod agreement;
pub mod client;
pub mod cluster;
pub mod group;
pub mod message;
pub mod order;
pub mod path;
pub mod schema;
pub mod status;

pub use aquifer_control::node::{Problem, Threshold};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The body of an answer without content: the order is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Done {}
