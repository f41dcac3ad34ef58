//! Record protection (RFC 8446 section 5.2): key, nonce and count of one direction, in place.

use std::fmt;

use ring::aead::{
    AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey,
};
use rustls::ConnectionTrafficSecrets;

/// Bytes of a record's header: type, legacy version, length.
pub(super) const HEADER: usize = 5;
/// Bytes of the tag that every supported AEAD adds.
pub(super) const TAG: usize = 16;
/// The most plaintext in a record, in bytes (RFC 8446 section 5.1).
pub(super) const MAX_PLAINTEXT: usize = 1 << 14;
/// The most bytes after a record's header (RFC 8446 section 5.2).
pub(super) const MAX_CIPHERTEXT: usize = MAX_PLAINTEXT + 256;

/// Content types of records (`ContentType`, RFC 8446 appendix B.1).
pub(super) mod content {
    pub const ALERT: u8 = 21;
    pub const HANDSHAKE: u8 = 22;
    pub const APPLICATION_DATA: u8 = 23;
}

/// The key of one direction of a connection, and the number of records that it has protected.
pub(super) struct RecordKey {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    sequence: u64,
}

impl fmt::Debug for RecordKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordKey").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl RecordKey {
    /// Makes the key from secrets of the handshake or of a key update; `None` for an unsupported
    /// cipher.
    pub(super) fn new((sequence, secrets): (u64, ConnectionTrafficSecrets)) -> Option<Self> {
        let (algorithm, key, iv) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return None,
        };
        let key = LessSafeKey::new(UnboundKey::new(algorithm, key.as_ref()).ok()?);
        Some(Self { key, iv: iv.as_ref().try_into().ok()?, sequence })
    }

    /// Returns the number of records that the key has protected.
    pub(super) fn used(&self) -> u64 {
        self.sequence
    }

    /// Returns the nonce of the next record (RFC 8446 section 5.3).
    ///
    /// The nonce is the record's number, big-endian and left-padded with zeroes, XORed with the IV.
    fn next_nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[NONCE_LEN - 8..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= number;
        }
        self.sequence += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Encrypts `record` in place and returns its total length.
    ///
    /// The plaintext is `len` bytes from [`HEADER`] on. `record` has space for the header before
    /// it, and for one byte and the [`TAG`] after it.
    pub(super) fn seal(&mut self, record: &mut [u8], len: usize, content: u8) -> usize {
        let (header, body) = record.split_at_mut(HEADER);
        let total = len + 1 + TAG;
        header.copy_from_slice(&[content::APPLICATION_DATA, 3, 3, (total >> 8) as u8, total as u8]);
        body[len] = content;
        let (inner, tag) = body.split_at_mut(len + 1);
        let nonce = self.next_nonce();
        let made = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(&*header), inner)
            .expect("a record is far below the longest message of any AEAD");
        tag[..TAG].copy_from_slice(made.as_ref());
        HEADER + total
    }

    /// Decrypts a whole record in place; returns the plaintext's length and content type.
    ///
    /// The plaintext begins at [`HEADER`]. `None` if the record is modified, out of order, or
    /// encrypted with another key.
    pub(super) fn open(&mut self, record: &mut [u8]) -> Option<(usize, u8)> {
        let nonce = self.next_nonce();
        let (header, body) = record.split_at_mut(HEADER);
        let inner = self.key.open_in_place(nonce, Aad::from(&*header), body).ok()?;
        // RFC 8446 section 5.4: zeroes after the content type are padding.
        let at = inner.iter().rposition(|&byte| byte != 0)?;
        Some((at, inner[at]))
    }
}
