//! The certificate that a host presents to its peers, and its demands on theirs.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use aquifer_page::HostName;
use rustls::client::danger::ServerCertVerifier;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{cipher_suite, default_provider};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::ClientCertVerifierBuilder;
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::authority::{CA_CERTIFICATE, HOST_CERTIFICATE};
use super::live::{Live, Shows};
use super::verifying::{Verifies, is_of_time};
use super::{Revocation, Revocations, TlsError, Validity};

/// A host's certificate and key, ready for use as server and as client; cheap to clone.
///
/// Both configurations allow TLS 1.3 only and require a certificate of the cluster's authority from
/// both sides. They use no session tickets: a resumed session would outlive the certificate that it
/// began with. They show the certificate that the files have at the time of a handshake, and refuse
/// those that the file of revocations then names.
#[derive(Clone)]
pub struct Identity {
    live: Arc<Live>,
    server: Arc<ServerConfig>,
    admitting: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    listening: Arc<ClientConfig>,
}

/// A server's configuration, for [`accept`](super::accept).
#[derive(Clone, Debug)]
pub struct Server {
    pub(super) config: Arc<ServerConfig>,
    pub(super) live: Option<Arc<Live>>,
}

/// A client's configuration, for [`connect`](super::connect).
#[derive(Clone, Debug)]
pub struct Client {
    pub(super) config: Arc<ClientConfig>,
    pub(super) live: Option<Arc<Live>>,
}

impl From<Arc<ServerConfig>> for Server {
    /// Takes a configuration that knows no revocations.
    fn from(config: Arc<ServerConfig>) -> Self {
        Self { config, live: None }
    }
}

impl From<Arc<ClientConfig>> for Client {
    /// Takes a configuration that knows no revocations.
    fn from(config: Arc<ClientConfig>) -> Self {
        Self { config, live: None }
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("host", &self.live.host).finish_non_exhaustive()
    }
}

impl Identity {
    /// Loads `host.pem`, `host.key` and `ca.pem` from `dir`, as
    /// [`Authority::issue`](super::Authority::issue) wrote them, and the revocations beside them.
    ///
    /// # Errors
    /// [`TlsError::Pem`] names a missing or malformed file. [`TlsError::Certificate`] if the files
    /// do not match each other.
    pub fn load(dir: &Path) -> Result<Self, TlsError> {
        let path = dir.join(HOST_CERTIFICATE);
        let live = Arc::new(Live::load(dir)?);
        let roots = Arc::new(roots(&dir.join(CA_CERTIFICATE))?);
        let provider = Arc::new(provider());
        let failed = |error: &dyn fmt::Display| TlsError::certificate(&path, error);
        let verifier =
            || WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone());
        let serve = |verifier: ClientCertVerifierBuilder, is_admitting: bool| {
            let inner = verifier.build().map_err(|error| failed(&error))?;
            let live = live.clone();
            let verifier = Verifies { live: live.clone(), lapsed_pass: is_admitting, inner };
            let mut server = ServerConfig::builder_with_provider(provider.clone())
                .with_protocol_versions(&[&TLS13])
                .map_err(|error| failed(&error))?
                .with_client_cert_verifier(Arc::new(verifier))
                .with_cert_resolver(Arc::new(Shows { live, introduces: is_admitting }));
            server.send_tls13_tickets = 0;
            server.enable_secret_extraction = true;
            Ok::<_, TlsError>(Arc::new(server))
        };
        let server = serve(verifier(), false)?;
        let admitting = serve(verifier().allow_unauthenticated(), true)?;

        let call = |lapsed_pass: bool| {
            let inner =
                WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone());
            let inner = inner.build().map_err(|error| failed(&error))?;
            let live = live.clone();
            let verifier =
                Verifies::<dyn ServerCertVerifier> { live: live.clone(), lapsed_pass, inner };
            let mut client = ClientConfig::builder_with_provider(provider.clone())
                .with_protocol_versions(&[&TLS13])
                .map_err(|error| failed(&error))?
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(verifier))
                .with_client_cert_resolver(Arc::new(Shows { live, introduces: false }));
            client.resumption = Resumption::disabled();
            client.enable_secret_extraction = true;
            Ok::<_, TlsError>(Arc::new(client))
        };
        let (client, listening) = (call(false)?, call(true)?);
        Ok(Self { live, server, admitting, client, listening })
    }

    /// Makes a thread look for changes of the files for as long as the identity lives. Handshakes
    /// then read no file, as async code needs.
    ///
    /// # Errors
    /// [`TlsError::Io`] if the thread cannot start.
    pub fn follow(&self) -> Result<(), TlsError> {
        self.live.follow()
    }

    /// Reads the files now, if they changed.
    pub fn refresh(&self) {
        self.live.refreshed();
    }

    /// Checks that peers will trust the certificate in `dir`: the authority beside it has signed
    /// it, and it has not expired.
    ///
    /// # Errors
    /// As [`Identity::load`], or [`TlsError::Certificate`] with the certificate's path and its
    /// defect.
    pub fn verify_own(dir: &Path) -> Result<(), TlsError> {
        verify(dir, &certificates(&dir.join(HOST_CERTIFICATE))?)
    }

    /// Returns the host name in this host's certificate.
    pub fn host(&self) -> &HostName {
        &self.live.host
    }

    /// Returns the times of this host's certificate. The function reads the certificate again if
    /// it changed, unless [a thread](Self::follow) does.
    pub fn validity(&self) -> Validity {
        self.live.current().own.validity
    }

    /// Returns the revocations that this host knows. The function reads them again if they changed,
    /// unless [a thread](Self::follow) does.
    pub fn revocations(&self) -> Revocations {
        (*self.live.current().revoked).clone()
    }

    /// Returns whether a certificate of this host, with these times, is revoked. The function reads
    /// the revocations as [`Self::revocations`] does, and copies none.
    pub fn is_revoked(&self, host: &HostName, validity: &Validity) -> bool {
        self.live.current().revoked.covers(host, validity)
    }

    /// Takes in those revocations that the authority signed, for all processes of this host, and
    /// ends the connections that they concern. Returns whether any is new.
    ///
    /// # Errors
    /// [`TlsError::File`] if they cannot be recorded. They hold in this process nevertheless, and
    /// the next call records them.
    pub fn revoke(&self, new: Vec<Revocation>) -> Result<bool, TlsError> {
        self.live.revoke(new)
    }

    /// Returns whether the authority signed these bytes: see
    /// [`Authority::sign_text`](super::Authority::sign_text).
    pub fn is_signed(&self, content: &[u8], signature: &str) -> bool {
        self.live.is_signed(content, signature)
    }

    /// Returns the server's configuration for [`accept`](super::accept), which ends connections
    /// whose peer is revoked.
    pub fn server(&self) -> Server {
        Server { config: self.server.clone(), live: Some(self.live.clone()) }
    }

    /// Returns the client's configuration for [`connect`](super::connect), which ends connections
    /// whose peer is revoked.
    pub fn client(&self) -> Client {
        Client { config: self.client.clone(), live: Some(self.live.clone()) }
    }

    /// Returns the server's configuration, which demands a client certificate of the cluster's
    /// authority.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        self.server.clone()
    }

    /// Returns a client's configuration for questions whose answers the authority signed. The
    /// server's certificate may have ended, or not hold yet, as for [`Identity::admitting_config`].
    pub fn listening_config(&self) -> Arc<ClientConfig> {
        self.listening.clone()
    }

    /// Returns the configuration of a server that also serves hosts without a certificate, which
    /// want to join. It shows them the authority's certificate. A client's certificate may have
    /// ended less than [`GRACE`](super::GRACE) ago, or not hold yet: the caller must let it do
    /// nothing but renew.
    pub fn admitting_config(&self) -> Arc<ServerConfig> {
        self.admitting.clone()
    }

    /// Returns the client's configuration, which demands a server certificate of the cluster's
    /// authority.
    ///
    /// Peers have an address but prove a name: pass the host name, not the address, as the server
    /// name.
    pub fn client_config(&self) -> Arc<ClientConfig> {
        self.client.clone()
    }
}

/// Checks that peers will trust a host's certificate, which is or will be in `dir`.
pub(super) fn verify(dir: &Path, chain: &[CertificateDer<'_>]) -> Result<(), TlsError> {
    let (path, authority) = (dir.join(HOST_CERTIFICATE), dir.join(CA_CERTIFICATE));
    let roots = Arc::new(roots(&authority)?);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::new(provider())).build();
    let verifier = verifier.map_err(|error| TlsError::certificate(&authority, error))?;
    let verified = verifier.verify_client_cert(&chain[0], &chain[1..], UnixTime::now());
    verified.map(drop).map_err(|error| {
        let why = "no peer would trust it";
        let help = match is_of_time(&error) {
            true => "check the clock of this host first; if it is right, remove the certificate,",
            false => "remove it,",
        };
        let why = format!("{why}: {error}; {help} and run 'aquifer cluster join'");
        TlsError::certificate(&path, why)
    })
}

/// Returns the host that a certificate names: the common name of its subject.
///
/// Callers pass verified certificates only.
///
/// # Errors
/// [`TlsError::Peer`] if the certificate is malformed or names no host.
pub fn host_name(certificate: &CertificateDer<'_>) -> Result<HostName, TlsError> {
    let peer = |why: &str| TlsError::Peer(format!("its certificate {why}"));
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| peer("is malformed"))?;
    let name =
        parsed.subject().iter_common_name().next().ok_or_else(|| peer("has no common name"))?;
    let name = name.as_str().map_err(|_| peer("has a common name that is not text"))?;
    name.parse().map_err(|error| peer(&format!("names no host: {error}")))
}

/// Returns ring's TLS 1.3 suites, AES-128 first: it costs least per page, and the pages live for
/// hours only.
pub(super) fn provider() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        ..default_provider()
    }
}

pub(super) fn read_pem(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path)
        .map_err(|error| TlsError::Pem { path: path.to_owned(), source: pem::Error::Io(error) })
}

pub(super) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    certificates_of(path, &read_pem(path)?)
}

/// Returns the certificates in the text of a file.
pub(super) fn certificates_of(
    path: &Path,
    text: &[u8],
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let chain: Vec<_> = CertificateDer::pem_slice_iter(text)
        .collect::<Result<_, _>>()
        .map_err(|source| TlsError::Pem { path: path.to_owned(), source })?;
    if chain.is_empty() {
        return Err(TlsError::certificate(path, "it holds no certificate"));
    }
    Ok(chain)
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| TlsError::certificate(path, error))?;
    }
    Ok(roots)
}
