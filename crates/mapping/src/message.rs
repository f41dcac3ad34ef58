//! What program and engine say to each other: one message a packet, in postcard.

use serde::{Deserialize, Serialize};

/// Of these messages; who does not speak this one is refused.
pub const VERSION: u32 = 3;

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
    /// Take care of a mapping; two userfaultfds come with the packet: that of the mapping, and the one that guards what is shared.
    Attach(Attach),
    /// The pages' contents are not needed any more: they read as zeroes from now on.
    Discard(Run),
    /// The program is about to unmap pages. From the answer on, the engine puts nothing there: something else may be mapped at these
    /// addresses then.
    Release(Release),
}

/// A mapping, as its program sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// [`VERSION`].
    pub version: u32,
    /// The address in the program.
    pub address: u64,
    /// Which pages of the region were mapped there.
    pub pages: Run,
    /// Those of them that still are.
    pub live: Vec<Run>,
}

/// Pages that a program is about to unmap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// The address of the mapping, as it was attached.
    pub address: u64,
    /// The pages.
    pub pages: Run,
}

/// What the engine answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// It is done.
    Done,
    /// It will not be done.
    Refused(String),
    /// It is done, but for these pages, which were written to as it was being done: they are in the region's file again.
    DoneBut(Vec<Run>),
}

/// What the engine asks of a program; answered with [`Reply::Done`], and `Share` with [`Reply::DoneBut`], too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Unmap these pages of the region: the next touch is a fault.
    Unmap(Vec<Run>),
    /// Map pages of another file, which are equal, in the place of these, of which none is in the page table; a write to one is held, and
    /// told by a fault. With it come that file and the region's.
    Share(Vec<Shared>),
    /// Map these pages of the region again, in the place of what they share. With it comes the region's file.
    Restore(Vec<Run>),
}

/// Pages that are shared with others, as pages of another file that follow one another too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shared {
    /// Those of the region.
    pub pages: Run,
    /// The first of those in the other file, from 0.
    pub frame: u64,
}

impl Run {
    /// The page behind the last.
    pub fn end(&self) -> u64 {
        self.first + self.count
    }
}
