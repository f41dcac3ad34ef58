//! How a host gets its next certificate: for a new key, which leaves this host as little as the
//! former one.

use std::path::{Path, PathBuf};

use aquifer_page::HostName;
use rcgen::{CertificateParams, DnType, KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData as _};
use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

use super::authority::write_file;
use super::identity::{certificates, verify};
use super::joining::{certificate, public_key};
use super::{HOST_CERTIFICATE, HOST_KEY, TlsError, host_name};

/// A new key, and the request for its certificate.
pub struct Renewal {
    dir: PathBuf,
    host: HostName,
    key: KeyPair,
    der: Vec<u8>,
}

impl std::fmt::Debug for Renewal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Renewal").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl Renewal {
    /// Makes a new key for the host with a certificate in `dir`, and writes nothing.
    ///
    /// # Errors
    /// [`TlsError::Issue`] if the key cannot be made.
    pub fn prepare(dir: &Path, host: &HostName) -> Result<Self, TlsError> {
        let issue = |source| TlsError::Issue { path: dir.join(HOST_KEY), source };
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(issue)?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, host.as_str());
        let der = params.serialize_request(&key).map_err(issue)?.der().to_vec();
        Ok(Self { dir: dir.to_owned(), host: host.clone(), key, der })
    }

    /// Returns the request: PKCS#10 (RFC 2986), as DER.
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// Replaces the host's certificate and key in one step. `host.pem` has both then; `host.key`
    /// follows, for programs that read it alone. If that fails, the log says so.
    ///
    /// # Errors
    /// [`TlsError::Peer`] or [`TlsError::Certificate`] if the certificate is for another key or
    /// host, or peers would not trust it. [`TlsError::File`] if `host.pem` cannot be written.
    pub fn keep(self, pem: &str) -> Result<(), TlsError> {
        let wrong = |why: &str| Err(TlsError::Peer(why.to_owned()));
        let answer = certificate(pem)?;
        if host_name(&answer)? != self.host {
            return wrong("it sent a certificate for another host");
        }
        if public_key(pem)? != self.key.subject_public_key_info() {
            return wrong("it sent a certificate for another key");
        }
        verify(&self.dir, &[answer])?;
        let key = self.key.serialize_pem();
        let both = format!("{}\n{key}", pem.trim_end());
        write_file(&self.dir.join(HOST_CERTIFICATE), both.as_bytes(), 0o600, true)?;
        if let Err(error) = write_file(&self.dir.join(HOST_KEY), key.as_bytes(), 0o600, true) {
            tracing::warn!("{HOST_CERTIFICATE} has the next key, and {HOST_KEY} does not: {error}");
        }
        Ok(())
    }
}

/// Returns the certificate of the host in `dir`.
///
/// # Errors
/// [`TlsError::Pem`] if it cannot be read.
pub fn own_certificate(dir: &Path) -> Result<CertificateDer<'static>, TlsError> {
    Ok(certificates(&dir.join(HOST_CERTIFICATE))?.swap_remove(0))
}

/// Returns whether two certificates are for one key.
pub fn have_same_key(one: &CertificateDer<'_>, other: &CertificateDer<'_>) -> bool {
    let key = |der: &CertificateDer<'_>| {
        let (_, parsed) = X509Certificate::from_der(der).ok()?;
        Some(parsed.public_key().raw.to_vec())
    };
    key(one).is_some_and(|one| Some(one) == key(other))
}

/// Returns the names of a certificate besides that of its host: those by which programs reach it.
///
/// # Errors
/// [`TlsError::Peer`] if it is malformed.
pub fn other_names(certificate: &CertificateDer<'_>) -> Result<Vec<String>, TlsError> {
    let host = host_name(certificate)?;
    let malformed = || TlsError::Peer("its certificate is malformed".to_owned());
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| malformed())?;
    let names = parsed.subject_alternative_name().map_err(|_| malformed())?;
    let names = names.map(|names| names.value.general_names.as_slice()).unwrap_or_default();
    let text = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) if *name != host.as_str() => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match bytes.len() {
            4 => <[u8; 4]>::try_from(*bytes).ok().map(|ip| std::net::IpAddr::from(ip).to_string()),
            _ => <[u8; 16]>::try_from(*bytes).ok().map(|ip| std::net::IpAddr::from(ip).to_string()),
        },
        _ => None,
    };
    Ok(names.iter().filter_map(text).collect())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::tls::{Authority, Identity, Validity};

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn a_renewed_certificate_replaces_the_former_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let authority = Authority::create(&at("ca"), "test").unwrap();
        let host: HostName = "b".parse().unwrap();
        let names = ["192.0.2.1".to_owned(), "b.example.org".to_owned()];
        authority.issue(&at("b"), &host, &names, false).unwrap();
        let identity = Identity::load(&at("b")).unwrap();
        let before = identity.validity();
        assert_eq!(before.lifetime(), crate::tls::LIFETIME);

        let authority = authority.with_lifetime(MINUTE);
        let former = fs::read_to_string(at("b/host.pem")).unwrap();
        let names = other_names(&certificate(&former).unwrap()).unwrap();
        assert_eq!(names, ["192.0.2.1", "b.example.org"]);
        let sign = |renewal: &Renewal, host: &HostName| {
            authority.sign(renewal.der(), host, &names, SystemTime::now()).unwrap()
        };
        let other_host: HostName = "c".parse().unwrap();
        let renewal = Renewal::prepare(&at("b"), &host).unwrap();
        let other = Renewal::prepare(&at("b"), &host).unwrap();
        let (wrong_key, wrong_host) = (sign(&other, &host), sign(&renewal, &other_host));
        for wrong in [wrong_key, wrong_host] {
            let again = Renewal {
                key: KeyPair::from_pem(&renewal.key.serialize_pem()).unwrap(),
                dir: at("b"),
                host: host.clone(),
                der: Vec::new(),
            };
            again.keep(&wrong).unwrap_err();
        }
        assert_eq!(fs::read_to_string(at("b/host.pem")).unwrap(), former);
        let next = sign(&renewal, &host);
        renewal.keep(&next).unwrap();
        assert_eq!(identity.validity().lifetime(), MINUTE, "the files are read again");
        assert_eq!(Validity::of_host(&at("b")).unwrap(), identity.validity());
        Identity::verify_own(&at("b")).unwrap();
        // A reader between the two writes finds the key beside the certificate.
        fs::write(at("b/host.key"), "old").unwrap();
        Identity::load(&at("b")).unwrap();
        let mode = fs::metadata(at("b/host.pem")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "it has the key");

        // Without the second file, the certificate is renewed nevertheless.
        fs::remove_file(at("b/host.key")).unwrap();
        fs::create_dir(at("b/host.key")).unwrap();
        let renewal = Renewal::prepare(&at("b"), &host).unwrap();
        let next = sign(&renewal, &host);
        renewal.keep(&next).unwrap();
        Identity::load(&at("b")).unwrap();
    }

    #[test]
    fn a_reader_never_mixes_two_certificates() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let authority = Authority::create(&at("ca"), "test").unwrap();
        let host: HostName = "b".parse().unwrap();
        authority.issue(&at("b"), &host, &[], false).unwrap();
        let texts = [(); 2].map(|()| {
            let renewal = Renewal::prepare(&at("b"), &host).unwrap();
            let next = authority.sign(renewal.der(), &host, &[], SystemTime::now()).unwrap();
            renewal.keep(&next).unwrap();
            fs::read(at("b/host.pem")).unwrap()
        });
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for text in texts.iter().cycle().take(2000) {
                    fs::write(at("b/draft"), text).unwrap();
                    fs::rename(at("b/draft"), at("b/host.pem")).unwrap();
                }
            });
            while !writer.is_finished() {
                Identity::load(&at("b")).unwrap();
            }
        });
    }
}
