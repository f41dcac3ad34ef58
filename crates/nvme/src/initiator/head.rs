//! The part of a PDU before its data.

use zerocopy::byteorder::little_endian::U32;
use zerocopy::{Immutable, IntoBytes};

use crate::proto::command::DsmRange;
use crate::proto::digest;
use crate::proto::pdu::{DIGEST, MAX_ALIGNMENT};

/// The largest data offset, in bytes: two alignments hold any header with its digest.
const MOST_OFFSET: usize = (MAX_ALIGNMENT as usize + 1) * 4;

/// The bytes of a PDU before its data (header, its digest, padding) and the digest behind the data.
pub(super) struct Head {
    bytes: [u8; MOST_OFFSET + size_of::<DsmRange>() + DIGEST],
    length: usize,
    pub(super) digest: U32,
}

impl Head {
    pub(super) const EMPTY: Self = Self {
        bytes: [0; MOST_OFFSET + size_of::<DsmRange>() + DIGEST],
        length: 0,
        digest: U32::ZERO,
    };

    /// Starts a PDU with this header, and pads it to `data_offset`, which is 0 without data.
    pub(super) fn start(
        &mut self,
        pdu: &(impl IntoBytes + Immutable),
        header_digest: bool,
        data_offset: u8,
    ) {
        self.length = 0;
        self.push(pdu.as_bytes());
        if header_digest {
            self.push(digest::of(pdu.as_bytes()).as_bytes());
        }
        let padded = self.length.max(data_offset.into());
        self.bytes[self.length..padded].fill(0);
        self.length = padded;
    }

    /// Appends a few bytes of data.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.length..][..bytes.len()].copy_from_slice(bytes);
        self.length += bytes.len();
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}
