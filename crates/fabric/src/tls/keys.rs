//! Record protection, RFC 8446 section 5.2: one direction's key, nonce and count, sealing and opening in place.

use std::fmt;

use ring::aead::{
    AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey,
};
use rustls::ConnectionTrafficSecrets;

/// Bytes of a record before what is encrypted: type, legacy version, length.
pub(super) const HEADER: usize = 5;
/// Bytes that every supported AEAD adds.
pub(super) const TAG: usize = 16;
/// The most a record may carry (section 5.1).
pub(super) const MAX_PLAINTEXT: usize = 1 << 14;
/// The most a record may take after its header (section 5.2).
pub(super) const MAX_CIPHERTEXT: usize = MAX_PLAINTEXT + 256;

/// What a record is about (`ContentType`, appendix B.1).
pub(super) mod content {
    pub const ALERT: u8 = 21;
    pub const HANDSHAKE: u8 = 22;
    pub const APPLICATION_DATA: u8 = 23;
}

/// The key of one direction of a connection, and how many records it has protected.
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
    /// The key for secrets that the handshake, or a key update, gave; `None` for a cipher that is not ours.
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

    /// Records protected so far.
    pub(super) fn used(&self) -> u64 {
        self.sequence
    }

    /// Section 5.3: the record's number, big-endian, padded on the left, exclusive-or the initialisation vector.
    fn next_nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[NONCE_LEN - 8..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= number;
        }
        self.sequence += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Makes a record of `record`, whose bytes from [`HEADER`] on hold `len` bytes of plaintext, and which has room for
    /// the header before and one byte and the [`TAG`] after it. Returns the record's length.
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

    /// Opens a whole record in place. Returns the length of the plaintext, which begins at [`HEADER`], and the kind of
    /// content; `None` when it was not sealed with this key, at this place in the order, unchanged.
    pub(super) fn open(&mut self, record: &mut [u8]) -> Option<(usize, u8)> {
        let nonce = self.next_nonce();
        let (header, body) = record.split_at_mut(HEADER);
        let inner = self.key.open_in_place(nonce, Aad::from(&*header), body).ok()?;
        // Section 5.4: zeros after the content type are padding.
        let at = inner.iter().rposition(|&byte| byte != 0)?;
        Some((at, inner[at]))
    }
}
