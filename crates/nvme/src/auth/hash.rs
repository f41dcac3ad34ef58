//! Hash functions of DH-HMAC-CHAP.

use ring::{digest, hmac};

/// A hash function (Base, section 8.13.5, "Hash function identifiers").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hash {
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

impl Hash {
    /// All hash functions, ordered by identifier.
    pub const ALL: [Self; 3] = [Self::Sha256, Self::Sha384, Self::Sha512];

    /// Returns the function's identifier.
    pub fn id(self) -> u8 {
        match self {
            Self::Sha256 => 1,
            Self::Sha384 => 2,
            Self::Sha512 => 3,
        }
    }

    /// Returns the function with this identifier.
    pub fn with_id(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|hash| hash.id() == id)
    }

    /// Returns the size of a hash in bytes.
    pub fn length(self) -> usize {
        self.digest_algorithm().output_len()
    }

    pub(super) fn digest(self, bytes: &[u8]) -> Vec<u8> {
        digest::digest(self.digest_algorithm(), bytes).as_ref().to_vec()
    }

    pub(super) fn hmac(self, key: &[u8], message: &[u8]) -> Vec<u8> {
        hmac::sign(&hmac::Key::new(self.hmac_algorithm(), key), message).as_ref().to_vec()
    }

    /// Returns whether `hmac` is the message's HMAC, in constant time.
    pub(super) fn is_hmac(self, key: &[u8], message: &[u8], hmac: &[u8]) -> bool {
        hmac::verify(&hmac::Key::new(self.hmac_algorithm(), key), message, hmac).is_ok()
    }

    fn digest_algorithm(self) -> &'static digest::Algorithm {
        match self {
            Self::Sha256 => &digest::SHA256,
            Self::Sha384 => &digest::SHA384,
            Self::Sha512 => &digest::SHA512,
        }
    }

    fn hmac_algorithm(self) -> hmac::Algorithm {
        match self {
            Self::Sha256 => hmac::HMAC_SHA256,
            Self::Sha384 => hmac::HMAC_SHA384,
            Self::Sha512 => hmac::HMAC_SHA512,
        }
    }
}
