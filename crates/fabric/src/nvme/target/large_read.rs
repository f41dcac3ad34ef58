//! Long reads, sent straight from the store.

use std::io::IoSlice;

use aquifer_page::PAGE_SIZE;
use aquifer_store::{Held, Segment, StoreError};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::U32;

use super::link::{AROUND_DATA, Link};
use super::{Broken, Namespace};
use crate::channel::Channel;
use crate::nvme::proto::digest::Running;
use crate::serving::{Gather, OUTBOX, ZEROES, zeroes};

/// The most bytes of the store held at once, and sent in one PDU.
const PIECE: usize = 256 << 10;
/// The most segments in a piece: every other page stored.
const SEGMENTS: usize = PIECE / PAGE_SIZE;
/// The most slices of a piece: the outbox, its segments, further slices of large holes, the digest.
const SLICES: usize = 1 + SEGMENTS + PIECE / ZEROES + 1;

/// Sends long reads straight from the store's memory.
///
/// The sender holds the pages while the kernel copies them, but never while it waits for the host.
/// The sender copies the bytes that the socket does not take at once, and releases the pages before
/// it sends the copy.
pub(super) struct LargeRead {
    aside: Box<[u8]>,
}

impl LargeRead {
    pub(super) fn new() -> Self {
        // Holds an outbox, a piece and its digest. The kernel allocates the memory only when a host
        // is slow.
        Self { aside: vec![0; OUTBOX + PIECE + size_of::<U32>()].into_boxed_slice() }
    }

    /// Answers a read of `length` bytes at `offset`, without its completion. Returns `Ok(Err)` if
    /// the store fails, possibly after a part of the data is sent.
    pub(super) fn send(
        &mut self,
        link: &mut Link,
        id: u16,
        namespace: &Namespace,
        offset: u64,
        length: usize,
    ) -> Result<Result<(), StoreError>, Broken> {
        let mut done = 0;
        while done < length {
            let piece = PIECE.min(length - done);
            link.reserve(AROUND_DATA)?;
            let held = match namespace.lease().hold(offset + done as u64, piece as u64) {
                Ok(held) => held,
                Err(error) => return Ok(Err(error)),
            };
            link.push_data_head(id, done, piece, done + piece == length);
            let digest = if link.outgoing.data_digest { digest_of(&held) } else { U32::ZERO };
            let mut gather = Gather::<SLICES>::new(link.outbox.bytes());
            for segment in held.segments() {
                match segment {
                    Segment::Data(data) => gather.push(data),
                    Segment::Hole(length) => gather.push_zeroes(length),
                }
            }
            if link.outgoing.data_digest {
                gather.push(digest.as_bytes());
            }
            let sent = link.socket.try_send(gather.slices())?;
            let rest = gather.copy_rest(sent, &mut self.aside);
            drop(held);
            link.outbox.clear();
            if rest > 0 {
                link.socket.send_all(&mut [IoSlice::new(&self.aside[..rest])])?;
            }
            done += piece;
        }
        Ok(Ok(()))
    }
}

fn digest_of(held: &Held<'_>) -> U32 {
    let mut digest = Running::default();
    for segment in held.segments() {
        match segment {
            Segment::Data(data) => digest.add(data),
            Segment::Hole(length) => zeroes(length).for_each(|zeroes| digest.add(zeroes)),
        }
    }
    digest.value()
}
