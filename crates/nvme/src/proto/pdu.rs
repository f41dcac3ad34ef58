//! Protocol data units, of which a connection's byte streams consist.
//!
//! A PDU is a header of fixed length, its digest if negotiated, padding, data, and the data's
//! digest if negotiated.

use aquifer_transport::layout;
use zerocopy::byteorder::little_endian::{U16, U32};

use super::{Command, Completion};

/// Types of PDU (TCP, Figure 10 "PDU Types").
pub mod kind {
    /// Host to controller: the first PDU of a connection.
    pub const IC_REQ: u8 = 0x00;
    /// Controller to host: the answer to an ICReq.
    pub const IC_RESP: u8 = 0x01;
    /// Host to controller: the connection ends because of a protocol error.
    pub const H2C_TERM_REQ: u8 = 0x02;
    /// Controller to host: the connection ends because of a protocol error.
    pub const C2H_TERM_REQ: u8 = 0x03;
    /// A command, possibly with its data.
    pub const CAPSULE_CMD: u8 = 0x04;
    /// A completion.
    pub const CAPSULE_RESP: u8 = 0x05;
    /// Data of a command, requested by an R2T.
    pub const H2C_DATA: u8 = 0x06;
    /// Data requested by a command.
    pub const C2H_DATA: u8 = 0x07;
    /// Ready to transfer: the host may send this part of a command's data.
    pub const R2T: u8 = 0x09;
}

/// Flags of PDUs (TCP, Figures 24 to 28).
pub mod flag {
    /// The header's digest follows the header.
    pub const HEADER_DIGEST: u8 = 1 << 0;
    /// The data's digest follows the data.
    pub const DATA_DIGEST: u8 = 1 << 1;
    /// The last data of its command, or of its R2T.
    pub const LAST: u8 = 1 << 2;
    /// The command has succeeded, and no completion follows.
    pub const SUCCESS: u8 = 1 << 3;
}

/// The negotiated digests, in ICReq and ICResp (TCP, Figures 20 and 21, "DGST").
pub mod digests {
    /// Every header has a digest.
    pub const HEADER: u8 = 1 << 0;
    /// All data has a digest.
    pub const DATA: u8 = 1 << 1;
}

/// Reasons to terminate a connection (TCP, Figures 22 and 23, "Fatal Error Status").
pub mod fatal {
    /// A field of the header is invalid; the information is its offset.
    pub const INVALID_HEADER: u16 = 0x01;
    /// The PDU is out of sequence.
    pub const SEQUENCE: u16 = 0x02;
    /// The header's digest is wrong; the information is the received digest.
    pub const HEADER_DIGEST: u16 = 0x03;
    /// The data is outside the requested range.
    pub const DATA_OUT_OF_RANGE: u16 = 0x04;
    /// More data than allowed in a PDU, or more R2Ts than allowed.
    pub const LIMIT_EXCEEDED: u16 = 0x05;
    /// A parameter is not supported; the information is its offset.
    pub const UNSUPPORTED: u16 = 0x06;
}

/// Size of a digest, in bytes.
pub const DIGEST: usize = 4;
/// Size of ICReq and of ICResp, in bytes.
pub const IC_LENGTH: usize = 128;
/// The most bytes of an offending PDU that a termination repeats.
pub const TERM_DATA: usize = 128;
/// The largest value of [`IcReq::alignment`] and [`IcResp::alignment`].
pub const MAX_ALIGNMENT: u8 = 31;
/// The smallest allowed value of [`IcResp::max_data`], in bytes.
pub const MIN_MAX_DATA: u32 = 4096;

layout!(
    /// The start of every PDU (TCP, Figure 19 "PDU Common Header").
    CommonHeader, 8 {
        /// The PDU's type, see [`kind`].
        kind: u8,
        /// Flags, see [`flag`].
        flags: u8,
        /// Length of the header without its digest, in bytes.
        header_length: u8,
        /// Offset of the data from the PDU's start, in bytes; 0 without data.
        data_offset: u8,
        /// Length of the PDU with digests and padding, in bytes.
        length: U32,
    }
);
layout!(
    /// Initialize Connection Request (TCP, Figure 20 "ICReq").
    IcReq, 128 {
        /// [`kind::IC_REQ`].
        header: CommonHeader,
        /// PDU format: 0.
        format: U16,
        /// Alignment of data sent to the host, in dwords, minus one.
        alignment: u8,
        /// The digests that the host wants, see [`digests`].
        digests: u8,
        /// The most R2Ts that the host accepts at a time for a command, minus one.
        max_r2t: U32,
        /// Zero.
        reserved: [u8; 112],
    }
);
layout!(
    /// Initialize Connection Response (TCP, Figure 21 "ICResp").
    IcResp, 128 {
        /// [`kind::IC_RESP`].
        header: CommonHeader,
        /// PDU format: 0.
        format: U16,
        /// Alignment of data sent to the controller, in dwords, minus one.
        alignment: u8,
        /// The digests that both ends use, see [`digests`].
        digests: u8,
        /// The most data in an H2CData PDU, in bytes: a multiple of 4, at least [`MIN_MAX_DATA`].
        max_data: U32,
        /// Zero.
        reserved: [u8; 112],
    }
);
layout!(
    /// Termination of the connection; up to [`TERM_DATA`] bytes of the offending PDU follow (TCP,
    /// Figure 22 "H2CTermReq" and Figure 23 "C2HTermReq").
    TermReq, 24 {
        /// [`kind::H2C_TERM_REQ`] or [`kind::C2H_TERM_REQ`].
        header: CommonHeader,
        /// The fatal error status, see [`fatal`].
        status: U16,
        /// Details of the error; their meaning depends on the status.
        information: U32,
        /// Zero.
        reserved: [u8; 10],
    }
);
layout!(
    /// A command; its data may follow (TCP, Figure 24 "CapsuleCmd").
    CapsuleCmd, 72 {
        /// [`kind::CAPSULE_CMD`].
        header: CommonHeader,
        /// The command.
        command: Command,
    }
);
layout!(
    /// A completion (TCP, Figure 25 "CapsuleResp").
    CapsuleResp, 24 {
        /// [`kind::CAPSULE_RESP`].
        header: CommonHeader,
        /// The completion.
        completion: Completion,
    }
);
layout!(
    /// Data of a command (TCP, Figure 26 "H2CData" and Figure 27 "C2HData").
    Data, 24 {
        /// [`kind::H2C_DATA`] or [`kind::C2H_DATA`].
        header: CommonHeader,
        /// The command's identifier.
        command_id: U16,
        /// To the controller: the R2T's tag. To the host: 0.
        tag: U16,
        /// Offset of this data in the command's data, in bytes.
        offset: U32,
        /// Length of the data, in bytes.
        length: U32,
        /// Zero.
        reserved: [u8; 4],
    }
);
layout!(
    /// Ready to transfer (TCP, Figure 28 "R2T").
    R2t, 24 {
        /// [`kind::R2T`].
        header: CommonHeader,
        /// The command's identifier.
        command_id: U16,
        /// Chosen by the controller; the PDUs of the data repeat it.
        tag: U16,
        /// Offset of the requested part in the command's data, in bytes.
        offset: U32,
        /// Length of the requested part, in bytes.
        length: U32,
        /// Zero.
        reserved: [u8; 4],
    }
);

impl CommonHeader {
    /// Makes the header of a PDU of `header_length` bytes without digests and data.
    pub fn bare(kind: u8, header_length: usize) -> Self {
        Self {
            kind,
            flags: 0,
            header_length: header_length as u8,
            data_offset: 0,
            length: (header_length as u32).into(),
        }
    }
}

/// The form of PDUs with data, on one connection and in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Whether every header has a digest.
    pub header_digest: bool,
    /// Whether all data has a digest.
    pub data_digest: bool,
    /// Alignment of data in dwords, minus one, as the receiver wants it.
    pub alignment: u8,
}

impl Shape {
    /// Makes the form from the digests of ICResp and the receiver's alignment.
    pub fn new(digests: u8, alignment: u8) -> Self {
        Self {
            header_digest: digests & digests::HEADER != 0,
            data_digest: digests & digests::DATA != 0,
            alignment,
        }
    }

    /// Returns the common header of a PDU of this kind and header length with `data` bytes of data.
    pub fn header(self, kind: u8, flags: u8, header_length: usize, data: usize) -> CommonHeader {
        let mut header = CommonHeader::bare(kind, header_length);
        let mut length = header_length;
        header.flags = flags;
        if self.header_digest {
            header.flags |= flag::HEADER_DIGEST;
            length += DIGEST;
        }
        if data > 0 {
            length = self.data_offset(header_length);
            header.data_offset = length as u8;
            length += data;
            if self.data_digest {
                header.flags |= flag::DATA_DIGEST;
                length += DIGEST;
            }
        }
        header.length = (length as u32).into();
        header
    }

    /// Returns the offset of the data in a PDU with a header of this length.
    pub fn data_offset(self, header_length: usize) -> usize {
        let digest = if self.header_digest { DIGEST } else { 0 };
        (header_length + digest).next_multiple_of((usize::from(self.alignment) + 1) * 4)
    }

    /// Returns the place of the data in a PDU with this common header. The PDU's own header must
    /// have `header_length` bytes, and the data at most `most_data`. Valid for all PDUs but ICReq,
    /// ICResp and terminations.
    ///
    /// # Errors
    /// If the common header contradicts the negotiated form or these lengths.
    pub fn payload(
        self,
        header: &CommonHeader,
        header_length: usize,
        most_data: usize,
    ) -> Result<Payload, Malformed> {
        let wrong = |field, what| Err(Malformed { status: fatal::INVALID_HEADER, field, what });
        let length = header.length.get() as usize;
        if usize::from(header.header_length) != header_length {
            return wrong(2, "a PDU with a wrong length of its header");
        }
        if (header.flags & flag::HEADER_DIGEST != 0) != self.header_digest {
            return wrong(1, "a header digest contrary to the agreement");
        }
        let bare = header_length + if self.header_digest { DIGEST } else { 0 };
        if length == bare {
            return Ok(Payload::default());
        }
        if (header.flags & flag::DATA_DIGEST != 0) != self.data_digest {
            return wrong(1, "a data digest contrary to the agreement");
        }
        let start = usize::from(header.data_offset);
        if start < bare || !start.is_multiple_of(4) {
            return wrong(3, "data that overlaps the header or is not aligned");
        }
        let after = if self.data_digest { DIGEST } else { 0 };
        match length.checked_sub(start + after) {
            None | Some(0) => wrong(4, "a PDU that ends before its data"),
            Some(length) if length > most_data => {
                let what = "more data in a PDU than agreed";
                Err(Malformed { status: fatal::LIMIT_EXCEEDED, field: 0, what })
            }
            Some(length) => Ok(Payload { start, length }),
        }
    }
}

/// The place of the data in a PDU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Payload {
    /// Offset of the data from the PDU's start, in bytes.
    pub start: usize,
    /// Length of the data, in bytes; 0 without data.
    pub length: usize,
}

/// An error in a PDU's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Malformed {
    /// The status to report, see [`fatal`].
    pub status: u16,
    /// The offset of the invalid field.
    pub field: u32,
    /// Description of the error.
    pub what: &'static str,
}

impl IcReq {
    /// Makes the request of a host that needs no alignment and accepts one R2T at a time for a
    /// command; see [`digests`].
    pub fn new(digests: u8) -> Self {
        Self {
            header: CommonHeader::bare(kind::IC_REQ, IC_LENGTH),
            format: U16::ZERO,
            alignment: 0,
            digests,
            max_r2t: U32::ZERO,
            reserved: [0; 112],
        }
    }
}
