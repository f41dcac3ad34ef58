use std::io;
use std::mem::offset_of;
use std::sync::Arc;
use std::time::Duration;

use aquifer_page::Incarnation;

use super::Target;
use crate::initiating::Interrupted;
use crate::nvme::proto::fabrics::{ConnectData, connect};
use crate::nvme::proto::pdu::Malformed;
use crate::nvme::proto::{Completion, Status};

/// What went wrong, and with which subsystem.
#[derive(Debug, thiserror::Error)]
#[error("{target}: {failure}")]
pub struct NvmeError {
    /// The subsystem.
    pub target: Arc<Target>,
    /// What went wrong.
    #[source]
    pub failure: Failure,
}

/// What went wrong with a namespace.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The target could not be reached.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// There is no such subsystem, or not for this host.
    #[error(
        "the target refuses: there is no such subsystem, or not for this host: see what the target exports"
    )]
    Unknown,
    /// The target does not let us use the namespace, or cannot serve it as we need it.
    #[error("the target refuses: {0}")]
    Refused(String),
    /// The namespace is the owner's that this names, and not ours.
    #[error("{0}")]
    Claimed(String),
    /// The pages that were there are gone: these are others.
    #[error(
        "the lender was started anew and has lost all that it held (it is incarnation {found}, not {expected})"
    )]
    Forgot {
        /// Of the pages that were there.
        expected: Incarnation,
        /// Of those that are there, or why they are not the same.
        found: String,
    },
    /// This host could not prove who it is, or the controller who it is.
    #[error("authentication failed: {0}")]
    Authentication(String),
    /// The connection broke.
    #[error("connection lost: {0}")]
    Lost(#[source] io::Error),
    /// The target did not answer in time, or not to the end.
    #[error("no answer for {0:?}")]
    Silent(Duration),
    /// The target broke the protocol.
    #[error("the target does not keep to the NVMe/TCP protocol: {0}")]
    Protocol(String),
    /// The target ended the connection because it thinks that we broke the protocol (TCP, Figure 23 "C2HTermReq").
    #[error(
        "the target says that we do not keep to the NVMe/TCP protocol: fatal error status {status:#x}, information {information:#x}"
    )]
    Accused {
        /// The fatal error status.
        status: u16,
        /// The fatal error information.
        information: u32,
    },
    /// A digest was wrong.
    #[error("{0} was damaged on its way")]
    Damaged(&'static str),
    /// The controller ended earlier.
    #[error("the connection failed earlier")]
    Broken,
    /// The request is not inside the namespace.
    #[error("a request of {length} bytes at {offset} does not fit the namespace of {size} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Bytes in the namespace.
        size: u64,
    },
    /// The request is not one for whole blocks.
    #[error("a request of {length} bytes at {offset} is not one for whole blocks of {block} bytes")]
    Unaligned {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Bytes of a block.
        block: u64,
    },
    /// The request is longer than the controller takes.
    #[error("a request of {length} bytes is longer than the {most} that the controller takes")]
    TooLong {
        /// Bytes.
        length: u64,
        /// The most bytes.
        most: u64,
    },
    /// The namespace has no room left.
    #[error("no space left: {0}")]
    NoSpace(Status),
    /// The namespace cannot do this.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
    /// Any other status of a command.
    #[error("{0}")]
    Remote(Status),
}

impl NvmeError {
    pub(super) fn new(target: &Arc<Target>, failure: Failure) -> Self {
        Self { target: Arc::clone(target), failure }
    }

    /// Whether the connection, and with it the controller, is of no further use (a new one may be).
    pub fn ends_connection(&self) -> bool {
        self.failure.ends_connection()
    }

    /// Whether the target has said that what this host stored there is gone, or another's by now. Asked of a target that
    /// had the subsystem before: a subsystem of ours that has lost its pages comes back under another name.
    pub fn is_loss(&self) -> bool {
        matches!(self.failure, Failure::Unknown | Failure::Claimed(_) | Failure::Forgot { .. })
    }

    /// Whether the namespace has no room for what was written.
    pub fn is_no_space(&self) -> bool {
        matches!(self.failure, Failure::NoSpace(_))
    }
}

impl Failure {
    pub(super) fn ends_connection(&self) -> bool {
        match self {
            Self::Connect(_) | Self::Refused(_) | Self::Unknown | Self::Authentication(_) => true,
            Self::Lost(_) | Self::Claimed(_) | Self::Forgot { .. } => true,
            Self::Silent(_)
            | Self::Protocol(_)
            | Self::Accused { .. }
            | Self::Damaged(_)
            | Self::Broken => true,
            Self::OutOfRange { .. } | Self::Unaligned { .. } | Self::TooLong { .. } => false,
            Self::NoSpace(_) | Self::Unsupported(_) | Self::Remote(_) => false,
        }
    }

    pub(super) fn protocol(what: impl Into<String>) -> Self {
        Self::Protocol(what.into())
    }

    /// What a status that is not a success means.
    pub(super) fn from_status(status: Status) -> Self {
        match Status(status.code()) {
            Status::CAPACITY_EXCEEDED => Self::NoSpace(status),
            // What a target says that found a digest of ours wrong.
            Status::TRANSIENT_TRANSPORT => Self::Damaged("data to be written"),
            Status::INVALID_OPCODE => Self::Unsupported("the controller does not know the command"),
            _ => Self::Remote(status),
        }
    }

    /// Why a Connect is not accepted.
    pub(super) fn from_connect(completion: &Completion, target: &Target) -> Self {
        let status = completion.status();
        let result = completion.result.get() as u32;
        let in_data =
            |offset: usize| result & connect::IN_DATA != 0 && result & 0xFFFF == offset as u32;
        let host = &target.host;
        Self::Refused(match Status(status.code()) {
            Status::CONNECT_INVALID if in_data(offset_of!(ConnectData, subsystem)) => {
                return Self::Unknown;
            }
            Status::CONNECT_INVALID_HOST => {
                format!(
                    "host {host} is not allowed to use it: have the target allow it, or give the name it knows"
                )
            }
            Status::CONNECT_BUSY => {
                format!("it has as many controllers or queues as it takes ({status})")
            }
            Status::AUTHENTICATION_REQUIRED => {
                format!("host {host} must authenticate: give its secret")
            }
            _ => format!("{status} ({result:#x})"),
        })
    }
}

impl From<Interrupted> for Failure {
    fn from(interrupted: Interrupted) -> Self {
        match interrupted {
            Interrupted::Lost(error) => Self::Lost(error),
            Interrupted::Silent(patience) => Self::Silent(patience),
        }
    }
}

impl From<Malformed> for Failure {
    fn from(malformed: Malformed) -> Self {
        Self::protocol(malformed.what)
    }
}
