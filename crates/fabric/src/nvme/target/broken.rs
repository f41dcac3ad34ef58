use std::io;

use crate::nvme::proto::pdu::{Malformed, TermReq, fatal};

/// Why a connection ends other than by the host's wish.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The host broke the protocol, and is told so.
    #[error("the host broke the protocol: {0}")]
    Fatal(Fatal),
    #[error("the host says that we broke the protocol: fatal error status {:#x}, information {:#x}", .0.status, .0.information)]
    Terminated(TermReq),
    #[error("the host went away in the middle of a message")]
    Truncated,
    #[error("the host took too long to connect")]
    Late,
    #[error("the host gave no sign of life within its keep alive time-out")]
    Silent,
    #[error("the host failed to authenticate")]
    Unauthenticated,
}

/// What a C2HTermReq tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub(super) struct Fatal {
    /// See [`fatal`].
    pub(super) status: u16,
    pub(super) information: u32,
    pub(super) what: &'static str,
}

impl Fatal {
    pub(super) fn new(status: u16, information: u32, what: &'static str) -> Self {
        Self { status, information, what }
    }

    /// The field at this offset of the header is wrong.
    pub(super) fn header(offset: u32, what: &'static str) -> Self {
        Self::new(fatal::INVALID_HEADER, offset, what)
    }

    /// The PDU must not come now.
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
