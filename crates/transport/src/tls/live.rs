//! A host's certificate and the revocations as they are now: the files may change while a process
//! runs, and none of its connections ends because of a renewal.
//!
//! Each handshake compares the files with what is known. While connections are open, a thread does
//! the same, and ends those whose peer was revoked. A process whose handshakes may not wait for
//! the disk has a thread that always does so. A process never forgets a revocation because of what
//! a file says.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
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

use super::identity::{certificates, certificates_of, provider, read_pem};
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
    state: RwLock<State>,
    /// The files that the state is of. Held during each change of the state.
    read: Mutex<Read>,
    open: Mutex<Open>,
    /// Whether a thread looks at the files for as long as this lives.
    is_followed: AtomicBool,
}

/// What the files say, at one moment.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) own: Arc<Own>,
    pub(super) revoked: Arc<Revocations>,
}

/// This host's certificate.
#[derive(Debug)]
pub(super) struct Own {
    pub(super) validity: Validity,
    shown: Arc<CertifiedKey>,
    /// The same, with the authority's certificate after the host's.
    introduced: Arc<CertifiedKey>,
}

/// Tells whether a file was replaced.
type Stamp = Option<(u64, i64, i64, u64)>;

/// The files as they were read.
#[derive(Debug)]
struct Read {
    certificate: Stamp,
    revocations: Stamp,
    /// Whether the last attempt to read or write them failed: the log shows the first of a row.
    fails: bool,
    /// Whether the process knows revocations that the file lacks, because a write failed.
    is_unsaved: bool,
}

/// Connections with other hosts.
#[derive(Debug, Default)]
struct Open {
    connections: Vec<(HostName, Validity, Weak<OwnedFd>)>,
    /// Whether a thread looks at the files.
    is_watched: bool,
}

fn stamp(dir: &Path, file: &str) -> Stamp {
    let file = fs::metadata(dir.join(file)).ok()?;
    Some((file.ino(), file.mtime(), file.mtime_nsec(), file.size()))
}

/// Reads a host's certificate and key. The file of a renewed certificate also has its key, so that
/// no reader finds one without the other.
pub(super) fn own(dir: &Path) -> Result<CertifiedKey, TlsError> {
    let path = dir.join(HOST_CERTIFICATE);
    // Once: another file may replace it at any time.
    let text = read_pem(&path)?;
    let chain = certificates_of(&path, &text)?;
    let key = PrivateKeyDer::from_pem_slice(&text).or_else(|_| {
        let path = dir.join(HOST_KEY);
        PrivateKeyDer::from_pem_file(&path).map_err(|source| TlsError::Pem { path, source })
    })?;
    CertifiedKey::from_der(chain, key, &provider())
        .map_err(|error| TlsError::certificate(&path, error))
}

impl Own {
    fn read(dir: &Path, authorities: &[CertificateDer<'static>]) -> Result<Self, TlsError> {
        let own = own(dir)?;
        let chain = [&own.cert[..], authorities].concat();
        let introduced = Arc::new(CertifiedKey { cert: chain, ..own.clone() });
        let validity = Validity::of(&own.cert[0])?;
        Ok(Self { validity, shown: Arc::new(own), introduced })
    }

    fn host(&self) -> Result<HostName, TlsError> {
        host_name(&self.shown.cert[0])
    }
}

impl Live {
    pub(super) fn load(dir: &Path) -> Result<Self, TlsError> {
        let path = dir.join(HOST_CERTIFICATE);
        certificates(&path)?;
        let authorities = certificates(&dir.join(CA_CERTIFICATE))?;
        // Before the files are read: a change meanwhile has them read again.
        let (certificate, revocations) = (stamp(dir, HOST_CERTIFICATE), stamp(dir, REVOCATIONS));
        let own = Own::read(dir, &authorities)?;
        let host = own.host().map_err(|error| TlsError::certificate(&path, error))?;
        let revoked = Revocations::load(dir, &authorities)?;
        let state = State { own: Arc::new(own), revoked: Arc::new(revoked) };
        Ok(Self {
            host,
            dir: dir.to_owned(),
            authorities,
            state: RwLock::new(state),
            read: Mutex::new(Read { certificate, revocations, fails: false, is_unsaved: false }),
            open: Mutex::default(),
            is_followed: AtomicBool::new(false),
        })
    }

    /// Returns what is known, and reads no file.
    pub(super) fn state(&self) -> State {
        self.state.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the state for a handshake: a thread has read the files, or this call does.
    pub(super) fn current(&self) -> State {
        match self.is_followed.load(Ordering::Relaxed) {
            true => self.state(),
            false => self.refreshed(),
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// Reads the files if they changed, ends the connections with hosts that are revoked, and
    /// returns the state. A file that cannot be read is read again by the next call, and what is
    /// known of it stays.
    pub(super) fn refreshed(&self) -> State {
        let mut read = lock(&self.read);
        let certificate = self.read_certificate(&mut read);
        let revocations = self.read_revocations(&mut read);
        match certificate.and(revocations) {
            Ok(()) => read.fails = false,
            Err(error) if !std::mem::replace(&mut read.fails, true) => {
                tracing::warn!("goes on with what is known of certificates: {error}");
            }
            Err(_) => {}
        }
        drop(read);
        self.state()
    }

    fn read_certificate(&self, read: &mut Read) -> Result<(), TlsError> {
        let found = stamp(&self.dir, HOST_CERTIFICATE);
        if read.certificate == found {
            return Ok(());
        }
        let own = Own::read(&self.dir, &self.authorities)?;
        let named = own.host()?;
        if named != self.host {
            let path = self.dir.join(HOST_CERTIFICATE);
            return Err(TlsError::certificate(&path, format!("it names host {named} now")));
        }
        self.change(|state| state.own = Arc::new(own));
        read.certificate = found;
        Ok(())
    }

    fn read_revocations(&self, read: &mut Read) -> Result<(), TlsError> {
        let found = stamp(&self.dir, REVOCATIONS);
        if read.revocations == found {
            return Ok(());
        }
        let new = Revocations::load(&self.dir, &self.authorities)?;
        self.learn(new.list());
        read.revocations = found;
        Ok(())
    }

    /// Adds to what this process knows, and ends connections at once. Returns whether any is new.
    fn learn(&self, new: Vec<Revocation>) -> bool {
        let mut known = (*self.state().revoked).clone();
        let is_new = known.merge(new, &self.authorities, SystemTime::now());
        self.change(|state| state.revoked = Arc::new(known));
        if is_new {
            self.end_revoked();
        }
        is_new
    }

    /// Takes in revocations, for all processes of this host; returns whether any is new. They hold
    /// in this process even if the file cannot be written; the next call then writes it.
    pub(super) fn revoke(&self, new: Vec<Revocation>) -> Result<bool, TlsError> {
        let mut read = lock(&self.read);
        let is_new = self.learn(new);
        if is_new || read.is_unsaved {
            read.is_unsaved = true;
            // What another process recorded meanwhile stays in the file; what is damaged does not.
            if let Err(error) = self.read_revocations(&mut read) {
                tracing::warn!("replaces what cannot be read: {error}");
            }
            self.state().revoked.store(&self.dir)?;
            read.revocations = stamp(&self.dir, REVOCATIONS);
            read.is_unsaved = false;
        }
        Ok(is_new)
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
            // The thread keeps what it looks at: the connection may outlive all else of it.
            let live = self.clone();
            let named = thread::Builder::new().name("certificates".to_owned());
            named.spawn(move || watch_files(&live))?;
            open.is_watched = true;
        }
        drop(open);
        // It may have been revoked during the handshake.
        self.end_revoked();
        Ok(())
    }

    /// Makes a thread look at the files for as long as this lives.
    pub(super) fn follow(self: &Arc<Self>) -> Result<(), TlsError> {
        let mut open = lock(&self.open);
        if self.is_followed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let live = Arc::downgrade(self);
        let named = thread::Builder::new().name("certificates".to_owned());
        named.spawn(move || follow_files(&live))?;
        open.is_watched = true;
        self.is_followed.store(true, Ordering::Relaxed);
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
        open.is_watched = !open.connections.is_empty() || self.is_followed.load(Ordering::Relaxed);
        !open.connections.is_empty()
    }

    pub(super) fn is_revoked(&self, certificate: &CertificateDer<'_>) -> bool {
        let state = self.current();
        match (host_name(certificate), Validity::of(certificate)) {
            (Ok(host), Ok(validity)) => state.revoked.covers(&host, &validity),
            // No host at all: others refuse it.
            _ => false,
        }
    }
}

fn watch_files(live: &Live) {
    loop {
        thread::sleep(LOOK);
        live.refreshed();
        if !live.is_in_use() {
            return;
        }
    }
}

fn follow_files(live: &Weak<Live>) {
    while let Some(live) = live.upgrade() {
        live.refreshed();
        // The thread must not keep it.
        drop(live);
        thread::sleep(LOOK);
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
        let own = self.live.current().own;
        Some(if self.introduces { own.introduced.clone() } else { own.shown.clone() })
    }
}

impl ResolvesClientCert for Shows {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.live.current().own.shown.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
