//! What a host demands of its peers' certificates: webpki's checks, and that nobody revoked them.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

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
    /// Whether a certificate passes that ended not long ago, or does not hold yet. A server then
    /// serves nothing but its renewal. A client then believes only what the authority signed.
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

/// Returns the last moment of a certificate that ended not long ago, and the time of issue of one
/// that does not hold yet.
fn valid_moment(certificate: &CertificateDer<'_>, now: UnixTime) -> Option<UnixTime> {
    let since_1970 = |time: SystemTime| time.duration_since(UNIX_EPOCH).ok();
    let Validity { issued, ends } = Validity::of(certificate).ok()?;
    let (issued, ends) = (since_1970(issued)?, since_1970(ends)?);
    let now = Duration::from_secs(now.as_secs());
    let moment = if now < issued { issued } else { ends.checked_sub(Duration::from_secs(1))? };
    (now < ends + GRACE).then(|| UnixTime::since_unix_epoch(moment))
}

/// Returns whether a certificate is good at another time than now.
pub(super) fn is_of_time(error: &Error) -> bool {
    matches!(
        error,
        Error::InvalidCertificate(
            CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. },
        )
    )
}

/// Verifies a certificate now. If it only does not hold now, and may pass nevertheless, verifies
/// it at a time when it holds.
fn verify<V>(
    (certificate, now): (&CertificateDer<'_>, UnixTime),
    lapsed_pass: bool,
    verify: impl Fn(UnixTime) -> Result<V, Error>,
) -> Result<V, Error> {
    verify(now).or_else(|error| match is_of_time(&error) && lapsed_pass {
        true => valid_moment(certificate, now).map_or(Err(error), verify),
        false => Err(error),
    })
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
        let verified = verify((end_entity, now), self.lapsed_pass, |at| {
            self.inner.verify_client_cert(end_entity, intermediates, at)
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
        let verified = verify((end_entity, now), self.lapsed_pass, |at| {
            self.inner.verify_server_cert(end_entity, intermediates, name, ocsp, at)
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
