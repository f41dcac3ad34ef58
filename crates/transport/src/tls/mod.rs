//! Mutual TLS 1.3 (RFC 8446) between the hosts of a cluster.
//!
//! [`Authority`] makes certificates, [`Identity`] holds a host's. Certificates are short-lived:
//! [`Validity`] says when a host renews its own, and a [`Revocation`] ends those of a host early.
//! Rustls performs the handshake;
//! [`TlsStream`] encrypts and decrypts the records after it, in buffers that it allocates once.
//! Rustls allocates a buffer for each record. A borrower that swaps over this connection must not
//! allocate memory in order to free memory.

mod authority;
mod handshake;
mod identity;
mod joining;
mod keys;
mod live;
mod receiving;
mod renewing;
mod revocation;
mod sending;
mod stream;
mod validity;
mod verifying;

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

pub use authority::{Authority, CA_CERTIFICATE, CA_KEY, HOST_CERTIFICATE, HOST_KEY, TEN_YEARS};
pub use handshake::{accept, connect};
pub use identity::{Client, Identity, Server, host_name};
pub use joining::{Fingerprint, Request, fingerprint, joining_config, same_key};
pub use renewing::{Renewal, have_same_key, other_names, own_certificate};
pub use revocation::{REVOCATIONS, Revocation, Revocations, keep_revocations};
pub use stream::TlsStream;
pub use validity::{
    Expiry, GRACE, LIFETIME, LONGEST_LIFETIME, SHORTEST_DRILL, SHORTEST_LIFETIME, Validity,
};

/// The reason why certificates cannot be made or loaded, or why a peer is not trusted.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The operating system failed to read or write a file or directory.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    File {
        /// The verb of the failed operation.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A host's certificate or key exists already.
    #[error(
        "{path} exists already: use another directory, or overwrite it with --force",
        path = .0.display()
    )]
    Exists(PathBuf),
    /// A certificate or key of an authority exists already; nothing replaces it.
    #[error(
        "{path} exists already, and --force does not replace an authority: keep this one, or use \
         another directory",
        path = .0.display()
    )]
    AuthorityExists(PathBuf),
    /// A PEM file is missing or malformed.
    #[error(
        "cannot load {path}: {source}; get this host's certificate with 'aquifer cluster join'",
        path = path.display()
    )]
    Pem {
        /// The file.
        path: PathBuf,
        /// The error of the reader.
        source: rustls::pki_types::pem::Error,
    },
    /// A certificate cannot carry this name.
    #[error(
        "a certificate cannot carry the name '{0}': use an IP address or a DNS name (not all \
         digits, no '-' at the end of a part)"
    )]
    Name(String),
    /// The authority cannot make a certificate, or its own is unusable.
    #[error("cannot use {path} to issue certificates: {source}", path = path.display())]
    Issue {
        /// The certificate or key.
        path: PathBuf,
        /// The error of the certificate library.
        source: rcgen::Error,
    },
    /// A request for a certificate is malformed, or was not made with its key.
    #[error("the request for a certificate is malformed: {0}")]
    Request(rcgen::Error),
    /// A certificate, its key and its authority do not belong together.
    #[error(
        "cannot use {path} with the key and the authority beside it: {why}",
        path = path.display()
    )]
    Certificate {
        /// The certificate.
        path: PathBuf,
        /// The defect.
        why: String,
    },
    /// The peer proved another identity than the expected one, or none.
    #[error("the peer is not trusted: {0}")]
    Peer(String),
    /// The handshake failed: the peer or this host refused, or the peer does not speak TLS.
    #[error("TLS handshake failed: {0}")]
    Handshake(#[from] rustls::Error),
    /// The connection broke or the deadline passed during the handshake.
    #[error("connection lost during the TLS handshake: {0}")]
    Io(#[from] io::Error),
}

impl TlsError {
    fn file(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::File { action, path: path.to_owned(), source }
    }

    fn certificate(path: &Path, why: impl Display) -> Self {
        Self::Certificate { path: path.to_owned(), why: why.to_string() }
    }
}
