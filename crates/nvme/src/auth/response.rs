//! Responses to challenges.

use super::{Hash, Secret};
use crate::proto::Nqn;

/// The side that proves its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The host.
    Host,
    /// The controller.
    Controller,
}

/// The input of a response to a challenge (Base, section 8.13.5, "DH-HMAC-CHAP_Reply message",
/// "DH-HMAC-CHAP_Success1 message").
#[derive(Clone, Copy, Debug)]
pub struct Response<'a> {
    /// The side that responds.
    pub side: Side,
    /// The negotiated hash function.
    pub hash: Hash,
    /// The secret of the side that responds.
    pub secret: &'a Secret,
    /// The challenge value, of the length of a hash.
    pub challenge: &'a [u8],
    /// The key of the Diffie-Hellman exchange; `None` with the null group.
    pub key: Option<&'a [u8]>,
    /// The challenger's sequence number.
    pub sequence: u32,
    /// The transaction identifier.
    pub transaction: u16,
    /// The secure channel of the negotiation; 0 is none.
    pub secure_channel: u8,
    /// The host's name.
    pub host: &'a Nqn,
    /// The subsystem's name.
    pub subsystem: &'a Nqn,
}

impl Response<'_> {
    /// Returns the response value.
    pub fn value(&self) -> Vec<u8> {
        self.hash.hmac(&self.secret.for_owner(self.owner()), &self.message())
    }

    /// Returns whether `value` is the response value, in constant time.
    pub fn is(&self, value: &[u8]) -> bool {
        self.hash.is_hmac(&self.secret.for_owner(self.owner()), &self.message(), value)
    }

    fn owner(&self) -> &Nqn {
        match self.side {
            Side::Host => self.host,
            Side::Controller => self.subsystem,
        }
    }

    fn message(&self) -> Vec<u8> {
        let (host, subsystem) = (self.host.as_str().as_bytes(), self.subsystem.as_str().as_bytes());
        let (role, first, second, secure_channel) = match self.side {
            Side::Host => (&b"HostHost"[..], host, subsystem, self.secure_channel),
            Side::Controller => (&b"Controller"[..], subsystem, host, 0),
        };
        let augmented = match self.key {
            None => self.challenge.to_vec(),
            Some(key) => self.hash.hmac(&self.hash.digest(key), self.challenge),
        };
        [
            &augmented[..],
            &self.sequence.to_le_bytes(),
            &self.transaction.to_le_bytes(),
            &[secure_channel],
            role,
            first,
            &[0],
            second,
        ]
        .concat()
    }
}
