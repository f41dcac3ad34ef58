//! What is to be sent on a stream of records, and sealing it.

use std::ops::Range;

use super::keys::{HEADER, MAX_CIPHERTEXT, MAX_PLAINTEXT, RecordKey, TAG};

/// What one send can take: eight records of the largest size.
const OUTBOX: usize = 8 * (HEADER + MAX_CIPHERTEXT);

/// What is sealed and not yet sent.
pub(super) struct Sending {
    pub(super) key: RecordKey,
    pub(super) buffer: Box<[u8]>,
    pub(super) ready: Range<usize>,
    /// Records that a key may protect (section 5.5).
    pub(super) key_life: u64,
    /// The peer updated its keys and wants ours updated before our next data (section 4.6.3).
    pub(super) update_owed: bool,
}

impl Sending {
    pub(super) fn new(key: RecordKey, key_life: u64) -> Self {
        let buffer = vec![0; OUTBOX].into_boxed_slice();
        Self { key, buffer, ready: 0..0, key_life, update_owed: false }
    }

    /// Whether a key update and a record of the largest size fit.
    pub(super) fn has_room(&self) -> bool {
        self.buffer.len() - self.ready.end >= 2 * (HEADER + TAG + 1) + 5 + MAX_PLAINTEXT
    }

    pub(super) fn plaintext_area(&mut self) -> &mut [u8] {
        &mut self.buffer[self.ready.end + HEADER..][..MAX_PLAINTEXT]
    }

    /// Seals the first `len` bytes of the plaintext area.
    pub(super) fn seal(&mut self, len: usize, content: u8) {
        let end = self.ready.end;
        self.ready.end += self.key.seal(&mut self.buffer[end..], len, content);
    }
}
