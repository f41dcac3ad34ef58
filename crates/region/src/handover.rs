//! The messages between the engines of two hosts while a region moves. The supervisors on both
//! hosts carry them.
//!
//! Each message begins with the lengths of its two parts (4 bytes each, little-endian). The message
//! in postcard and its data, pages or states of pages, follow.

use std::io::{self, Read, Write};

use aquifer_page::{ExtentIndex, LeaseId};
use aquifer_region_client::Run;
use aquifer_volume::LeaseTarget;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::RegionError;

/// The longest message, and the longest data, in bytes.
const LONGEST: usize = 1 << 20;

/// The most pages in one frame.
pub(crate) const PAGES: u64 = 64;

/// The most pages in one frame of states.
pub(crate) const STATES: u64 = 1 << 18;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Frame {
    /// To the source engine: do a round. It returns frames for the destination, and `Sent` at the
    /// end.
    Round(Round),
    /// The round is complete, with these counts.
    Sent(Sent),
    /// To the source engine: the region now belongs to the other host, also for later engines.
    GiveAway,
    /// To the source engine: name the most used pages that the destination lacks. It returns `Hot`.
    TellHot,
    /// These pages; their contents follow.
    Pages(Run),
    /// The destination must drop these pages.
    Purge(Vec<Run>),
    /// The states of the pages from this page on, four a byte. Bit 0 of each: the volume has the
    /// page. Bit 1: the volume's version is old. A page with bit 1 that has not been sent was left
    /// behind.
    States(u64),
    /// The places of the volume's extents.
    Extents(Vec<Extent>),
    /// The most used pages, which the destination fetches in advance.
    Hot(Vec<Run>),
    /// Answer once all earlier messages are done.
    Sync,
    /// The request is complete.
    Done,
    /// The request failed, for this reason.
    Failed(String),
    /// To the destination engine: name pages that were left behind and that it needs. It returns
    /// `Want`, with the pages that threads wait for first. It returns `Done` when all pages have
    /// come.
    Next {
        /// Whether to name others, too, if no thread waits for one.
        all: bool,
    },
    /// To the source engine: send these pages. It returns `Pages`, and `Done` at the end.
    Want(Vec<Run>),
    /// The region's present leases, before `Extents`; a list of [`LeaseTarget`] in JSON follows.
    /// They may differ from those in the offer.
    Leases,
    /// The tags of the pages from this page on, 8 bytes each, in the volume. By these the
    /// destination knows the pages that lenders return. They come before `Extents`, and again if
    /// they change.
    Tags(u64),
}

/// The kind of a round, by what goes to the other engine and what to the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Round {
    /// Sends the dirty pages that are here; the first round sends all pages that are here
    /// (\[Jo20\], section 3.3). The program runs.
    Copy,
    /// Writes the dirty pages that are here to the volume, and sends none. The program runs. If the
    /// volume has no room for all pages, this is a round of `Copy`.
    Clean,
    /// Sends the pages here that neither the volume nor the other engine has in this version, and
    /// the state of the whole region. The program is stopped.
    Last,
    /// Sends the pages written since the last round, by QEMU while it saved the state of its
    /// devices.
    Rest,
    /// Leaves behind the pages that `Last` would send. The destination asks for them once the
    /// program runs there.
    Leave,
    /// Sends only the tags of pages that the volume has. The program runs.
    Tags,
}

/// The result of a round, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sent {
    /// Sent to the other engine.
    pub pages: u64,
    /// Written to the volume.
    pub cleaned: u64,
    /// Purged from the other engine, where they were.
    pub purged: u64,
    /// Left behind, to be asked for.
    pub left_at_source: u64,
    /// In the local cache when the round began.
    pub resident: u64,
    /// Dirty pages among these.
    pub dirty: u64,
}

/// The place of an extent of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// The number of the extent.
    pub extent: ExtentIndex,
    /// The lease that holds the extent.
    pub lease: LeaseId,
    /// The extent's slot in the lease.
    pub slot: u32,
}

/// Returns the leases that the destination has once it has heard those of the source. A lease that
/// is new to it gets the next generation, as all others did when the region was created there.
pub(crate) fn leases_here(
    before: &[LeaseTarget],
    sent: &[u8],
) -> Result<Vec<LeaseTarget>, RegionError> {
    let sent: Vec<LeaseTarget> = serde_json::from_slice(sent).map_err(|error| {
        RegionError::Misuse(format!("the source host sent no list of leases: {error}"))
    })?;
    let here = |mut lease: LeaseTarget| {
        let known = before.iter().find(|known| known.is_same_lease(&lease));
        known.cloned().unwrap_or_else(|| {
            next_generation(&mut lease);
            lease
        })
    };
    Ok(sent.into_iter().map(here).collect())
}

/// Makes the claim that of the owner on its next host, which exists beside the source host. Lenders
/// admit one process of each generation.
pub(crate) fn next_generation(lease: &mut LeaseTarget) {
    lease.claim.iter_mut().for_each(|claim| claim.generation = claim.generation.saturating_add(1));
}

/// Sends a message in postcard, with its data.
///
/// # Errors
/// The message or the data is too long, or the other side is gone.
pub fn send(to: &mut impl Write, message: &impl Serialize, data: &[u8]) -> io::Result<()> {
    let message = postcard::to_stdvec(message).map_err(io::Error::other)?;
    let mut head = Vec::with_capacity(8 + message.len());
    for length in [message.len(), data.len()] {
        if length > LONGEST {
            return Err(io::Error::other("the message is longer than the limit"));
        }
        head.extend((length as u32).to_le_bytes());
    }
    head.extend(message);
    to.write_all(&head)?;
    to.write_all(data)
}

/// Receives the next message, and its data into the buffer. Returns `None` at the end of the
/// stream.
///
/// # Errors
/// The message is invalid, or the stream ends inside it.
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
            "the message is longer than the limit",
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
    /// Sends the frame, as [`send()`].
    ///
    /// # Errors
    /// The frame or the data is too long, or the other side is gone.
    pub fn send(&self, to: &mut impl Write, data: &[u8]) -> io::Result<()> {
        send(to, self, data)
    }

    /// Receives the next frame, as [`receive()`].
    ///
    /// # Errors
    /// The frame is invalid, or the stream ends inside it.
    pub fn receive(from: &mut impl Read, data: &mut Vec<u8>) -> io::Result<Option<Self>> {
        receive(from, data)
    }
}
