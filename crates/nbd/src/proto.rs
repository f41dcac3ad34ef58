//! Numbers and layouts of the NBD protocol, named as in the specification (without `NBD_`).
//!
//! All numbers on the wire are big-endian; assertions check the layouts at compile time.

// The derives of zerocopy make hidden types without `Debug`; every type of this file has it.
#![allow(missing_debug_implementations)]

use aquifer_transport::layout;
use zerocopy::byteorder::big_endian::{U16, U32, U64, U128};

/// The TCP port registered for NBD.
pub const DEFAULT_PORT: u16 = 10809;

/// `NBDMAGIC`, the first word that a server sends.
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, the second word of a newstyle server and the first of every option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The first word of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// The first word of every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The first word of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The first word of a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// The longest export name, error text or other string, in bytes (specification, "Conventions").
pub const MAX_STRING: usize = 4096;
/// The longest payload of a request or reply, in bytes: the maximum that our server advertises.
///
/// It is also what both ends assume if the server advertises none (NBD, "Size constraints").
pub const MAX_PAYLOAD: u32 = 32 << 20;
/// The block size, in bytes, at which requests need no read-modify-write: a power of two of at
/// least 512 (NBD, "Size constraints").
pub const PREFERRED_BLOCK: u32 = 4096;

/// Flags of the greeting and of its answer (NBD, "Handshake flags" and "Client flags").
pub mod handshake {
    /// The server supports fixed newstyle.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The server can omit the 124 zero bytes after its reply to `OPT_EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 1 << 1;
    /// The client's answer to [`FIXED_NEWSTYLE`].
    pub const C_FIXED_NEWSTYLE: u32 = 1 << 0;
    /// The client's answer to [`NO_ZEROES`].
    pub const C_NO_ZEROES: u32 = 1 << 1;
}

/// Options that a client sends in the handshake ("Option types").
pub mod option {
    /// Choose an export and start transmission; the server can refuse only by closing the
    /// connection.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Continue under TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Choose an export and start transmission; the server can refuse with an error.
    pub const GO: u32 = 7;
    /// Negotiate structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List the metadata contexts of an export.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Select metadata contexts of an export.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Aquifer's own: introduce the client and learn the incarnation of the export's pages (see
    /// [`Introduction`](super::Introduction)).
    ///
    /// The specification assigns no number near it. A server that lacks the option MUST answer
    /// [`ERR_UNSUP`](super::reply::ERR_UNSUP). The option needs no magic number of its own, so it
    /// uses none that is reserved (NBD, "Reserved Magic values").
    pub const INTRODUCE: u32 = 0x4151_5546;
}

/// Replies to options (NBD, "Option reply types").
pub mod reply {
    /// The server accepts the option, or ends a list.
    pub const ACK: u32 = 1;
    /// One export of the list.
    pub const SERVER: u32 = 2;
    /// One piece of information about an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Aquifer's own: the incarnation of the pages, 16 bytes, in answer to
    /// [`INTRODUCE`](super::option::INTRODUCE).
    pub const INCARNATION: u32 = 0x4151_5546;
    /// The bit that every error reply has set.
    pub const ERROR_BIT: u32 = 1 << 31;
    /// The server does not know the option.
    pub const ERR_UNSUP: u32 = ERROR_BIT | 1;
    /// The server's policy forbids the option.
    pub const ERR_POLICY: u32 = ERROR_BIT | 2;
    /// The option is malformed.
    pub const ERR_INVALID: u32 = ERROR_BIT | 3;
    /// The server's platform does not support the option.
    pub const ERR_PLATFORM: u32 = ERROR_BIT | 4;
    /// The client must start TLS first.
    pub const ERR_TLS_REQD: u32 = ERROR_BIT | 5;
    /// The server has no such export.
    pub const ERR_UNKNOWN: u32 = ERROR_BIT | 6;
    /// The server is shutting down.
    pub const ERR_SHUTDOWN: u32 = ERROR_BIT | 7;
    /// The client must ask for block size constraints first.
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR_BIT | 8;
    /// The option or the reply to it is too long.
    pub const ERR_TOO_BIG: u32 = ERROR_BIT | 9;
}

/// Flags of an [`Introduction`].
pub mod introduction {
    /// The claim outlives the connections for as long as the export holds pages.
    pub const KEEPS: u32 = 1 << 0;
    /// The client takes the export from its present owner.
    pub const TAKES_OVER: u32 = 1 << 1;
    /// The owner has moved for good: the server ends clients of earlier generations and admits no
    /// more of them.
    pub const ENDS_OLDER: u32 = 1 << 2;
}

/// Kinds of information in a [`reply::INFO`] (NBD, "Option reply types").
pub mod info {
    /// Size and transmission flags; the server always sends it.
    pub const EXPORT: u16 = 0;
    /// The export's canonical name.
    pub const NAME: u16 = 1;
    /// A description of the export for people.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum, preferred and maximum block size.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: the features of an export (NBD, "Transmission flags").
pub mod export_flag {
    /// The other flags are valid.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// The server refuses writes.
    pub const READ_ONLY: u16 = 1 << 1;
    /// The server supports `CMD_FLUSH`.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The server supports `CMD_FLAG_FUA`.
    pub const SEND_FUA: u16 = 1 << 3;
    /// The server supports `CMD_TRIM`.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// The server supports `CMD_WRITE_ZEROES`.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The server supports `CMD_FLAG_DF`.
    pub const SEND_DF: u16 = 1 << 7;
    /// Several connections see one consistent export.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// The server supports `CMD_CACHE`.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The server supports `CMD_FLAG_FAST_ZERO`.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands of the transmission phase ("Request types").
pub mod command {
    /// Read a range.
    pub const READ: u16 = 0;
    /// Write a range; the data follows the request.
    pub const WRITE: u16 = 1;
    /// End the session; the server sends no reply.
    pub const DISC: u16 = 2;
    /// Make all acknowledged writes permanent.
    pub const FLUSH: u16 = 3;
    /// Release the space of a range.
    pub const TRIM: u16 = 4;
    /// Read a range ahead: the client will need it soon.
    pub const CACHE: u16 = 5;
    /// Make a range read as zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Report the runs of data and holes in a range.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of commands (NBD, "Command flags").
pub mod command_flag {
    /// The effect must be permanent before the reply.
    pub const FUA: u16 = 1 << 0;
    /// `WRITE_ZEROES` must allocate the range.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The server must answer `READ` with one chunk of data.
    pub const DF: u16 = 1 << 2;
    /// `BLOCK_STATUS` must report one run only.
    pub const REQ_ONE: u16 = 1 << 3;
    /// `WRITE_ZEROES` must fail if it is no faster than a write.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Flags and types of chunks (NBD, "Structured reply flags" and "Structured reply types").
pub mod chunk {
    /// Flag: this chunk is the last of its reply.
    pub const DONE: u16 = 1 << 0;
    /// No content.
    pub const NONE: u16 = 0;
    /// Data: its 64-bit offset, then the bytes.
    pub const OFFSET_DATA: u16 = 1;
    /// A hole: its offset and its length.
    pub const OFFSET_HOLE: u16 = 2;
    /// Runs of one metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// The bit that every error type has set.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// An error: its number and its text.
    pub const ERROR: u16 = ERROR_BIT | 1;
    /// An error at a given offset.
    pub const ERROR_OFFSET: u16 = ERROR_BIT | 2;
}

/// Error numbers of replies (NBD, "Error values").
pub mod errno {
    /// Success.
    pub const OK: u32 = 0;
    /// Operation not permitted.
    pub const EPERM: u32 = 1;
    /// Input/output error.
    pub const EIO: u32 = 5;
    /// Out of memory.
    pub const ENOMEM: u32 = 12;
    /// Invalid argument.
    pub const EINVAL: u32 = 22;
    /// No space left on the export.
    pub const ENOSPC: u32 = 28;
    /// The value is too large.
    pub const EOVERFLOW: u32 = 75;
    /// Operation not supported.
    pub const ENOTSUP: u32 = 95;
    /// The server is shutting down.
    pub const ESHUTDOWN: u32 = 108;
}

/// The metadata context that distinguishes holes from data (NBD, "base:allocation metadata
/// context").
pub const BASE_ALLOCATION: &str = "base:allocation";
/// The id that our server gives `base:allocation`; any number serves, as the context is the only
/// one.
pub const BASE_ALLOCATION_ID: u32 = 1;
/// `base:allocation`: the run occupies no space.
pub const STATE_HOLE: u32 = 1 << 0;
/// `base:allocation`: the run reads as zeroes.
pub const STATE_ZERO: u32 = 1 << 1;

layout!(
    /// The greeting, the first message of the server (NBD, "Newstyle negotiation").
    Greeting, 18 {
        /// [`MAGIC`].
        magic: U64,
        /// [`OPTION_MAGIC`].
        option_magic: U64,
        /// See [`handshake`].
        flags: U16,
    }
);
layout!(
    /// The head of an option; `length` bytes follow (NBD, "Newstyle negotiation").
    OptionHeader, 16 {
        /// [`OPTION_MAGIC`].
        magic: U64,
        /// See [`option`].
        option: U32,
        /// Bytes that follow.
        length: U32,
    }
);
layout!(
    /// The head of an option's reply; `length` bytes follow (NBD, "Fixed newstyle negotiation").
    OptionReply, 20 {
        /// [`OPTION_REPLY_MAGIC`].
        magic: U64,
        /// The option that this reply answers.
        option: U32,
        /// See [`reply`].
        reply: U32,
        /// Bytes that follow.
        length: U32,
    }
);
layout!(
    /// The payload of [`reply::INFO`] with [`info::EXPORT`].
    InfoExport, 12 {
        /// [`info::EXPORT`].
        kind: U16,
        /// Bytes in the export.
        size: U64,
        /// See [`export_flag`].
        flags: U16,
    }
);
layout!(
    /// The payload of [`reply::INFO`] with [`info::BLOCK_SIZE`].
    InfoBlockSize, 14 {
        /// [`info::BLOCK_SIZE`].
        kind: U16,
        /// The smallest block, in bytes: the unit of offsets and lengths.
        minimum: U32,
        /// The preferred block, in bytes: the unit of the cheapest requests.
        preferred: U32,
        /// The largest block, in bytes: the longest payload of a request.
        maximum: U32,
    }
);
layout!(
    /// The reply to `OPT_EXPORT_NAME`; 124 zero bytes follow unless both sides omit them.
    ExportNameReply, 10 {
        /// Bytes in the export.
        size: U64,
        /// See [`export_flag`].
        flags: U16,
    }
);
layout!(
    /// The fixed part of the payload of [`option::INTRODUCE`].
    ///
    /// The export's name precedes it and the visitor's name follows it; each name has a 32-bit
    /// length before it.
    Introduction, 48 {
        /// The owner of the pages that the client claims.
        owner: U128,
        /// The connecting process.
        client: U128,
        /// The number of times that the owner has moved to another host.
        generation: U32,
        /// The number of the client's reconnections; the server ends the client's connections of
        /// smaller epochs.
        epoch: U64,
        /// See [`introduction`].
        flags: U32,
    }
);
layout!(
    /// A request; the data of a write follows (NBD, "Request message").
    Request, 28 {
        /// [`REQUEST_MAGIC`].
        magic: U32,
        /// See [`command_flag`].
        flags: U16,
        /// See [`command`].
        command: U16,
        /// A value that the client chooses and the reply repeats.
        cookie: U64,
        /// First byte of the range.
        offset: U64,
        /// Length of the range in bytes.
        length: U32,
    }
);
layout!(
    /// A simple reply; the data of a successful read follows (NBD, "Simple reply message").
    SimpleReply, 16 {
        /// [`SIMPLE_REPLY_MAGIC`].
        magic: U32,
        /// See [`errno`].
        error: U32,
        /// The cookie of the request.
        cookie: U64,
    }
);
layout!(
    /// The head of a chunk of a structured reply; `length` bytes follow (NBD, "Structured reply
    /// chunk message").
    ChunkHeader, 20 {
        /// [`STRUCTURED_REPLY_MAGIC`].
        magic: U32,
        /// [`chunk::DONE`] or 0.
        flags: U16,
        /// See [`chunk`].
        kind: U16,
        /// The cookie of the request.
        cookie: U64,
        /// Bytes that follow.
        length: U32,
    }
);
layout!(
    /// The payload of [`chunk::OFFSET_HOLE`].
    Hole, 12 {
        /// First byte of the hole.
        offset: U64,
        /// Bytes in the hole.
        length: U32,
    }
);
layout!(
    /// The head of the payload of [`chunk::ERROR`]; `text_length` bytes of text follow.
    ChunkError, 6 {
        /// See [`errno`].
        error: U32,
        /// Bytes of text that follow.
        text_length: U16,
    }
);
layout!(
    /// One run in the payload of [`chunk::BLOCK_STATUS`], after the context's 32-bit id.
    StatusRun, 8 {
        /// Bytes in the run.
        length: U32,
        /// [`STATE_HOLE`] and [`STATE_ZERO`], or 0 for data.
        status: U32,
    }
);
