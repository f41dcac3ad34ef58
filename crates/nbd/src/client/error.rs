//! Errors of the NBD initiator.

use std::io;
use std::time::Duration;

use aquifer_transport::initiating::{self, Interrupted};
use aquifer_transport::initiator::Outcome;
use aquifer_transport::tls::TlsError;

use super::Target;
use crate::proto::errno;

/// A failure, together with the export that it concerns.
pub type NbdError = initiating::Failed<Target, Failure>;

/// The cause of an [`NbdError`].
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The client cannot connect to the server.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// This host and the server do not trust each other, or the TLS handshake broke.
    #[error("{0}")]
    Tls(#[from] TlsError),
    /// The server refuses the export or an option; the text says why.
    #[error("the server refuses: {0}")]
    Refused(String),
    /// The export belongs to another owner; the server's text names it.
    #[error("{0}")]
    Claimed(String),
    /// The connection broke.
    #[error("connection lost: {0}")]
    Lost(#[source] io::Error),
    /// The server did not answer, or not completely, within the connection's timeout.
    #[error("no answer for {0:?}")]
    Silent(Duration),
    /// The server violated the protocol; the text says how.
    #[error("the server violates the NBD protocol: {0}")]
    Protocol(String),
    /// An earlier failure ended the connection.
    #[error("the connection failed earlier")]
    Broken,
    /// The request exceeds the export, or the longest payload that the server takes.
    #[error("a request of {length} bytes at {offset} does not fit the export of {size} bytes")]
    OutOfRange {
        /// First byte of the request.
        offset: u64,
        /// Length of the request in bytes.
        length: u64,
        /// Size of the export in bytes.
        size: u64,
    },
    /// The server has no space left (`ENOSPC`).
    #[error("no space left{0}")]
    NoSpace(Text),
    /// The server is shutting down (`ESHUTDOWN`).
    #[error("the server is shutting down{0}")]
    ShuttingDown(Text),
    /// The server or the export does not support the request (`ENOTSUP`).
    #[error("not supported{0}")]
    Unsupported(Text),
    /// The server does not permit the request (`EPERM`).
    #[error("not permitted{0}")]
    NotPermitted(Text),
    /// Any other error number from the server.
    #[error("{}{text}", std::io::Error::from_raw_os_error(.0.cast_signed()), text = .1)]
    Remote(u32, Text),
}

/// The text that the server sent with an error number; often empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Text(pub String);

impl std::fmt::Display for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, ": {}", self.0) }
    }
}

impl Failure {
    /// Maps an error number of the protocol to a failure; an unexpected number does not end the
    /// connection (NBD, "Error values").
    pub(super) fn from_reply(number: u32, text: String) -> Self {
        let text = Text(text);
        match number {
            errno::ENOSPC => Self::NoSpace(text),
            errno::ESHUTDOWN => Self::ShuttingDown(text),
            errno::ENOTSUP => Self::Unsupported(text),
            errno::EPERM => Self::NotPermitted(text),
            _ => Self::Remote(number, text),
        }
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
            Self::Claimed(_) => Outcome::Claimed,
            Self::Connect(_) | Self::Tls(_) | Self::Refused(_) | Self::Lost(_) => Outcome::Ended,
            Self::Silent(_) | Self::Protocol(_) => Outcome::Ended,
            Self::Broken | Self::ShuttingDown(_) => Outcome::Ended,
            Self::OutOfRange { .. } | Self::Unsupported(_) => Outcome::Refused,
            Self::NotPermitted(_) | Self::Remote(..) => Outcome::Refused,
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
