//! Numbers and layouts of the NBD protocol, named as the specification names them (without `NBD_`).
//!
//! Everything on the wire is big-endian; the layouts are checked at compile time.

// The derives of zerocopy make hidden types of their own without Debug; ours all have it.
#![allow(missing_debug_implementations)]

use zerocopy::byteorder::big_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, Unaligned};

/// The port registered for NBD.
pub const DEFAULT_PORT: u16 = 10809;

/// `NBDMAGIC`, the first word of a server.
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, the second word of a newstyle server and the start of every option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Start of every option reply.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// The longest export name, error text or other string (specification, "Values").
pub const MAX_STRING: usize = 4096;
/// The longest payload of a request or reply that we send or take: the maximum block size we advertise.
pub const MAX_PAYLOAD: u32 = 32 << 20;
/// The block size at which requests do no read-modify-write.
pub const PREFERRED_BLOCK: u32 = 4096;

/// Handshake flags: what the server says before the first option.
pub mod handshake {
    /// The server speaks fixed newstyle.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The server can leave out the 124 zero bytes after `OPT_EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 1 << 1;
    /// The client's answer to [`FIXED_NEWSTYLE`].
    pub const C_FIXED_NEWSTYLE: u32 = 1 << 0;
    /// The client's answer to [`NO_ZEROES`].
    pub const C_NO_ZEROES: u32 = 1 << 1;
}

/// Options a client sends in the handshake.
pub mod option {
    /// Choose an export and start, without any way to say no.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Go on under TLS.
    pub const STARTTLS: u32 = 5;
    /// Tell about an export.
    pub const INFO: u32 = 6;
    /// Choose an export and start.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List the metadata contexts of an export.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts of an export.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Ours: say who the client is, and hear whose life the pages behind the export have (see [`Introduction`](super::Introduction)).
    ///
    /// No option of the specification has a number near it, and a server that does not know it MUST answer
    /// [`ERR_UNSUP`](super::reply::ERR_UNSUP) ("Option types").
    pub const INTRODUCE: u32 = 0x4151_5546;
}

/// Replies to options.
pub mod reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// One export of a list.
    pub const SERVER: u32 = 2;
    /// One piece of information about an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Ours: the incarnation of the pages, 16 bytes, in answer to [`INTRODUCE`](super::option::INTRODUCE).
    pub const INCARNATION: u32 = 0x4151_5546;
    /// Set in every reply that is an error.
    pub const ERROR_BIT: u32 = 1 << 31;
    /// The option is unknown.
    pub const ERR_UNSUP: u32 = ERROR_BIT | 1;
    /// The option is forbidden by policy.
    pub const ERR_POLICY: u32 = ERROR_BIT | 2;
    /// The option is malformed.
    pub const ERR_INVALID: u32 = ERROR_BIT | 3;
    /// The option is not supported on this platform.
    pub const ERR_PLATFORM: u32 = ERROR_BIT | 4;
    /// STARTTLS must come first.
    pub const ERR_TLS_REQD: u32 = ERROR_BIT | 5;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = ERROR_BIT | 6;
    /// The server is going away.
    pub const ERR_SHUTDOWN: u32 = ERROR_BIT | 7;
    /// The client must ask for block size constraints first.
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR_BIT | 8;
    /// The option is too long.
    pub const ERR_TOO_BIG: u32 = ERROR_BIT | 9;
}

/// Flags of an [`Introduction`].
pub mod introduction {
    /// The claim outlives the connections for as long as the export holds anything.
    pub const KEEPS: u32 = 1 << 0;
    /// The export is to be taken from its present owner.
    pub const TAKES_OVER: u32 = 1 << 1;
    /// The owner has moved for good: clients of earlier generations are ended, and let in no more.
    pub const ENDS_OLDER: u32 = 1 << 2;
}

/// Kinds of information in a [`reply::INFO`].
pub mod info {
    /// Size and transmission flags; always sent.
    pub const EXPORT: u16 = 0;
    /// The canonical name.
    pub const NAME: u16 = 1;
    /// A text for people.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum, preferred and maximum block size.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: what an export can do.
pub mod export_flag {
    /// The other flags mean something.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `CMD_FLUSH` works.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `CMD_FLAG_FUA` works.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `CMD_TRIM` works.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `CMD_WRITE_ZEROES` works.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `CMD_FLAG_DF` works.
    pub const SEND_DF: u16 = 1 << 7;
    /// Several connections see one export consistently.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `CMD_CACHE` works.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// `CMD_FLAG_FAST_ZERO` works.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands of the transmission phase.
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write; the data follows the request.
    pub const WRITE: u16 = 1;
    /// End the session; no reply.
    pub const DISC: u16 = 2;
    /// All acknowledged writes are to be permanent.
    pub const FLUSH: u16 = 3;
    /// The range is not needed any more.
    pub const TRIM: u16 = 4;
    /// The range will be needed.
    pub const CACHE: u16 = 5;
    /// The range is to read as zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Tell which parts of the range are holes.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of commands.
pub mod command_flag {
    /// The effect is to be permanent before the reply.
    pub const FUA: u16 = 1 << 0;
    /// `WRITE_ZEROES` must not make a hole.
    pub const NO_HOLE: u16 = 1 << 1;
    /// `READ` must be answered in one chunk.
    pub const DF: u16 = 1 << 2;
    /// `BLOCK_STATUS` is to tell about one run only.
    pub const REQ_ONE: u16 = 1 << 3;
    /// `WRITE_ZEROES` must fail where it would be slow.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Flags and types of chunks of structured replies.
pub mod chunk {
    /// Flag: the last chunk of its reply.
    pub const DONE: u16 = 1 << 0;
    /// Nothing (an empty end).
    pub const NONE: u16 = 0;
    /// Data: the offset, then the bytes.
    pub const OFFSET_DATA: u16 = 1;
    /// A hole: the offset and the length.
    pub const OFFSET_HOLE: u16 = 2;
    /// Runs of a metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// Set in every type that is an error.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// An error: its number and a text.
    pub const ERROR: u16 = ERROR_BIT | 1;
    /// An error at an offset.
    pub const ERROR_OFFSET: u16 = ERROR_BIT | 2;
}

/// Error numbers of replies.
pub mod errno {
    /// No error.
    pub const OK: u32 = 0;
    /// Not permitted.
    pub const EPERM: u32 = 1;
    /// Input/output error.
    pub const EIO: u32 = 5;
    /// Out of memory.
    pub const ENOMEM: u32 = 12;
    /// Invalid request.
    pub const EINVAL: u32 = 22;
    /// No space left.
    pub const ENOSPC: u32 = 28;
    /// The reply would be too long.
    pub const EOVERFLOW: u32 = 75;
    /// Not supported.
    pub const ENOTSUP: u32 = 95;
    /// The server is going away.
    pub const ESHUTDOWN: u32 = 108;
}

/// The metadata context that tells holes from data.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// The id we give `base:allocation`; any number, as it is the only context.
pub const BASE_ALLOCATION_ID: u32 = 1;
/// `base:allocation`: the run takes no room.
pub const STATE_HOLE: u32 = 1 << 0;
/// `base:allocation`: the run reads as zeroes.
pub const STATE_ZERO: u32 = 1 << 1;

macro_rules! layout {
    ($(#[$doc:meta])* $name:ident, $size:literal { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, Unaligned)]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }
        const _: () = assert!(size_of::<$name>() == $size);
    };
}

layout!(
    /// What the server says first.
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
    /// The head of an option; `length` bytes follow.
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
    /// The head of an option's reply; `length` bytes follow.
    OptionReply, 20 {
        /// [`OPTION_REPLY_MAGIC`].
        magic: U64,
        /// The option that is answered.
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
        /// The smallest unit of offsets and lengths.
        minimum: U32,
        /// The unit at which requests are cheapest.
        preferred: U32,
        /// The longest payload.
        maximum: U32,
    }
);
layout!(
    /// What follows `OPT_EXPORT_NAME`, before 124 zero bytes unless both sides leave those out.
    ExportNameReply, 10 {
        /// Bytes in the export.
        size: U64,
        /// See [`export_flag`].
        flags: U16,
    }
);
layout!(
    /// The payload of [`option::INTRODUCE`], between the export's name and the owner's, each after its length.
    Introduction, 48 {
        /// Whose pages the export holds.
        owner: U128,
        /// The process that connects.
        client: U128,
        /// How often the owner has moved to another host.
        generation: U32,
        /// Counts the client's reconnections: the server ends those connections of it that have a smaller one.
        epoch: U64,
        /// See [`introduction`].
        flags: U32,
    }
);
layout!(
    /// A request; the data of a write follows.
    Request, 28 {
        /// [`REQUEST_MAGIC`].
        magic: U32,
        /// See [`command_flag`].
        flags: U16,
        /// See [`command`].
        command: U16,
        /// Chosen by the client, copied into the reply.
        cookie: U64,
        /// First byte concerned.
        offset: U64,
        /// Bytes concerned.
        length: U32,
    }
);
layout!(
    /// A simple reply; the data of a successful read follows.
    SimpleReply, 16 {
        /// [`SIMPLE_REPLY_MAGIC`].
        magic: U32,
        /// See [`errno`].
        error: U32,
        /// The request's.
        cookie: U64,
    }
);
layout!(
    /// The head of a chunk of a structured reply; `length` bytes follow.
    ChunkHeader, 20 {
        /// [`STRUCTURED_REPLY_MAGIC`].
        magic: U32,
        /// [`chunk::DONE`] or nothing.
        flags: U16,
        /// See [`chunk`].
        kind: U16,
        /// The request's.
        cookie: U64,
        /// Bytes that follow.
        length: U32,
    }
);
layout!(
    /// The payload of [`chunk::OFFSET_HOLE`]. That of [`chunk::OFFSET_DATA`] is the offset and the data.
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
    /// One run in the payload of [`chunk::BLOCK_STATUS`], which starts with the context's id.
    StatusRun, 8 {
        /// Bytes in the run.
        length: U32,
        /// [`STATE_HOLE`] and [`STATE_ZERO`], or nothing where there is data.
        status: U32,
    }
);
