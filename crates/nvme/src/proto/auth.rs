//! Messages of in-band authentication by DH-HMAC-CHAP (Base, section 8.13.5 "DH-HMAC-CHAP
//! Protocol").

use aquifer_transport::layout;
use zerocopy::byteorder::little_endian::{U16, U32};

/// Message types in two bytes: the authentication type and the message identifier (Base,
/// section 8.13.4, "Authentication Type", "Authentication Identifier").
pub mod message {
    /// From the host: the protocols, hashes and groups that it offers.
    pub const NEGOTIATE: [u8; 2] = [0x00, 0x00];
    /// From the controller: the demand for the host's proof.
    pub const CHALLENGE: [u8; 2] = [0x01, 0x01];
    /// From the host: its proof, and possibly a challenge to the controller.
    pub const REPLY: [u8; 2] = [0x01, 0x02];
    /// From the controller: the host's proof is right; possibly with the controller's proof.
    pub const SUCCESS1: [u8; 2] = [0x01, 0x03];
    /// From the host: the controller's proof is right.
    pub const SUCCESS2: [u8; 2] = [0x01, 0x04];
    /// From the controller: the authentication failed.
    pub const FAILURE1: [u8; 2] = [0x00, 0xF0];
    /// From the host: the authentication failed.
    pub const FAILURE2: [u8; 2] = [0x00, 0xF1];
}

/// Reasons of a failed authentication (Base, section 8.13.4, "Failure Reason Code Explanation").
pub mod failure {
    /// The reason code; all others here are its explanations.
    pub const AUTHENTICATION: u8 = 0x01;
    /// The proof is wrong.
    pub const FAILED: u8 = 0x01;
    /// No protocol in common.
    pub const NO_PROTOCOL: u8 = 0x02;
    /// A secure channel is demanded, and there is none.
    pub const NO_SECURE_CHANNEL: u8 = 0x03;
    /// No hash in common.
    pub const NO_HASH: u8 = 0x04;
    /// No Diffie-Hellman group in common.
    pub const NO_GROUP: u8 = 0x05;
    /// The message is malformed.
    pub const PAYLOAD: u8 = 0x06;
    /// The message does not fit the state of the protocol.
    pub const MESSAGE: u8 = 0x07;
}

/// The identifier of DH-HMAC-CHAP in [`Protocol`].
pub const DH_HMAC_CHAP: u8 = 0x01;
/// The size of the list of hashes, and of groups, in [`Protocol`].
pub const NAMES: usize = 30;

layout!(
    /// The start of every message.
    Start, 6 {
        /// The type, see [`message`].
        message: [u8; 2],
        /// Zero.
        reserved: [u8; 2],
        /// The transaction identifier, chosen by the host.
        transaction: U16,
    }
);

impl Start {
    /// Makes the start of a message of this type.
    pub fn new(message: [u8; 2], transaction: u16) -> Self {
        Self { message, reserved: [0; 2], transaction: transaction.into() }
    }
}

layout!(
    /// Start of a negotiation; [`Protocol`]s follow (Base, section 8.13.4, "AUTH_Negotiate
    /// message").
    Negotiate, 8 {
        /// [`message::NEGOTIATE`].
        start: Start,
        /// The secure channel wanted; 0 is none.
        secure_channel: u8,
        /// The number of protocols that follow.
        protocols: u8,
    }
);
layout!(
    /// A protocol that the host offers (Base, section 8.13.5, "Authentication protocol
    /// descriptor").
    Protocol, 64 {
        /// [`DH_HMAC_CHAP`].
        id: u8,
        /// Zero.
        reserved: u8,
        /// The number of hashes.
        hash_count: u8,
        /// The number of groups.
        group_count: u8,
        /// Identifiers of the hashes, the most wanted first.
        hashes: [u8; NAMES],
        /// Identifiers of the groups, the most wanted first.
        groups: [u8; NAMES],
    }
);
layout!(
    /// A challenge. The challenge value and the controller's exponential follow (Base,
    /// section 8.13.5, "DH-HMAC-CHAP_Challenge message").
    Challenge, 16 {
        /// [`message::CHALLENGE`].
        start: Start,
        /// Length of the hash and of the challenge value, in bytes.
        hash_length: u8,
        /// Zero.
        reserved_7: u8,
        /// The hash's identifier.
        hash: u8,
        /// The group's identifier.
        group: u8,
        /// Length of the exponential, in bytes.
        exponential: U16,
        /// The controller's sequence number.
        sequence: U32,
    }
);
layout!(
    /// The host's proof. The response value, the host's challenge value and its exponential follow
    /// (Base, section 8.13.5, "DH-HMAC-CHAP_Reply message").
    Reply, 16 {
        /// [`message::REPLY`].
        start: Start,
        /// Length of the hash, the response value and the challenge value, in bytes.
        hash_length: u8,
        /// Zero.
        reserved_7: u8,
        /// 1 demands the controller's proof; 0 goes with a challenge value of zeroes.
        challenged: u8,
        /// Zero.
        reserved_9: u8,
        /// Length of the exponential, in bytes.
        exponential: U16,
        /// The host's sequence number; not 0 with a challenge.
        sequence: U32,
    }
);
layout!(
    /// The controller's success; its response value follows (Base, section 8.13.5,
    /// "DH-HMAC-CHAP_Success1 message"). The host's has the same form ("DH-HMAC-CHAP_Success2
    /// message").
    Success, 16 {
        /// [`message::SUCCESS1`] or [`message::SUCCESS2`].
        start: Start,
        /// Length of the hash, in bytes; 0 from the host.
        hash_length: u8,
        /// Zero.
        reserved_7: u8,
        /// 1 if a response value follows, else 0.
        responded: u8,
        /// Zero.
        reserved_9: [u8; 7],
    }
);
layout!(
    /// A failure (Base, section 8.13.4, "AUTH_Failure1 message", "AUTH_Failure2 message").
    Failure, 8 {
        /// [`message::FAILURE1`] or [`message::FAILURE2`].
        start: Start,
        /// [`failure::AUTHENTICATION`].
        code: u8,
        /// The explanation, see [`failure`].
        explanation: u8,
    }
);

impl Failure {
    /// Makes a failure with this explanation, see [`failure`].
    pub fn new(message: [u8; 2], transaction: u16, explanation: u8) -> Self {
        let start = Start::new(message, transaction);
        Self { start, code: failure::AUTHENTICATION, explanation }
    }
}
