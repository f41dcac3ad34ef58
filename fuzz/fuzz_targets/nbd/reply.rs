//! Requests to a broken NBD server, and its replies.

use aquifer_fuzz::{Number, Twisted};
use aquifer_nbd::proto::{
    ChunkError, ChunkHeader, Hole, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, SimpleReply,
    StatusRun, chunk,
};
use arbitrary::Arbitrary;
use zerocopy::IntoBytes;
use zerocopy::byteorder::big_endian::U64;

/// The longest read or write, in bytes.
pub const MAX_IO_BYTES: u64 = 64 << 10;
/// The id that the server gives `base:allocation`.
pub const ALLOCATION_CONTEXT_ID: u32 = 7;

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Asked {
    Read { offset: Number, length: Number },
    Write { offset: Number, length: Number },
    Trim { offset: Number, length: Number },
    WriteZeroes { offset: Number, length: Number },
    Flush,
    BlockStatus { offset: Number, length: Number },
}

#[derive(Arbitrary, Debug)]
pub enum Reply<'a> {
    Simple {
        to: u8,
        error: u8,
        data: Number,
    },
    None {
        to: u8,
        done: bool,
    },
    Data {
        to: u8,
        done: bool,
        offset: Number,
        length: Number,
    },
    Hole {
        to: u8,
        done: bool,
        offset: Number,
        length: Number,
    },
    Status {
        to: u8,
        done: bool,
        context: Option<u8>,
        runs: Vec<(Number, u8)>,
        times: u8,
    },
    Error {
        to: u8,
        done: bool,
        kind: u8,
        error: u8,
        said: Option<u16>,
        text: &'a [u8],
    },
    Chunk {
        to: u64,
        flags: u16,
        kind: u16,
        length: Option<Number>,
        payload: &'a [u8],
    },
    /// The correct replies to all requests of the round.
    Right {
        chunks: u8,
    },
    Bytes(&'a [u8]),
}

fn a_chunk(cookie: u64, flags: u16, kind: u16, length: usize, payload: &[&[u8]]) -> Vec<u8> {
    let (magic, flags, kind) = (STRUCTURED_REPLY_MAGIC.into(), flags.into(), kind.into());
    let header =
        ChunkHeader { magic, flags, kind, cookie: cookie.into(), length: (length as u32).into() };
    [header.as_bytes(), &payload.concat()].concat()
}

fn simple(cookie: u64, error: u32, data: usize) -> Vec<u8> {
    let (magic, error) = (SIMPLE_REPLY_MAGIC.into(), error.into());
    let header = SimpleReply { magic, error, cookie: cookie.into() };
    [header.as_bytes(), &vec![7; data]].concat()
}

impl Reply<'_> {
    pub fn put(
        &self,
        cookies: u64,
        operations: &[Asked],
        structured: bool,
        messages: &mut Twisted,
    ) {
        let cookie = |to: u8| cookies + u64::from(to);
        let whole = |cookie, flags, kind, payload: &[&[u8]]| {
            a_chunk(cookie, flags, kind, payload.iter().map(|part| part.len()).sum(), payload)
        };
        let message = match *self {
            Self::Simple { to, error, data } => {
                simple(cookie(to), error.into(), data.bytes().min(MAX_IO_BYTES) as usize)
            }
            Self::None { to, done } => whole(cookie(to), done.into(), chunk::NONE, &[]),
            Self::Data { to, done, offset, length } => {
                let (at, data) =
                    (U64::new(offset.bytes()), vec![9; length.bytes().min(MAX_IO_BYTES) as usize]);
                whole(cookie(to), done.into(), chunk::OFFSET_DATA, &[at.as_bytes(), &data])
            }
            Self::Hole { to, done, offset, length } => {
                let hole =
                    Hole { offset: offset.bytes().into(), length: (length.bytes() as u32).into() };
                whole(cookie(to), done.into(), chunk::OFFSET_HOLE, &[hole.as_bytes()])
            }
            Self::Status { to, done, context, ref runs, times } => {
                let context = context.map_or(ALLOCATION_CONTEXT_ID, u32::from).to_be_bytes();
                let run = |&(length, status): &(Number, u8)| StatusRun {
                    length: (length.bytes() as u32).into(),
                    status: u32::from(status).into(),
                };
                let runs: Vec<_> = runs.iter().map(run).collect();
                let reply = whole(
                    cookie(to),
                    done.into(),
                    chunk::BLOCK_STATUS,
                    &[&context, runs.as_bytes()],
                );
                (0..times).for_each(|_| messages.push(reply.clone()));
                reply
            }
            Self::Error { to, done, kind, error, said, text } => {
                let head = ChunkError {
                    error: u32::from(error).into(),
                    text_length: said.unwrap_or(text.len() as u16).into(),
                };
                let kind = chunk::ERROR_BIT | u16::from(kind);
                whole(cookie(to), done.into(), kind, &[head.as_bytes(), text])
            }
            Self::Chunk { to, flags, kind, length, payload } => {
                let length = length.map_or(payload.len(), |length| length.bytes() as usize);
                a_chunk(cookies.wrapping_add(to), flags, kind, length, &[payload])
            }
            Self::Right { chunks } => {
                let all = (cookies..).zip(operations);
                all.for_each(|(cookie, asked)| {
                    asked.reply_rightly(cookie, chunks, structured, messages)
                });
                return;
            }
            Self::Bytes(bytes) => bytes.to_vec(),
        };
        messages.push(message);
    }
}

impl Asked {
    /// Returns the first byte and the number of bytes.
    pub fn range(self) -> (u64, u64) {
        match self {
            Self::Read { offset, length } | Self::Write { offset, length } => {
                (offset.bytes(), length.bytes().min(MAX_IO_BYTES))
            }
            Self::Trim { offset, length }
            | Self::WriteZeroes { offset, length }
            | Self::BlockStatus { offset, length } => {
                (offset.bytes(), u64::from(length.bytes() as u32))
            }
            Self::Flush => (0, 0),
        }
    }

    fn reply_rightly(self, cookie: u64, chunks: u8, structured: bool, messages: &mut Twisted) {
        let (offset, length) = self.range();
        let done = chunk::DONE;
        match self {
            _ if length == 0 && !matches!(self, Self::Flush) => {}
            Self::Read { .. } if structured => {
                let piece = length.div_ceil(u64::from(chunks) + 1).max(1);
                for at in (0..length).step_by(piece as usize) {
                    let data = vec![5; piece.min(length - at) as usize];
                    let payload: &[&[u8]] = &[&(offset.wrapping_add(at)).to_be_bytes(), &data];
                    messages.push(a_chunk(cookie, 0, chunk::OFFSET_DATA, 8 + data.len(), payload));
                }
                messages.push(a_chunk(cookie, done, chunk::NONE, 0, &[]));
            }
            Self::Read { .. } => messages.push(simple(cookie, 0, length as usize)),
            Self::BlockStatus { .. } => {
                let run = StatusRun { length: (length as u32).into(), status: 3.into() };
                let payload: &[&[u8]] = &[&ALLOCATION_CONTEXT_ID.to_be_bytes(), run.as_bytes()];
                messages.push(a_chunk(cookie, done, chunk::BLOCK_STATUS, 12, payload));
            }
            _ => messages.push(simple(cookie, 0, 0)),
        }
    }
}
