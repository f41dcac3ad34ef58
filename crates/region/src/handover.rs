//! What engines say to each other, by way of those who hand a region over to another host: one message after the other, each of the
//! lengths of its two parts (4 bytes each, little-endian), the message itself in postcard, and pages or states of pages as they are.

use std::io::{self, Read, Write};

use aquifer_mapping::Run;
use aquifer_page::LeaseId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Neither part of a message is longer.
const LONGEST: usize = 1 << 20;

/// Pages in one frame at most.
pub(crate) const PAGES: u64 = 64;

/// Pages of whose state one frame tells at most.
pub(crate) const STATES: u64 = 1 << 18;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Frame {
    /// To the engine that has the region: do a round. Frames for the other engine come back, and `Sent` behind them.
    Round(Round),
    /// That is all of this round.
    Sent(Sent),
    /// To the engine that has the region: it is the other host's from now on, also for an engine after this one.
    GiveAway,
    /// To the engine that has the region: tell which pages that the other does not have are used most. `Hot` comes back.
    TellHot,
    /// These pages, whose contents follow.
    Pages(Run),
    /// The other engine is to have these pages no more.
    Purge(Vec<Run>),
    /// What is known of the pages from this one on: four of them a byte, bit 0 of each that the volume has it, bit 1 that what the volume
    /// has is old; such a page that has not come was left behind.
    States(u64),
    /// Where the volume's extents are.
    Extents(Vec<Extent>),
    /// These are used most: to be fetched before they are asked for.
    Hot(Vec<Run>),
    /// Say when all before this is done.
    Sync,
    /// It is done.
    Done,
    /// It is not done, and will not be.
    Failed(String),
    /// To the engine that has the region: which of the pages that were left behind does it want? `Want` comes back: of those that are waited for, if
    /// not of all; `Done` when all have come.
    Next {
        /// Not only of those that are waited for.
        all: bool,
    },
    /// To the engine that had the region: these. `Pages` come back, and `Done` behind them.
    Want(Vec<Run>),
}

/// A round, by what goes over to the other engine, and what to the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Round {
    /// What is here and dirty (Migration, section 3.3): in the first round, all that is here. The program goes on.
    Copy,
    /// What is here and dirty goes to the volume, nothing to the other engine. The program goes on.
    Clean,
    /// The program stands still. What is here and neither the volume nor the other engine has as it is, and all that is known of the region.
    Last,
    /// What was written to since the last round, by who saved the state of its devices.
    Rest,
    /// In place of the last one: what would be sent is left behind, to be asked for when the program runs there.
    Leave,
}

/// What a round came to, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sent {
    /// Sent to the other engine.
    pub pages: u64,
    /// Written to the volume.
    pub cleaned: u64,
    /// That the other engine had, and is to have no more.
    pub purged: u64,
    /// Left behind, to be asked for.
    pub left: u64,
    /// In the local cache when the round began.
    pub resident: u64,
    /// Of these, dirty.
    pub dirty: u64,
}

/// An extent of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Its number.
    pub extent: u64,
    /// The lease that it is in.
    pub lease: LeaseId,
    /// Its place there.
    pub slot: u32,
}

/// Sends a message, in postcard, and what belongs to it.
///
/// # Errors
/// When the other side is gone.
pub fn send(to: &mut impl Write, message: &impl Serialize, data: &[u8]) -> io::Result<()> {
    let message = postcard::to_stdvec(message).map_err(io::Error::other)?;
    let mut head = Vec::with_capacity(8 + message.len());
    for length in [message.len(), data.len()] {
        if length > LONGEST {
            return Err(io::Error::other("a message is too long"));
        }
        head.extend((length as u32).to_le_bytes());
    }
    head.extend(message);
    to.write_all(&head)?;
    to.write_all(data)
}

/// Receives the next message, what belongs to it into the buffer. None at the end.
///
/// # Errors
/// What the other side sent makes no sense, or it ended in the middle.
pub fn receive<T: DeserializeOwned>(
    from: &mut impl Read,
    data: &mut Vec<u8>,
) -> io::Result<Option<T>> {
    let mut lengths = [0; 8];
    match from.read(&mut lengths)? {
        0 => return Ok(None),
        read => from.read_exact(&mut lengths[read..])?,
    }
    let [message, of_data] = [0, 4].map(|at| {
        let length: [u8; 4] = std::array::from_fn(|byte| lengths[at + byte]);
        u32::from_le_bytes(length) as usize
    });
    if message > LONGEST || of_data > LONGEST {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a message of an impossible length",
        ));
    }
    let mut head = vec![0; message];
    from.read_exact(&mut head)?;
    data.resize(of_data, 0);
    from.read_exact(data)?;
    postcard::from_bytes(&head)
        .map(Some)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

impl Frame {
    /// Sends it, as [`send()`].
    ///
    /// # Errors
    /// When the other side is gone.
    pub fn send(&self, to: &mut impl Write, data: &[u8]) -> io::Result<()> {
        send(to, self, data)
    }

    /// Receives the next, as [`receive()`].
    ///
    /// # Errors
    /// What the other side sent makes no sense, or it ended in the middle.
    pub fn receive(from: &mut impl Read, data: &mut Vec<u8>) -> io::Result<Option<Self>> {
        receive(from, data)
    }
}
