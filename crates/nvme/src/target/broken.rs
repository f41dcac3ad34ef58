//! Reasons for the end of a connection.

use std::io;

use aquifer_transport::serving::limits::LimitReached;

use crate::proto::pdu::{Malformed, TermReq, fatal};

/// The reason for the end of a connection, other than a close by the host.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The host broke the protocol; the connection ends with a C2HTermReq.
    #[error("the host violates the protocol: {0}")]
    Fatal(Fatal),
    #[error(
        "the host reports that this target violates the protocol: fatal error status {:#x}, \
         information {:#x}",
        .0.status,
        .0.information
    )]
    Terminated(TermReq),
    #[error("the host closed the connection in the middle of a message")]
    Truncated,
    #[error("the host took too long to connect")]
    Late,
    #[error("the host sent nothing within its keep-alive timeout")]
    Silent,
    #[error("the host failed to authenticate")]
    Unauthenticated,
    #[error(transparent)]
    Limited(#[from] LimitReached),
}

/// The contents of a C2HTermReq, and a description for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub(super) struct Fatal {
    /// The fatal error status, see [`fatal`].
    pub(super) status: u16,
    pub(super) information: u32,
    pub(super) what: &'static str,
}

impl Fatal {
    pub(super) fn new(status: u16, information: u32, what: &'static str) -> Self {
        Self { status, information, what }
    }

    /// Makes the error of an invalid field at this offset of the header.
    pub(super) fn header(offset: u32, what: &'static str) -> Self {
        Self::new(fatal::INVALID_HEADER, offset, what)
    }

    /// Makes the error of a PDU out of sequence.
    pub(super) fn sequence(what: &'static str) -> Self {
        Self::new(fatal::SEQUENCE, 0, what)
    }
}

impl From<Fatal> for Broken {
    fn from(fatal: Fatal) -> Self {
        Self::Fatal(fatal)
    }
}

impl From<Malformed> for Fatal {
    fn from(Malformed { status, field, what }: Malformed) -> Self {
        Self::new(status, field, what)
    }
}
