//! What a host demands of its peers' certificates: webpki's checks, and that nobody revoked them.

use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};

use super::live::Live;
use super::validity::{GRACE, Validity};

/// Verifies clients or servers of the cluster.
#[derive(Debug)]
pub(super) struct Verifies<T: ?Sized> {
    pub(super) live: Arc<Live>,
    /// Whether a certificate that ended not long ago passes. The server then serves nothing but its
    /// renewal.
    pub(super) lapsed_pass: bool,
    pub(super) inner: Arc<T>,
}

impl<T: ?Sized> Verifies<T> {
    fn refuse_revoked(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        match self.live.is_revoked(certificate) {
            true => Err(CertificateError::Revoked.into()),
            false => Ok(()),
        }
    }
}

/// Returns the time at which a certificate that ended not long ago was valid for the last time.
fn last_moment(certificate: &CertificateDer<'_>, now: UnixTime) -> Option<UnixTime> {
    let ends = Validity::of(certificate).ok()?.ends;
    let ends = ends.duration_since(std::time::UNIX_EPOCH).ok()?;
    let is_recent = Duration::from_secs(now.as_secs()) < ends + GRACE;
    is_recent.then(|| UnixTime::since_unix_epoch(ends - Duration::from_secs(1)))
}

impl ClientCertVerifier for Verifies<dyn ClientCertVerifier> {
    fn offer_client_auth(&self) -> bool {
        self.inner.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.inner.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verify = |at| self.inner.verify_client_cert(end_entity, intermediates, at);
        let verified = verify(now).or_else(|error| match error {
            Error::InvalidCertificate(
                CertificateError::Expired | CertificateError::ExpiredContext { .. },
            ) if self.lapsed_pass => last_moment(end_entity, now).map_or(Err(error), verify),
            _ => Err(error),
        })?;
        self.refuse_revoked(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

impl ServerCertVerifier for Verifies<dyn ServerCertVerifier> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.inner.verify_server_cert(end_entity, intermediates, name, ocsp, now)?;
        self.refuse_revoked(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
