use zerocopy::byteorder::little_endian::U32;
use zerocopy::{Immutable, IntoBytes};

use crate::nvme::proto::command::DsmRange;
use crate::nvme::proto::digest;
use crate::nvme::proto::pdu::{DIGEST, MAX_ALIGNMENT};

/// The furthest that data can start behind a header: two alignments hold any header with its digest.
const MOST_OFFSET: usize = (MAX_ALIGNMENT as usize + 1) * 4;

/// What a PDU has before its data: the header, its digest, padding; and what comes behind the data, its digest.
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

    /// Starts a PDU with this header, and pads it up to where its data starts, if it has any.
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

    /// Adds a little data.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.length..][..bytes.len()].copy_from_slice(bytes);
        self.length += bytes.len();
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}
