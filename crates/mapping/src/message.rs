//! What program and engine say to each other: one message a packet, in postcard.

use serde::{Deserialize, Serialize};

/// Of these messages; who does not speak this one is refused.
pub const VERSION: u32 = 1;

/// Pages of a region that follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The first of them, from 0.
    pub first: u64,
    /// How many.
    pub count: u64,
}

/// What a program asks of the engine. `Attach` comes first on a connection of its own, on which [`Order`]s come back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Take care of a mapping; its userfaultfd comes with the packet.
    Attach(Attach),
    /// The pages' contents are not needed any more: they read as zeroes from now on.
    Discard(Run),
}

/// A mapping, as its program sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// [`VERSION`].
    pub version: u32,
    /// The address in the program.
    pub address: u64,
    /// Which pages of the region are there.
    pub pages: Run,
}

/// What the engine answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// It is done.
    Done,
    /// It will not be done.
    Refused(String),
}

/// What the engine asks of a program; answered with [`Reply::Done`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Unmap these pages of the region: the next touch is a fault.
    Unmap(Vec<Run>),
}

impl Run {
    /// The page behind the last.
    pub fn end(&self) -> u64 {
        self.first + self.count
    }
}
