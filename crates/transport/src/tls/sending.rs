//! Records of a stream that wait to be sent, and their encryption.

use std::ops::Range;

use super::keys::{HEADER, MAX_CIPHERTEXT, MAX_PLAINTEXT, RecordKey, TAG};

/// Bytes that one send can take: eight records of the largest size.
const OUTBOX: usize = 8 * (HEADER + MAX_CIPHERTEXT);

/// Encrypted records that are not sent yet.
pub(super) struct Sending {
    pub(super) key: RecordKey,
    pub(super) buffer: Box<[u8]>,
    pub(super) ready: Range<usize>,
    /// The number of records that a key may protect (RFC 8446 section 5.5).
    pub(super) key_life: u64,
    /// The peer demands a key update before our next data (RFC 8446 section 4.6.3).
    pub(super) update_owed: bool,
}

impl Sending {
    pub(super) fn new(key: RecordKey, key_life: u64) -> Self {
        let buffer = vec![0; OUTBOX].into_boxed_slice();
        Self { key, buffer, ready: 0..0, key_life, update_owed: false }
    }

    /// Returns whether a key update and a record of the largest size fit.
    pub(super) fn has_room(&self) -> bool {
        self.buffer.len() - self.ready.end >= 2 * (HEADER + TAG + 1) + 5 + MAX_PLAINTEXT
    }

    pub(super) fn plaintext_area(&mut self) -> &mut [u8] {
        &mut self.buffer[self.ready.end + HEADER..][..MAX_PLAINTEXT]
    }

    /// Encrypts the first `len` bytes of the plaintext area.
    pub(super) fn seal(&mut self, len: usize, content: u8) {
        let end = self.ready.end;
        self.ready.end += self.key.seal(&mut self.buffer[end..], len, content);
    }
}
