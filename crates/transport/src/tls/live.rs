//! A host's certificate and the revocations as they are now: the files may change while a process
//! runs, and none of its connections ends because of a renewal.
//!
//! Each handshake compares the files with what is known. While connections are open, a thread does
//! the same, and ends those whose peer was revoked.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::thread;
use std::time::{Duration, SystemTime};

use aquifer_page::{HostName, lock};
use rustix::net::Shutdown;
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::identity::{certificates, provider};
use super::revocation::{REVOCATIONS, Revocation, Revocations};
use super::{CA_CERTIFICATE, HOST_CERTIFICATE, HOST_KEY, TlsError, Validity, host_name};
use crate::channel::Socket;

/// The time between two looks at the files while connections are open.
const LOOK: Duration = Duration::from_secs(2);

/// A host's certificate, key and revocations, and its open connections.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) host: HostName,
    dir: PathBuf,
    authorities: Vec<CertificateDer<'static>>,
    state: RwLock<Arc<State>>,
    /// The files that the state is of.
    read: Mutex<Stamps>,
    open: Mutex<Open>,
}

/// What the files say.
#[derive(Debug)]
pub(super) struct State {
    own: Arc<CertifiedKey>,
    /// The same, with the authority's certificate after the host's.
    introduced: Arc<CertifiedKey>,
    pub(super) validity: Validity,
    pub(super) revoked: Revocations,
}

/// Tells whether a file was replaced.
type Stamp = Option<(u64, i64, i64, u64)>;
type Stamps = [Stamp; 2];

/// Connections with other hosts.
#[derive(Debug, Default)]
struct Open {
    connections: Vec<(HostName, Validity, Weak<OwnedFd>)>,
    /// Whether a thread looks at the files.
    is_watched: bool,
}

fn stamps(dir: &Path) -> Stamps {
    [HOST_CERTIFICATE, REVOCATIONS].map(|file| {
        let file = fs::metadata(dir.join(file)).ok()?;
        Some((file.ino(), file.mtime(), file.mtime_nsec(), file.size()))
    })
}

/// Reads a host's certificate and key. The file of a renewed certificate also has its key, so that
/// no reader finds one without the other.
pub(super) fn own(dir: &Path) -> Result<CertifiedKey, TlsError> {
    let path = dir.join(HOST_CERTIFICATE);
    let chain = certificates(&path)?;
    let key = PrivateKeyDer::from_pem_file(&path).or_else(|_| {
        let path = dir.join(HOST_KEY);
        PrivateKeyDer::from_pem_file(&path).map_err(|source| TlsError::Pem { path, source })
    })?;
    CertifiedKey::from_der(chain, key, &provider())
        .map_err(|error| TlsError::certificate(&path, error))
}

fn read(dir: &Path, authorities: &[CertificateDer<'static>]) -> Result<State, TlsError> {
    let own = own(dir)?;
    let chain = [&own.cert[..], authorities].concat();
    let introduced = Arc::new(CertifiedKey { cert: chain, ..own.clone() });
    let validity = Validity::of(&own.cert[0])?;
    let revoked = Revocations::load(dir, authorities)?;
    Ok(State { own: Arc::new(own), introduced, validity, revoked })
}

impl Live {
    pub(super) fn load(dir: &Path) -> Result<Self, TlsError> {
        let path = dir.join(HOST_CERTIFICATE);
        let host = host_name(&certificates(&path)?[0])
            .map_err(|error| TlsError::certificate(&path, error))?;
        let authorities = certificates(&dir.join(CA_CERTIFICATE))?;
        let stamps = stamps(dir);
        Ok(Self {
            host,
            dir: dir.to_owned(),
            state: RwLock::new(Arc::new(read(dir, &authorities)?)),
            authorities,
            read: Mutex::new(stamps),
            open: Mutex::default(),
        })
    }

    pub(super) fn state(&self) -> Arc<State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the files if they changed, ends the connections with hosts that are revoked, and
    /// returns the state.
    pub(super) fn refreshed(&self) -> Arc<State> {
        let mut known = lock(&self.read);
        let found = stamps(&self.dir);
        if *known != found {
            match self.read_again() {
                Ok(state) => *self.state.write().unwrap_or_else(PoisonError::into_inner) = state,
                Err(error) => tracing::warn!("goes on with the former certificate: {error}"),
            }
            *known = found;
            self.end_revoked();
        }
        self.state()
    }

    fn read_again(&self) -> Result<Arc<State>, TlsError> {
        let state = read(&self.dir, &self.authorities)?;
        let named = host_name(&state.own.cert[0])?;
        if named != self.host {
            let path = self.dir.join(HOST_CERTIFICATE);
            return Err(TlsError::certificate(&path, format!("it names host {named} now")));
        }
        Ok(Arc::new(state))
    }

    /// Takes in revocations, for all processes of this host; returns whether any is new.
    pub(super) fn revoke(&self, new: Vec<Revocation>) -> Result<bool, TlsError> {
        let mut known = self.refreshed().revoked.clone();
        if !known.merge(new, &self.authorities) {
            return Ok(false);
        }
        known.store(&self.dir)?;
        self.refreshed();
        Ok(true)
    }

    pub(super) fn is_signed(&self, content: &[u8], signature: &str) -> bool {
        super::revocation::is_signed(content, signature, &self.authorities)
    }

    /// Ends this connection as soon as its peer is revoked.
    pub(super) fn watch(
        self: &Arc<Self>,
        socket: &Socket,
        peer: &HostName,
        validity: Validity,
    ) -> Result<(), TlsError> {
        let mut open = lock(&self.open);
        open.connections.retain(|(_, _, socket)| socket.strong_count() > 0);
        open.connections.push((peer.clone(), validity, socket.weak()));
        if !open.is_watched {
            let live = Arc::downgrade(self);
            let named = thread::Builder::new().name("certificates".to_owned());
            named.spawn(move || follow(&live))?;
            open.is_watched = true;
        }
        drop(open);
        // It may have been revoked during the handshake.
        self.end_revoked();
        Ok(())
    }

    fn end_revoked(&self) {
        let state = self.state();
        for (host, validity, socket) in &lock(&self.open).connections {
            if state.revoked.covers(host, validity)
                && let Some(socket) = socket.upgrade()
            {
                // Its user learns that it ended.
                let _ = rustix::net::shutdown(&*socket, Shutdown::Both);
            }
        }
    }

    /// Returns whether connections are open; if not, the next one starts another thread.
    fn is_in_use(&self) -> bool {
        let mut open = lock(&self.open);
        open.connections.retain(|(_, _, socket)| socket.strong_count() > 0);
        open.is_watched = !open.connections.is_empty();
        open.is_watched
    }

    pub(super) fn is_revoked(&self, certificate: &CertificateDer<'_>) -> bool {
        let state = self.refreshed();
        match (host_name(certificate), Validity::of(certificate)) {
            (Ok(host), Ok(validity)) => state.revoked.covers(&host, &validity),
            // No host at all: others refuse it.
            _ => false,
        }
    }

    /// Returns until when the certificates of a host are revoked.
    pub(super) fn revoked_until(&self, host: &HostName) -> Option<SystemTime> {
        self.state().revoked.until(host)
    }
}

fn follow(live: &Weak<Live>) {
    loop {
        thread::sleep(LOOK);
        let Some(live) = live.upgrade() else { return };
        live.refreshed();
        if !live.is_in_use() {
            return;
        }
    }
}

/// Shows the host's present certificate in each handshake.
#[derive(Debug)]
pub(super) struct Shows {
    pub(super) live: Arc<Live>,
    /// With the authority's certificate, for hosts that join.
    pub(super) introduces: bool,
}

impl ResolvesServerCert for Shows {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let state = self.live.refreshed();
        Some(if self.introduces { state.introduced.clone() } else { state.own.clone() })
    }
}

impl ResolvesClientCert for Shows {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.live.refreshed().own.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
