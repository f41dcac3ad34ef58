//! Wire format of the server's replies; callers reserve the space in the outbox first.

use aquifer_page::export::{Export, Segment};
use aquifer_transport::serving::Outbox;
use zerocopy::byteorder::big_endian::U64;

use crate::proto::{
    BASE_ALLOCATION_ID, ChunkError, ChunkHeader, Hole, Request, SIMPLE_REPLY_MAGIC, STATE_HOLE,
    STATE_ZERO, STRUCTURED_REPLY_MAGIC, SimpleReply, StatusRun, chunk, errno,
};

use super::storage::{Done, Storage, error_code};

/// Bytes that suffice for any headers before data.
pub(super) const HEAD: usize = 32;
const _: () = assert!(size_of::<ChunkHeader>() + size_of::<Hole>() <= HEAD);

/// The form of the reply to a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// A simple reply: the client did not negotiate structured replies.
    Simple,
    /// One chunk: the client set `CMD_FLAG_DF`, or the export is a disk.
    OneChunk,
    /// One chunk for each run of data and each hole.
    Chunks,
}

/// Returns the header of a simple reply.
pub(super) fn simple_reply(cookie: u64, error: u32) -> SimpleReply {
    SimpleReply { magic: SIMPLE_REPLY_MAGIC.into(), error: error.into(), cookie: cookie.into() }
}

/// Returns the header of a chunk with `length` bytes of payload.
///
/// The last chunk of a reply has the flag `DONE`, no other has it (NBD, "Structured reply flags").
fn chunk_header(cookie: u64, flags: u16, kind: u16, length: usize) -> ChunkHeader {
    ChunkHeader {
        magic: STRUCTURED_REPLY_MAGIC.into(),
        flags: flags.into(),
        kind: kind.into(),
        cookie: cookie.into(),
        length: (length as u32).into(),
    }
}

/// Returns the header of the chunk that carries `segment`.
pub(super) fn segment_header(cookie: u64, last: bool, segment: &Segment<'_>) -> ChunkHeader {
    let flags = if last { chunk::DONE } else { 0 };
    match segment {
        Segment::Data(data) => {
            chunk_header(cookie, flags, chunk::OFFSET_DATA, size_of::<U64>() + data.len())
        }
        Segment::Hole(_) => chunk_header(cookie, flags, chunk::OFFSET_HOLE, size_of::<Hole>()),
    }
}

/// Appends a structured reply that consists of one error.
pub(super) fn push_error_chunk(outbox: &mut Outbox, cookie: u64, error: u32) {
    let payload = ChunkError { error: error.into(), text_length: 0.into() };
    outbox.push(&chunk_header(cookie, chunk::DONE, chunk::ERROR, size_of_val(&payload)));
    outbox.push(&payload);
}

/// Appends the headers before the data of a read, unless each chunk brings its own.
pub(super) fn push_read_head(outbox: &mut Outbox, request: &Request, shape: Shape) {
    let (cookie, length) = (request.cookie.get(), request.length.get() as usize);
    match shape {
        Shape::Simple => outbox.push(&simple_reply(cookie, errno::OK)),
        // A chunk of data has at least one byte (NBD, "Structured reply types").
        Shape::OneChunk if length == 0 => {
            outbox.push(&chunk_header(cookie, chunk::DONE, chunk::NONE, 0))
        }
        Shape::OneChunk => {
            let payload = size_of::<U64>() + length;
            outbox.push(&chunk_header(cookie, chunk::DONE, chunk::OFFSET_DATA, payload));
            outbox.push(&request.offset);
        }
        Shape::Chunks => {}
    }
}

/// Appends the whole reply to a short read; on failure it appends nothing.
pub(super) fn read(outbox: &mut Outbox, export: &Storage, request: &Request, shape: Shape) -> Done {
    if let (Shape::Chunks, Some(lease)) = (shape, export.lease()) {
        return read_chunks(outbox, lease, request);
    }
    let before = outbox.bytes().len();
    push_read_head(outbox, request, shape);
    let data = outbox.space(request.length.get() as usize);
    export.read(request.offset.get(), data).inspect_err(|_| outbox.truncate(before))
}

fn read_chunks(outbox: &mut Outbox, lease: &dyn Export, request: &Request) -> Done {
    let (cookie, mut at) = (request.cookie.get(), request.offset.get());
    let length = u64::from(request.length.get());
    let held = lease.hold(at, length, &mut |held| {
        let end = at + length;
        if at == end {
            outbox.push(&chunk_header(cookie, chunk::DONE, chunk::NONE, 0));
        }
        held.segments(&mut |segment| {
            let next = at + segment.len() as u64;
            outbox.push(&segment_header(cookie, next == end, &segment));
            match segment {
                Segment::Data(data) => {
                    outbox.push(&U64::new(at));
                    outbox.push_bytes(data);
                }
                Segment::Hole(length) => {
                    outbox.push(&Hole { offset: at.into(), length: (length as u32).into() });
                }
            }
            at = next;
        });
    });
    held.map_err(|error| error_code(&error))
}

/// Appends the reply about block status, with at most `most` runs; on failure it appends nothing.
///
/// The reply has one chunk for the selected context (NBD, "Metadata querying").
pub(super) fn block_status(
    outbox: &mut Outbox,
    lease: &dyn Export,
    request: &Request,
    most: usize,
) -> Done {
    // The header states the length, and the runs may change at any time. So collect them once, and
    // write the header afterwards.
    let before = outbox.bytes().len();
    outbox.space(size_of::<ChunkHeader>());
    outbox.push_bytes(&BASE_ALLOCATION_ID.to_be_bytes());
    let (offset, length) = (request.offset.get(), request.length.get().into());
    let told = lease.runs(offset, length, most, &mut |run| {
        // A hole reads as zeroes (NBD, "base:allocation metadata context").
        let status = if run.stored { 0 } else { STATE_HOLE | STATE_ZERO };
        outbox.push(&StatusRun { length: (run.length as u32).into(), status: status.into() });
    });
    if let Err(error) = told {
        outbox.truncate(before);
        return Err(error_code(&error));
    }
    let after = outbox.bytes().len();
    let payload = after - before - size_of::<ChunkHeader>();
    outbox.truncate(before);
    outbox.push(&chunk_header(request.cookie.get(), chunk::DONE, chunk::BLOCK_STATUS, payload));
    outbox.space(payload);
    Ok(())
}
