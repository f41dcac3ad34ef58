//! A client that asks to be connected to a lease, and the answer.

use std::fmt;

use crate::{ClientId, OwnerId};

/// A client that asks to be connected to a lease, as it describes itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visitor {
    /// The owner of the pages that the lease holds, or will hold.
    pub owner: OwnerId,
    /// The owner's name for operators.
    pub name: String,
    /// How often the owner has moved to another host. One client of each generation can be
    /// connected.
    pub generation: u32,
    /// Whether the owner has moved for good: the lease ends clients of earlier generations and
    /// admits no more of them.
    pub ends_older: bool,
    /// The client's process.
    pub client: ClientId,
    /// The client's epoch; it grows when one of its connections breaks.
    pub epoch: u64,
    /// Whether the claim outlives the connections, for as long as the lease stores anything.
    pub keeps: bool,
    /// Whether to take the lease from its present owner, which then loses its pages.
    pub takes_over: bool,
}

/// A reason why a visitor is not admitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The lease belongs to another owner.
    #[error("it belongs to {0}: use another export, end that use first, or take it over by force")]
    Claimed(String),
    /// A newer connection or process of the same owner has taken over.
    #[error("a newer connection of {0} has taken over")]
    Late(String),
    /// Older connections did not end within the timeout.
    #[error("older connections of {0} have not ended yet")]
    Busy(String),
    /// The claim could not be recorded.
    #[error("cannot record the claim: {0}")]
    Unrecorded(String),
}

/// A function that ends a connection: it wakes the connection's server, which then leaves.
pub type End = Box<dyn Fn() + Send + Sync>;

/// A visitor's connection to a lease; it ends when dropped.
pub type Stay = Box<dyn fmt::Debug + Send>;
