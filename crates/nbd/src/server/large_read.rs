//! Long reads of a lease, sent straight from its memory.

use std::io::{self, IoSlice};
use std::ops::Range;

use aquifer_page::PAGE_SIZE;
use aquifer_page::export::{Export, Held, Segment};
use aquifer_transport::channel::Channel;
use aquifer_transport::serving::{Gather, OUTBOX, Outbox, ZEROES};
use zerocopy::IntoBytes;
use zerocopy::byteorder::big_endian::U64;

use super::answer::{HEAD, segment_header};
use super::session::SessionError;
use crate::proto::{Hole, Request};

/// Bytes of the lease that one piece holds at most.
const PIECE: usize = 256 << 10;
/// The most segments in a piece: alternate pages stored, and both ends cut.
const SEGMENTS: usize = PIECE / PAGE_SIZE + 1;
/// The most slices of a piece: the outbox, and a head and a body for each segment.
///
/// The last term counts the further slices of holes longer than the block of zeroes.
const SLICES: usize = 1 + 2 * SEGMENTS + PIECE / ZEROES;

/// A sender of long reads straight from the lease's memory.
///
/// It holds the pages while the kernel copies them, but never while it waits for the client. It
/// copies aside the bytes that the socket does not take at once, and then releases the pages.
pub(super) struct LargeRead {
    aside: Box<[u8]>,
}

/// The headers of a chunk in wire format: the chunk's, then the offset or the hole.
#[derive(Clone, Copy)]
struct Head {
    bytes: [u8; HEAD],
    length: usize,
}

impl LargeRead {
    pub(super) fn new() -> Self {
        // Space for a piece, the outbox and the heads. The kernel allocates no memory for it until
        // a slow client makes the server write to it.
        Self { aside: vec![0; PIECE + OUTBOX + SEGMENTS * HEAD].into_boxed_slice() }
    }

    /// Sends the outbox, then the data of `request`.
    ///
    /// Unless `chunked`, the outbox already holds the reply's headers.
    pub(super) fn send(
        &mut self,
        request: &Request,
        chunked: bool,
        lease: &dyn Export,
        outbox: &mut Outbox,
        channel: &mut dyn Channel,
    ) -> Result<(), SessionError> {
        let mut at = request.offset.get();
        let end = at + u64::from(request.length.get());
        while at < end {
            // Pieces end at page boundaries, so that the server holds no page twice.
            let next = end.min((at / PAGE_SIZE as u64) * PAGE_SIZE as u64 + PIECE as u64);
            let mut rest = Ok(0);
            lease.hold(at, next - at, &mut |held| {
                let mut heads = [Head::NONE; SEGMENTS];
                if chunked {
                    fill_heads(&mut heads, held, request.cookie.get(), at..next, next == end);
                }
                rest = self.send_held(held, chunked, &heads, outbox, channel);
            })?;
            let rest = rest?;
            outbox.clear();
            if rest > 0 {
                channel.send_all(&mut [IoSlice::new(&self.aside[..rest])])?;
            }
            at = next;
        }
        Ok(())
    }

    /// Sends the outbox and the data as far as the socket takes them at once, and copies the rest
    /// aside. Returns the length of the copy.
    fn send_held(
        &mut self,
        held: &dyn Held,
        chunked: bool,
        heads: &[Head],
        outbox: &Outbox,
        channel: &mut dyn Channel,
    ) -> io::Result<usize> {
        let mut gather = Gather::<SLICES>::new(outbox.bytes());
        let mut heads = heads.iter();
        held.segments(&mut |segment| {
            if let Some(head) = heads.next() {
                gather.push(&head.bytes[..head.length]);
            }
            match segment {
                Segment::Data(data) => gather.push(data),
                Segment::Hole(_) if chunked => {}
                Segment::Hole(length) => gather.push_zeroes(length),
            }
        });
        let sent = channel.try_send(gather.slices())?;
        Ok(gather.copy_rest(sent, &mut self.aside))
    }
}

/// Writes the headers of the segments of `range`, of which the last ends the reply if `last`.
fn fill_heads(
    heads: &mut [Head; SEGMENTS],
    held: &dyn Held,
    cookie: u64,
    range: Range<u64>,
    last: bool,
) {
    let (mut heads, mut at) = (heads.iter_mut(), range.start);
    held.segments(&mut |segment| {
        let next = at + segment.len() as u64;
        let Some(head) = heads.next() else { return };
        head.push(segment_header(cookie, last && next == range.end, &segment).as_bytes());
        match segment {
            Segment::Data(_) => head.push(U64::new(at).as_bytes()),
            Segment::Hole(length) => {
                head.push(Hole { offset: at.into(), length: (length as u32).into() }.as_bytes());
            }
        }
        at = next;
    });
}

impl Head {
    const NONE: Self = Self { bytes: [0; HEAD], length: 0 };

    fn push(&mut self, part: &[u8]) {
        self.bytes[self.length..self.length + part.len()].copy_from_slice(part);
        self.length += part.len();
    }
}
