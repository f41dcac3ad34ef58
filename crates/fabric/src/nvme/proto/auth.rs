//! Messages of in-band authentication by DH-HMAC-CHAP (Base, section 8.13.5 "DH-HMAC-CHAP Protocol").

use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Types of message, in two bytes: the kind of protocol, and the message (Base, section 8.13.4, "Authentication Type",
/// "Authentication Identifier").
pub mod message {
    /// Host: what it can do.
    pub const NEGOTIATE: [u8; 2] = [0x00, 0x00];
    /// Controller: prove who you are.
    pub const CHALLENGE: [u8; 2] = [0x01, 0x01];
    /// Host: the proof; maybe prove who you are.
    pub const REPLY: [u8; 2] = [0x01, 0x02];
    /// Controller: it is right; maybe the proof.
    pub const SUCCESS1: [u8; 2] = [0x01, 0x03];
    /// Host: that is right too.
    pub const SUCCESS2: [u8; 2] = [0x01, 0x04];
    /// Controller: it failed.
    pub const FAILURE1: [u8; 2] = [0x00, 0xF0];
    /// Host: it failed.
    pub const FAILURE2: [u8; 2] = [0x00, 0xF1];
}

/// Why an authentication failed (Base, section 8.13.4, "Failure Reason Code Explanation").
pub mod failure {
    /// The code of them all.
    pub const AUTHENTICATION: u8 = 0x01;
    /// The proof is wrong.
    pub const FAILED: u8 = 0x01;
    /// No common protocol.
    pub const NO_PROTOCOL: u8 = 0x02;
    /// A secure channel is wanted, of which there is none.
    pub const NO_SECURE_CHANNEL: u8 = 0x03;
    /// No common hash.
    pub const NO_HASH: u8 = 0x04;
    /// No common Diffie-Hellman group.
    pub const NO_GROUP: u8 = 0x05;
    /// The message is malformed.
    pub const PAYLOAD: u8 = 0x06;
    /// The message must not come now.
    pub const MESSAGE: u8 = 0x07;
}

/// The protocol's identifier in [`Protocol`].
pub const DH_HMAC_CHAP: u8 = 0x01;
/// Places for hashes and for groups in [`Protocol`].
pub const NAMES: usize = 30;

layout!(
    /// Start of a negotiation; [`Protocol`]s follow (Base, section 8.13.4, "AUTH_Negotiate message").
    Negotiate, 8 {
        /// [`message::NEGOTIATE`].
        message: [u8; 2],
        /// Zero.
        reserved: [u8; 2],
        /// The transaction, chosen by the host.
        transaction: U16,
        /// The secure channel that is wanted: 0 is none.
        secure_channel: u8,
        /// Protocols that follow.
        protocols: u8,
    }
);
layout!(
    /// A protocol that the host can use (Base, section 8.13.5, "Authentication protocol descriptor").
    Protocol, 64 {
        /// [`DH_HMAC_CHAP`].
        id: u8,
        /// Zero.
        reserved: u8,
        /// Hashes.
        hash_count: u8,
        /// Groups.
        group_count: u8,
        /// The hashes' identifiers, the best first.
        hashes: [u8; NAMES],
        /// The groups' identifiers, the best first.
        groups: [u8; NAMES],
    }
);
layout!(
    /// A challenge: the challenge value and the controller's exponential follow (Base, section 8.13.5,
    /// "DH-HMAC-CHAP_Challenge message").
    Challenge, 16 {
        /// [`message::CHALLENGE`].
        message: [u8; 2],
        /// Zero.
        reserved: [u8; 2],
        /// The transaction.
        transaction: U16,
        /// Bytes of the hash and of the challenge value.
        hash_length: u8,
        /// Zero.
        reserved_7: u8,
        /// The hash.
        hash: u8,
        /// The group.
        group: u8,
        /// Bytes of the exponential.
        exponential: U16,
        /// The sequence number.
        sequence: U32,
    }
);
layout!(
    /// The proof: response value, the host's challenge value and its exponential follow (Base, section 8.13.5,
    /// "DH-HMAC-CHAP_Reply message").
    Reply, 16 {
        /// [`message::REPLY`].
        message: [u8; 2],
        /// Zero.
        reserved: [u8; 2],
        /// The transaction.
        transaction: U16,
        /// Bytes of the hash, the response value and the challenge value.
        hash_length: u8,
        /// Zero.
        reserved_7: u8,
        /// 1 if the controller is to prove who it is; else the challenge value is zero.
        challenged: u8,
        /// Zero.
        reserved_9: u8,
        /// Bytes of the exponential.
        exponential: U16,
        /// The host's sequence number.
        sequence: U32,
    }
);
layout!(
    /// The controller's success, its response value follows (Base, section 8.13.5, "DH-HMAC-CHAP_Success1 message"). The
    /// host's ("DH-HMAC-CHAP_Success2 message") looks alike.
    Success, 16 {
        /// [`message::SUCCESS1`] or [`message::SUCCESS2`].
        message: [u8; 2],
        /// Zero.
        reserved: [u8; 2],
        /// The transaction.
        transaction: U16,
        /// Bytes of the hash; of the host zero.
        hash_length: u8,
        /// Zero.
        reserved_7: u8,
        /// 1 if a response value follows.
        responded: u8,
        /// Zero.
        reserved_9: [u8; 7],
    }
);
layout!(
    /// A failure (Base, section 8.13.4, "AUTH_Failure1 message", "AUTH_Failure2 message").
    Failure, 8 {
        /// [`message::FAILURE1`] or [`message::FAILURE2`].
        message: [u8; 2],
        /// Zero.
        reserved: [u8; 2],
        /// The transaction.
        transaction: U16,
        /// [`failure::AUTHENTICATION`].
        code: u8,
        /// See [`failure`].
        explanation: u8,
    }
);
