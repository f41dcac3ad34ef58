//! The messages between a program and its engine: one message a packet, in postcard.

use aquifer_page::FrameIndex;
use serde::{Deserialize, Serialize};

/// Version of the messages. The engine refuses a program of another version.
pub const VERSION: u32 = 4;

/// Consecutive pages of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The number of the first page, counted from 0.
    pub first: u64,
    /// The number of pages.
    pub count: u64,
}

/// A request from a program to its engine. `Attach` is the first message on a connection of its
/// own, on which the engine sends [`Order`]s back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Adopt a mapping. The packet carries two userfaultfds: one for the mapping, and one that
    /// guards shared pages.
    Attach(Attach),
    /// Discard the pages: they read as zeroes from the reply on.
    Discard(Run),
    /// The program is about to unmap pages. After its reply the engine puts nothing there, as
    /// another mapping may take these addresses.
    Release(Release),
}

/// A mapping, as its program sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// The program's [`VERSION`].
    pub version: u32,
    /// The address in the program.
    pub address: u64,
    /// The pages of the region that the program mapped at the address.
    pub pages: Run,
    /// The pages of the mapping that are still mapped.
    pub live: Vec<Run>,
    /// Whether the mapping's faults come to the first userfaultfd.
    pub watched: bool,
}

/// Pages that a program is about to unmap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// The address of the mapping, as the program attached it.
    pub address: u64,
    /// The pages.
    pub pages: Run,
}

/// An answer from the engine or, to an [`Order`], from the program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The request is complete.
    Done,
    /// To an unwatched mapping: the engine serves only watched ones. The program watches the
    /// mapping and attaches it again.
    Watch,
    /// The request failed, for this reason.
    Refused(String),
    /// The order is complete except for these pages, which the program wrote to meanwhile. They are
    /// in the region's file again.
    DoneBut(Vec<Run>),
}

/// An order from the engine to a program. The program answers [`Reply::Done`], to `Share` also
/// [`Reply::DoneBut`], or [`Reply::Refused`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Watch the mapping: from the answer on, its faults come to its userfaultfd.
    Watch,
    /// Unmap these pages of the region, so that the next touch faults.
    Unmap(Vec<Run>),
    /// Map equal pages of another file in the place of these pages, none of which is in the page
    /// table. The kernel then holds each write to them and reports it as a fault. The packet
    /// carries that file and the region's.
    Share(Vec<Shared>),
    /// Map these pages from the region's file again, in the place of shared pages. The packet
    /// carries the region's file.
    Restore(Vec<Run>),
}

/// Consecutive pages of the region that map consecutive pages of another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shared {
    /// The pages of the region.
    pub pages: Run,
    /// The first page in the other file.
    pub frame: FrameIndex,
}

impl Run {
    /// Returns the page after the last.
    pub fn end(&self) -> u64 {
        self.first + self.count
    }
}
