//! Mutual TLS 1.3 (RFC 8446) between hosts of a cluster.
//!
//! [`Authority`] makes certificates, [`Identity`] holds a host's. The handshake is rustls'; the records after it are
//! sealed and opened by [`TlsStream`] in buffers that it allocates once, because rustls allocates a buffer a record and
//! a borrower that swaps through this must not ask for memory to give memory back.

mod authority;
mod handshake;
mod identity;
mod keys;
mod receiving;
mod sending;
mod stream;

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

pub use authority::{Authority, CA_CERTIFICATE, CA_KEY, HOST_CERTIFICATE, HOST_KEY};
pub use handshake::{accept, connect};
pub use identity::{Identity, host_name};
pub use stream::TlsStream;

/// Why certificates could not be made or loaded, or a peer is not one of ours.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file or directory could not be read or written.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What came of it.
        source: io::Error,
    },
    /// A certificate or key is there already.
    #[error("{path} exists already and would be overwritten: give another directory, or force it if it is not needed any more", path = .0.display())]
    Exists(PathBuf),
    /// A PEM file is missing or malformed.
    #[error("cannot load {path}: {source}; was this host given a certificate by 'aquifer init'?", path = path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: rustls::pki_types::pem::Error,
    },
    /// A name cannot stand in a certificate.
    #[error(
        "'{0}' cannot stand in a certificate: use a DNS name (one that is not all digits, no '-' at the end of a part) or an IP address"
    )]
    Name(String),
    /// A certificate could not be made, or the authority's is unusable.
    #[error("cannot use {path} to issue certificates: {source}", path = path.display())]
    Issue {
        /// The certificate or key.
        path: PathBuf,
        /// What is wrong.
        source: rcgen::Error,
    },
    /// A certificate, its key and its authority do not belong together.
    #[error("cannot use {path} with the key and the authority beside it: {why}", path = path.display())]
    Certificate {
        /// The certificate.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The peer is not who it should be.
    #[error("the peer is not trusted: {0}")]
    Peer(String),
    /// The handshake failed: by the peer's refusal, by ours, or because it did not speak TLS.
    #[error("TLS handshake failed: {0}")]
    Handshake(#[from] rustls::Error),
    /// The connection broke, or the deadline passed, during the handshake.
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
