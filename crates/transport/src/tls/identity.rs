//! The certificate that a host presents to its peers, and its demands on theirs.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use aquifer_page::HostName;
use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{cipher_suite, default_provider};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::ClientCertVerifierBuilder;
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::TlsError;
use super::authority::{CA_CERTIFICATE, HOST_CERTIFICATE, HOST_KEY};

/// A host's certificate and key, ready for use as server and as client; cheap to clone.
///
/// Both configurations allow TLS 1.3 only and require a certificate of the cluster's authority from
/// both sides. They use no session tickets: a resumed session would outlive the certificate that it
/// began with.
#[derive(Clone)]
pub struct Identity {
    host: HostName,
    server: Arc<ServerConfig>,
    admitting: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("host", &self.host).finish_non_exhaustive()
    }
}

impl Identity {
    /// Loads `host.pem`, `host.key` and `ca.pem` from `dir`, as
    /// [`Authority::issue`](super::Authority::issue) wrote them.
    ///
    /// # Errors
    /// [`TlsError::Pem`] names a missing or malformed file. [`TlsError::Certificate`] if the files
    /// do not match each other.
    pub fn load(dir: &Path) -> Result<Self, TlsError> {
        let path = dir.join(HOST_CERTIFICATE);
        let chain = certificates(&path)?;
        let host = host_name(&chain[0]).map_err(|error| TlsError::certificate(&path, error))?;
        let key_path = dir.join(HOST_KEY);
        let key = PrivateKeyDer::from_pem_file(&key_path)
            .map_err(|source| TlsError::Pem { path: key_path, source })?;
        let roots = Arc::new(roots(&dir.join(CA_CERTIFICATE))?);

        let provider = Arc::new(provider());
        let failed = |error: &dyn fmt::Display| TlsError::certificate(&path, error);
        let verifier =
            || WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone());
        let serve = |verifier: ClientCertVerifierBuilder, chain: Vec<_>| {
            let verifier = verifier.build().map_err(|error| failed(&error))?;
            let mut server = ServerConfig::builder_with_provider(provider.clone())
                .with_protocol_versions(&[&TLS13])
                .map_err(|error| failed(&error))?
                .with_client_cert_verifier(verifier)
                .with_single_cert(chain, key.clone_key())
                .map_err(|error| failed(&error))?;
            server.send_tls13_tickets = 0;
            server.enable_secret_extraction = true;
            Ok::<_, TlsError>(Arc::new(server))
        };
        let server = serve(verifier(), chain.clone())?;
        let with_authority = [chain.clone(), certificates(&dir.join(CA_CERTIFICATE))?].concat();
        let admitting = serve(verifier().allow_unauthenticated(), with_authority)?;

        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| failed(&error))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(|error| failed(&error))?;
        client.resumption = Resumption::disabled();
        client.enable_secret_extraction = true;
        Ok(Self { host, server, admitting, client: Arc::new(client) })
    }

    /// Checks that peers will trust the certificate in `dir`: the authority beside it has signed
    /// it, and it has not expired.
    ///
    /// # Errors
    /// As [`Identity::load`], or [`TlsError::Certificate`] with the certificate's path and its
    /// defect.
    pub fn verify_own(dir: &Path) -> Result<(), TlsError> {
        let (path, authority) = (dir.join(HOST_CERTIFICATE), dir.join(CA_CERTIFICATE));
        let chain = certificates(&path)?;
        let roots = Arc::new(roots(&authority)?);
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots, Arc::new(provider())).build();
        let verifier = verifier.map_err(|error| TlsError::certificate(&authority, error))?;
        match verifier.verify_client_cert(&chain[0], &chain[1..], UnixTime::now()) {
            Ok(_) => Ok(()),
            Err(error) => Err(TlsError::certificate(
                &path,
                format!(
                    "no peer would trust it: {error}; remove it, and run 'aquifer cluster join'"
                ),
            )),
        }
    }

    /// Returns the host name in this host's certificate.
    pub fn host(&self) -> &HostName {
        &self.host
    }

    /// Returns the server's configuration, which demands a client certificate of the cluster's
    /// authority.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        self.server.clone()
    }

    /// Returns the configuration of a server that also serves hosts without a certificate, which
    /// want to join. It shows them the authority's certificate.
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

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let pem = |source| TlsError::Pem { path: path.to_owned(), source };
    let chain: Vec<_> =
        CertificateDer::pem_file_iter(path).map_err(pem)?.collect::<Result<_, _>>().map_err(pem)?;
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
