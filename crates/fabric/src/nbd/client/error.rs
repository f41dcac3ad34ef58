use std::io;
use std::sync::Arc;
use std::time::Duration;

use aquifer_page::Incarnation;

use super::Target;
use crate::initiating::Interrupted;
use crate::nbd::proto::errno;
use crate::tls::TlsError;

/// What went wrong, and with which export.
#[derive(Debug, thiserror::Error)]
#[error("{target}: {failure}")]
pub struct NbdError {
    /// The export.
    pub target: Arc<Target>,
    /// What went wrong.
    #[source]
    pub failure: Failure,
}

/// What went wrong with an export.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The server could not be reached.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// The server is not trusted, or does not trust us.
    #[error("{0}")]
    Tls(#[from] TlsError),
    /// The server does not let us use the export.
    #[error("the server refuses: {0}")]
    Refused(String),
    /// The export is the owner's that this names, and not ours.
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
    /// The connection broke.
    #[error("connection lost: {0}")]
    Lost(#[source] io::Error),
    /// The server did not answer in time, or not to the end.
    #[error("no answer for {0:?}")]
    Silent(Duration),
    /// The server broke the protocol.
    #[error("the server does not keep to the NBD protocol: {0}")]
    Protocol(String),
    /// The connection failed earlier.
    #[error("the connection failed earlier")]
    Broken,
    /// The request is not inside the export, or longer than the server takes.
    #[error("a request of {length} bytes at {offset} does not fit the export of {size} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Bytes in the export.
        size: u64,
    },
    /// The server has no room left (`ENOSPC`).
    #[error("no space left{0}")]
    NoSpace(Text),
    /// The server is going away (`ESHUTDOWN`).
    #[error("the server is shutting down{0}")]
    ShuttingDown(Text),
    /// The server, or the export, cannot do this (`ENOTSUP`).
    #[error("not supported{0}")]
    Unsupported(Text),
    /// The server does not permit it (`EPERM`).
    #[error("not permitted{0}")]
    NotPermitted(Text),
    /// Any other error of the server, by its number.
    #[error("{}{text}", std::io::Error::from_raw_os_error(.0.cast_signed()), text = .1)]
    Remote(u32, Text),
}

/// What the server said along with an error number; often nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Text(pub String);

impl std::fmt::Display for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, ": {}", self.0) }
    }
}

impl NbdError {
    pub(super) fn new(target: &Arc<Target>, failure: Failure) -> Self {
        Self { target: target.clone(), failure }
    }

    /// Whether the connection is of no further use (a new one may be).
    pub fn ends_connection(&self) -> bool {
        self.failure.ends_connection()
    }

    /// Whether the lender has no room for what was written.
    pub fn is_no_space(&self) -> bool {
        matches!(self.failure, Failure::NoSpace(_))
    }

    /// Whether the server has said that what this client stored there is gone, or another's by now.
    pub fn is_loss(&self) -> bool {
        matches!(self.failure, Failure::Claimed(_) | Failure::Forgot { .. })
    }
}

impl Failure {
    pub(super) fn ends_connection(&self) -> bool {
        match self {
            Self::Connect(_)
            | Self::Tls(_)
            | Self::Refused(_)
            | Self::Lost(_)
            | Self::Silent(_) => true,
            Self::Claimed(_) | Self::Forgot { .. } => true,
            Self::Protocol(_) | Self::Broken | Self::ShuttingDown(_) => true,
            Self::OutOfRange { .. } | Self::NoSpace(_) | Self::Unsupported(_) => false,
            Self::NotPermitted(_) | Self::Remote(..) => false,
        }
    }

    /// The error that a reply brought.
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

    pub(super) fn protocol(what: impl Into<String>) -> Self {
        Self::Protocol(what.into())
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
