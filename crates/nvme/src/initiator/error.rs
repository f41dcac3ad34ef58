//! Errors of the initiator.

use std::io;
use std::mem::offset_of;
use std::time::Duration;

use aquifer_transport::initiating::{self, Failure as _, Interrupted};
use aquifer_transport::initiator::Outcome;

use super::Target;
use crate::proto::fabrics::{ConnectData, connect};
use crate::proto::pdu::Malformed;
use crate::proto::{Completion, NvmeStatus};

/// A failure, with the subsystem that it concerns. One that ends the connection ends its controller
/// too.
pub type NvmeError = initiating::Failed<Target, Failure>;

/// A failure in the use of a namespace.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The target could not be reached.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// The subsystem does not exist, or not for this host.
    #[error(
        "the target refuses: there is no such subsystem, or not for this host; list the target's \
         exports"
    )]
    Unknown,
    /// The target does not let this host use the namespace, or cannot serve it as needed.
    #[error("the target refuses: {0}")]
    Refused(String),
    /// The namespace belongs to another owner, which the text names.
    #[error("{0}")]
    Claimed(String),
    /// The host could not prove its name to the controller, or the controller its name to the host.
    #[error("authentication failed: {0}")]
    Authentication(String),
    /// The connection broke.
    #[error("connection lost: {0}")]
    Lost(#[source] io::Error),
    /// The target did not send all of its answer within this timeout.
    #[error("no answer for {0:?}")]
    Silent(Duration),
    /// The target broke the protocol.
    #[error("the target violates the NVMe/TCP protocol: {0}")]
    Protocol(String),
    /// The target ended the connection and reported a protocol error of ours (TCP, Figure 23
    /// "C2HTermReq").
    #[error(
        "the target reports that this host violates the NVMe/TCP protocol: fatal error status \
         {status:#x}, information {information:#x}"
    )]
    Accused {
        /// The fatal error status.
        status: u16,
        /// The fatal error information.
        information: u32,
    },
    /// A digest was wrong: over a header, or over data, as the text says.
    #[error("the network damaged {0}")]
    Damaged(&'static str),
    /// The controller had ended before the call.
    #[error("the connection failed earlier")]
    Broken,
    /// The request exceeds the namespace.
    #[error("a request of {length} bytes at {offset} does not fit the namespace of {size} bytes")]
    OutOfRange {
        /// The request's first byte.
        offset: u64,
        /// Length of the request in bytes.
        length: u64,
        /// Size of the namespace in bytes.
        size: u64,
    },
    /// The request does not cover whole blocks.
    #[error("a request of {length} bytes at {offset} is not aligned to blocks of {block} bytes")]
    Unaligned {
        /// The request's first byte.
        offset: u64,
        /// Length of the request in bytes.
        length: u64,
        /// Size of a block in bytes.
        block: u64,
    },
    /// The request is longer than the controller accepts.
    #[error("a request of {length} bytes is longer than the {most} that the controller takes")]
    TooLong {
        /// Length of the request in bytes.
        length: u64,
        /// The longest request that the controller accepts, in bytes.
        most: u64,
    },
    /// The namespace has no room left.
    #[error("no space left: {0}")]
    NoSpace(NvmeStatus),
    /// The controller lacks this function.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
    /// A command ended with any other status.
    #[error("{0}")]
    Remote(NvmeStatus),
}

impl Failure {
    /// Translates a status other than success.
    pub(super) fn from_status(status: NvmeStatus) -> Self {
        match NvmeStatus(status.code()) {
            NvmeStatus::CAPACITY_EXCEEDED => Self::NoSpace(status),
            // The target reports a wrong digest over data of ours by this status.
            NvmeStatus::TRANSIENT_TRANSPORT => Self::Damaged("data to be written"),
            NvmeStatus::INVALID_OPCODE => {
                Self::Unsupported("the controller does not know the command")
            }
            _ => Self::Remote(status),
        }
    }

    /// Translates the completion of a refused Connect.
    pub(super) fn from_connect(completion: &Completion, target: &Target) -> Self {
        let status = completion.status();
        let result = completion.result.get() as u32;
        let in_data =
            |offset: usize| result & connect::IN_DATA != 0 && result & 0xFFFF == offset as u32;
        let host = &target.host;
        Self::Refused(match NvmeStatus(status.code()) {
            NvmeStatus::CONNECT_INVALID if in_data(offset_of!(ConnectData, subsystem)) => {
                return Self::Unknown;
            }
            NvmeStatus::CONNECT_INVALID_HOST => {
                format!(
                    "host {host} is not allowed to use it: allow it on the target, or give the \
                     host name that the target allows"
                )
            }
            NvmeStatus::CONNECT_BUSY => {
                format!("it accepts no more controllers or queues, as its log explains ({status})")
            }
            NvmeStatus::AUTHENTICATION_REQUIRED => {
                format!("host {host} must authenticate: give its secret")
            }
            _ => format!("{status} ({result:#x})"),
        })
    }
}

impl initiating::Failure for Failure {
    const BROKEN: Self = Self::Broken;

    fn protocol(what: impl Into<String>) -> Self {
        Self::Protocol(what.into())
    }

    fn outcome(&self) -> Outcome {
        match self {
            Self::NoSpace(_) => Outcome::NoSpace,
            Self::Unknown => Outcome::Unknown,
            Self::Claimed(_) => Outcome::Claimed,
            Self::Connect(_) | Self::Refused(_) | Self::Authentication(_) => Outcome::Ended,
            Self::Lost(_) | Self::Silent(_) | Self::Protocol(_) => Outcome::Ended,
            Self::Accused { .. } | Self::Damaged(_) | Self::Broken => Outcome::Ended,
            Self::OutOfRange { .. } | Self::Unaligned { .. } => Outcome::Refused,
            Self::TooLong { .. } | Self::Unsupported(_) | Self::Remote(_) => Outcome::Refused,
        }
    }
}

impl From<Interrupted> for Failure {
    fn from(interrupted: Interrupted) -> Self {
        match interrupted {
            Interrupted::Lost(error) => Self::Lost(error),
            Interrupted::Silent(io_timeout) => Self::Silent(io_timeout),
        }
    }
}

impl From<Malformed> for Failure {
    fn from(malformed: Malformed) -> Self {
        Self::protocol(malformed.what)
    }
}
