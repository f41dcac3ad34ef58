//! How a host without a certificate joins a cluster: it knows the authority by its fingerprint,
//! makes its own key, and requests a certificate for it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_page::HostName;
use rcgen::{CertificateParams, DnType, KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData as _};
use ring::digest::{SHA256, digest};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::authority::{make_dir, read_file, write_file};
use super::identity::provider;
use super::{CA_CERTIFICATE, HOST_CERTIFICATE, HOST_KEY, TlsError, host_name};

/// The SHA-256 of an authority's certificate (DER).
pub type Fingerprint = [u8; 32];

/// Returns the fingerprint of the first certificate of a PEM text.
///
/// # Errors
/// [`TlsError::Peer`] if it has none.
pub fn fingerprint(pem: &str) -> Result<Fingerprint, TlsError> {
    Ok(of_der(&certificate(pem)?))
}

fn of_der(certificate: &CertificateDer<'_>) -> Fingerprint {
    let mut fingerprint = [0; 32];
    fingerprint.copy_from_slice(digest(&SHA256, certificate).as_ref());
    fingerprint
}

pub(super) fn certificate(pem: &str) -> Result<CertificateDer<'static>, TlsError> {
    CertificateDer::from_pem_slice(pem.as_bytes())
        .map_err(|error| TlsError::Peer(format!("it sent a malformed certificate: {error}")))
}

/// Returns the public key of a certificate (PEM), as the subject's key info in DER.
pub(super) fn public_key(pem: &str) -> Result<Vec<u8>, TlsError> {
    let der = certificate(pem)?;
    let malformed = |_| TlsError::Peer("it sent a malformed certificate".to_owned());
    let (_, parsed) = X509Certificate::from_der(&der).map_err(malformed)?;
    Ok(parsed.public_key().raw.to_vec())
}

/// Returns the client's configuration of a host that has no certificate yet: it trusts each host
/// whose certificate that authority signed, and proves nothing of itself.
///
/// # Errors
/// [`TlsError::Handshake`] if the library lacks what it needs.
pub fn joining_config(authority: Fingerprint) -> Result<ClientConfig, TlsError> {
    let provider = Arc::new(provider());
    let verifier = Arc::new(ByFingerprint { authority, provider: provider.clone() });
    let config = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13])?;
    Ok(config.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth())
}

/// Verifies a server by the authority that its chain contains. The server may be any host of the
/// cluster, whatever its name.
#[derive(Debug)]
struct ByFingerprint {
    authority: Fingerprint,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for ByFingerprint {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let unknown = || Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let mut chain = intermediates.iter();
        let root = chain.find(|der| of_der(der) == self.authority).ok_or_else(unknown)?;
        let mut roots = RootCertStore::empty();
        roots.add(root.clone().into_owned())?;
        let host = host_name(end_entity).map_err(|error| Error::General(error.to_string()))?;
        let name = ServerName::try_from(host.to_string()).map_err(|_| unknown())?;
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone())
            .build()
            .map_err(|error| Error::General(error.to_string()))?
            .verify_server_cert(end_entity, &[], &name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// A host's key, and the request for its certificate.
pub struct Request {
    dir: PathBuf,
    key: KeyPair,
    der: Vec<u8>,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl Request {
    /// Makes a key in `dir`, or uses the one that a former request left there: the same key may
    /// have the same certificate again.
    ///
    /// # Errors
    /// [`TlsError::Exists`] if there is a certificate already. [`TlsError::File`] if the key cannot
    /// be read or written. [`TlsError::Issue`] if it is malformed.
    pub fn prepare(dir: &Path, host: &HostName) -> Result<Self, TlsError> {
        make_dir(dir)?;
        let (path, certificate) = (dir.join(HOST_KEY), dir.join(HOST_CERTIFICATE));
        if certificate.symlink_metadata().is_ok() {
            return Err(TlsError::Exists(certificate));
        }
        let issue = |source| TlsError::Issue { path: path.clone(), source };
        let key = if path.symlink_metadata().is_ok() {
            KeyPair::from_pem(&read_file(&path)?).map_err(issue)?
        } else {
            let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(issue)?;
            write_file(&path, key.serialize_pem().as_bytes(), 0o600, false)?;
            key
        };
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, host.as_str());
        let der = params.serialize_request(&key).map_err(issue)?.der().to_vec();
        Ok(Self { dir: dir.to_owned(), key, der })
    }

    /// Returns the request: PKCS#10 (RFC 2986), as DER.
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// Writes the certificate that answers the request, and the authority's.
    ///
    /// # Errors
    /// [`TlsError::Peer`] if the authority is another, or the certificate is for another key or
    /// host. [`TlsError::File`] if a file cannot be written.
    pub fn keep(
        self,
        host: &HostName,
        certificate_pem: &str,
        authority_pem: &str,
        authority: Fingerprint,
    ) -> Result<(), TlsError> {
        let wrong = |why: &str| Err(TlsError::Peer(why.to_owned()));
        if fingerprint(authority_pem)? != authority {
            return wrong("it sent the certificate of another authority");
        }
        if host_name(&certificate(certificate_pem)?)? != *host {
            return wrong("it sent a certificate for another host");
        }
        if public_key(certificate_pem)? != self.key.subject_public_key_info() {
            return wrong("it sent a certificate for another key");
        }
        let write = |file, pem: &str| {
            write_file(&self.dir.join(file), pem.as_bytes(), 0o644, file == CA_CERTIFICATE)
        };
        write(CA_CERTIFICATE, authority_pem)?;
        write(HOST_CERTIFICATE, certificate_pem)
    }
}

/// Returns whether a request (DER) is for the key of this certificate (PEM).
pub fn same_key(certificate_pem: &str, request: &[u8]) -> bool {
    let request = rcgen::CertificateSigningRequestParams::from_der(&request.into());
    let requested = request.ok().map(|request| request.public_key.subject_public_key_info());
    requested.is_some_and(|key| public_key(certificate_pem).is_ok_and(|known| known == key))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::tls::{Authority, Identity};

    #[test]
    fn a_requested_certificate_serves_as_an_issued_one() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let authority = Authority::create(&at("ca"), "test").unwrap();
        let ca = authority.certificate().unwrap();
        let host: HostName = "b".parse().unwrap();

        let first = Request::prepare(&at("b"), &host).unwrap().der().to_vec();
        // The answer was lost: the second request is for the same key.
        let again = Request::prepare(&at("b"), &host).unwrap();
        let certificate = authority
            .sign(again.der(), &host, &["192.0.2.1".to_owned()], SystemTime::now())
            .unwrap();
        assert!(same_key(&certificate, &first) && same_key(&certificate, again.der()));
        let other = Request::prepare(&at("c"), &host).unwrap();
        assert!(!same_key(&certificate, other.der()));

        again.keep(&host, &certificate, &ca, fingerprint(&ca).unwrap()).unwrap();
        Identity::verify_own(&at("b")).unwrap();
        assert_eq!(*Identity::load(&at("b")).unwrap().host(), host);
        let error = Request::prepare(&at("b"), &host).unwrap_err();
        assert!(matches!(error, TlsError::Exists(_)), "{error}");
    }

    #[test]
    fn an_answer_for_another_key_host_or_authority_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let authority = Authority::create(&at("ca"), "test").unwrap();
        let ca = authority.certificate().unwrap();
        let known = fingerprint(&ca).unwrap();
        let other = Authority::create(&at("other"), "test").unwrap().certificate().unwrap();
        let [b, c]: [HostName; 2] = ["b", "c"].map(|name| name.parse().unwrap());
        let sign = |dir: &str, host| {
            let request = Request::prepare(&at(dir), host).unwrap();
            authority.sign(request.der(), host, &[], SystemTime::now()).unwrap()
        };
        let (good, wrong_host, wrong_key) = (sign("b", &b), sign("b", &c), sign("c", &b));
        for (certificate, ca) in [(&wrong_host, &ca), (&wrong_key, &ca), (&good, &other)] {
            let request = Request::prepare(&at("b"), &b).unwrap();
            let error = request.keep(&b, certificate, ca, known).unwrap_err();
            assert!(matches!(error, TlsError::Peer(_)), "{error}");
            assert!(!at("b/host.pem").exists());
        }
        let mut malformed = Request::prepare(&at("b"), &b).unwrap().der().to_vec();
        *malformed.last_mut().unwrap() ^= 1;
        authority.sign(&malformed, &b, &[], SystemTime::now()).unwrap_err();
    }
}
