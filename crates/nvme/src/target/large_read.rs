//! Long reads, sent straight from the lease's memory.

use std::io::{self, IoSlice};

use aquifer_page::PAGE_SIZE;
use aquifer_page::export::{ExportError, Held, Segment};
use aquifer_transport::channel::Channel;
use aquifer_transport::serving::{Gather, OUTBOX, ZEROES, zeroes};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::U32;

use super::link::{AROUND_DATA, Link};
use super::{Broken, Namespace};
use crate::proto::digest::Running;

/// The most bytes of the lease held at once, and sent in one PDU.
const PIECE: usize = 256 << 10;
/// The most segments in a piece: every other page stored.
const SEGMENTS: usize = PIECE / PAGE_SIZE;
/// The most slices of a piece: the outbox, its segments, further slices of large holes, the digest.
const SLICES: usize = 1 + SEGMENTS + PIECE / ZEROES + 1;

/// Sends long reads straight from the lease's memory.
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
    /// the lease fails, possibly after a part of the data is sent.
    pub(super) fn send(
        &mut self,
        link: &mut Link,
        id: u16,
        namespace: &Namespace,
        offset: u64,
        length: usize,
    ) -> Result<Result<(), ExportError>, Broken> {
        let mut done = 0;
        while done < length {
            let piece = PIECE.min(length - done);
            link.reserve(AROUND_DATA)?;
            let mut rest = Ok(0);
            let held = namespace.lease().hold(offset + done as u64, piece as u64, &mut |held| {
                link.push_data_head(id, done, piece, done + piece == length);
                rest = self.send_held(link, held);
            });
            if let Err(error) = held {
                return Ok(Err(error));
            }
            let rest = rest?;
            link.outbox.clear();
            if rest > 0 {
                link.socket.send_all(&mut [IoSlice::new(&self.aside[..rest])])?;
            }
            done += piece;
        }
        Ok(Ok(()))
    }

    /// Sends the outbox and the data as far as the socket takes them at once, and copies the rest
    /// aside. Returns the length of the copy.
    fn send_held(&mut self, link: &mut Link, held: &dyn Held) -> io::Result<usize> {
        let digest = if link.outgoing.data_digest { digest_of(held) } else { U32::ZERO };
        let mut gather = Gather::<SLICES>::new(link.outbox.bytes());
        held.segments(&mut |segment| match segment {
            Segment::Data(data) => gather.push(data),
            Segment::Hole(length) => gather.push_zeroes(length),
        });
        if link.outgoing.data_digest {
            gather.push(digest.as_bytes());
        }
        let sent = link.socket.try_send(gather.slices())?;
        Ok(gather.copy_rest(sent, &mut self.aside))
    }
}

fn digest_of(held: &dyn Held) -> U32 {
    let mut digest = Running::default();
    held.segments(&mut |segment| match segment {
        Segment::Data(data) => digest.add(data),
        Segment::Hole(length) => zeroes(length).for_each(|zeroes| digest.add(zeroes)),
    });
    digest.value()
}
