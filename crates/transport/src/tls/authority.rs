//! The cluster's certificate authority: needed to admit hosts, never to run.

use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use aquifer_page::HostName;
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
    SanType, SigningKey,
};
use rustix::fs::{CWD, RenameFlags};
use rustls::pki_types::DnsName;

use super::{LIFETIME, Revocation, TlsError, revocation};

/// The file of the authority's certificate; it is public, and every host has a copy.
pub const CA_CERTIFICATE: &str = "ca.pem";
/// The file of the authority's key; its holder can admit hosts.
pub const CA_KEY: &str = "ca.key";
/// The file of a host's certificate.
pub const HOST_CERTIFICATE: &str = "host.pem";
/// The file of a host's key; its holder can act as that host.
pub const HOST_KEY: &str = "host.key";

/// The lifetime of an authority's certificate, and of hosts' certificates that nobody renews.
pub const TEN_YEARS: Duration = Duration::from_secs(3653 * 24 * 3600);
/// Certificates become valid a day before their creation, because the clocks of hosts differ.
pub(super) const CLOCK_SKEW: Duration = Duration::from_secs(24 * 3600);

/// A cluster's certificate authority (ECDSA P-256, valid for ten years).
///
/// Only hosts with a certificate from it may call each other. Their certificates live for
/// [`LIFETIME`], unless [`Authority::with_lifetime`] says otherwise.
pub struct Authority {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
    lifetime: Duration,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl Authority {
    /// Creates the authority of a new cluster: `ca.pem` and `ca.key` (mode 0600) in `dir`.
    ///
    /// The function creates `dir` if it is missing.
    ///
    /// # Errors
    /// [`TlsError::AuthorityExists`] if `dir` already has an authority: overwriting it would orphan
    /// every host that it admitted. [`TlsError::File`] if a file cannot be written.
    /// [`TlsError::Issue`] if the certificate cannot be made.
    pub fn create(dir: &Path, cluster: &str) -> Result<Self, TlsError> {
        make_dir(dir)?;
        let (certificate, key) = (dir.join(CA_CERTIFICATE), dir.join(CA_KEY));
        refuse_existing(&[&certificate, &key]).map_err(of_authority)?;
        let issue = |source| TlsError::Issue { path: certificate.clone(), source };

        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(issue)?;
        let mut params = validity(CertificateParams::default(), SystemTime::now(), TEN_YEARS);
        params.distinguished_name.push(DnType::CommonName, format!("Aquifer cluster {cluster}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let signed = params.self_signed(&pair).map_err(issue)?;

        // The key is last: with it, the authority is complete.
        write_file(&certificate, signed.pem().as_bytes(), 0o644, false).map_err(of_authority)?;
        write_file(&key, pair.serialize_pem().as_bytes(), 0o600, false).map_err(of_authority)?;
        Ok(Self { dir: dir.to_owned(), issuer: Issuer::new(params, pair), lifetime: LIFETIME })
    }

    /// Opens the authority that [`Authority::create`] made in `dir`.
    ///
    /// # Errors
    /// [`TlsError::File`] if a file cannot be read, [`TlsError::Issue`] if one is malformed.
    pub fn load(dir: &Path) -> Result<Self, TlsError> {
        let (certificate, key) = (dir.join(CA_CERTIFICATE), dir.join(CA_KEY));
        let pair = KeyPair::from_pem(&read_file(&key)?)
            .map_err(|source| TlsError::Issue { path: key, source })?;
        let issuer = Issuer::from_ca_cert_pem(&read_file(&certificate)?, pair)
            .map_err(|source| TlsError::Issue { path: certificate, source })?;
        Ok(Self { dir: dir.to_owned(), issuer, lifetime: LIFETIME })
    }

    /// Returns the authority, which gives hosts certificates of this lifetime.
    pub fn with_lifetime(self, lifetime: Duration) -> Self {
        Self { lifetime, ..self }
    }

    /// Ends all certificates of a host that were issued until a time, to the second. After `ends`,
    /// hosts forget the revocation: the caller knows that none of these certificates holds then.
    ///
    /// # Errors
    /// [`TlsError::Issue`] if the key cannot sign.
    pub fn revoke(
        &self,
        host: &HostName,
        until: SystemTime,
        ends: SystemTime,
    ) -> Result<Revocation, TlsError> {
        let (until, ends) = (revocation::seconds(until), revocation::seconds(ends));
        let signature = self.sign_text(&revocation::claim(host, until, ends))?;
        Ok(Revocation { host: host.clone(), until, ends, signature })
    }

    /// Signs bytes that no certificate begins with; returns the signature as hexadecimal digits.
    ///
    /// # Errors
    /// [`TlsError::Issue`] if the key cannot sign.
    pub fn sign_text(&self, content: &[u8]) -> Result<String, TlsError> {
        let path = || self.dir.join(CA_KEY);
        let signed = SigningKey::sign(self.issuer.key(), content);
        Ok(revocation::hex(&signed.map_err(|source| TlsError::Issue { path: path(), source })?))
    }

    /// Admits a host: writes `host.pem`, `host.key` (mode 0600) and a copy of `ca.pem` into `dir`.
    ///
    /// The function creates `dir` if it is missing; `dir` may be the authority's own directory.
    ///
    /// The certificate names the host as its subject and as a DNS name. `names` are further DNS
    /// names and IP addresses for programs that reach the host by those. Hosts recognise each other
    /// by the host name alone. With `force`, the function replaces the files of an earlier
    /// certificate.
    ///
    /// # Errors
    /// [`TlsError::Exists`] if files exist and `force` is not set. [`TlsError::Name`] for a name
    /// that a certificate cannot carry. [`TlsError::File`] if a file cannot be read or written.
    /// [`TlsError::Issue`] if the certificate cannot be made.
    pub fn issue(
        &self,
        dir: &Path,
        host: &HostName,
        names: &[String],
        force: bool,
    ) -> Result<(), TlsError> {
        make_dir(dir)?;
        let (certificate, key, ca) =
            (dir.join(HOST_CERTIFICATE), dir.join(HOST_KEY), dir.join(CA_CERTIFICATE));
        if !force {
            refuse_existing(&[&certificate, &key])?;
        }
        let issue = |source| TlsError::Issue { path: certificate.clone(), source };

        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(issue)?;
        let params = of_host(host, names, SystemTime::now(), self.lifetime)?;
        let signed = params.signed_by(&pair, &self.issuer).map_err(issue)?;

        let own = read_file(&self.dir.join(CA_CERTIFICATE))?;
        if fs::read_to_string(&ca).ok().as_ref() != Some(&own) {
            write_file(&ca, own.as_bytes(), 0o644, force)?;
        }
        write_file(&key, pair.serialize_pem().as_bytes(), 0o600, force)?;
        write_file(&certificate, signed.pem().as_bytes(), 0o644, force)
    }

    /// Signs the certificate of a host that made its own key, and returns it as PEM. The
    /// certificate has the names given here and nothing else of the request but its key. `request`
    /// is a PKCS#10 request (RFC 2986), as DER. `issued` is now, or later if the name's earlier
    /// certificates are revoked until now.
    ///
    /// # Errors
    /// [`TlsError::Request`] if the request is malformed or not signed with its key.
    /// [`TlsError::Name`] for a name that a certificate cannot carry. [`TlsError::Issue`] if the
    /// certificate cannot be made.
    pub fn sign(
        &self,
        request: &[u8],
        host: &HostName,
        names: &[String],
        issued: SystemTime,
    ) -> Result<String, TlsError> {
        let request = CertificateSigningRequestParams::from_der(&request.into());
        let key = request.map_err(TlsError::Request)?.public_key;
        let params = of_host(host, names, issued, self.lifetime)?;
        let signed = params.signed_by(&key, &self.issuer);
        let path = || self.dir.join(CA_CERTIFICATE);
        Ok(signed.map_err(|source| TlsError::Issue { path: path(), source })?.pem())
    }

    /// Returns the authority's certificate as PEM.
    ///
    /// # Errors
    /// [`TlsError::File`] if it cannot be read.
    pub fn certificate(&self) -> Result<String, TlsError> {
        read_file(&self.dir.join(CA_CERTIFICATE))
    }
}

/// Returns the content of a host's certificate.
fn of_host(
    host: &HostName,
    names: &[String],
    issued: SystemTime,
    lifetime: Duration,
) -> Result<CertificateParams, TlsError> {
    let mut params = validity(CertificateParams::default(), issued, lifetime);
    params.distinguished_name.push(DnType::CommonName, host.as_str());
    params.subject_alt_names = vec![SanType::DnsName(dns_name(host.as_str())?)];
    for name in names {
        params.subject_alt_names.push(match name.parse::<IpAddr>() {
            Ok(ip) => SanType::IpAddress(ip),
            Err(_) => SanType::DnsName(dns_name(name)?),
        });
    }
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn validity(
    mut params: CertificateParams,
    issued: SystemTime,
    lifetime: Duration,
) -> CertificateParams {
    params.not_before = (issued - CLOCK_SKEW).into();
    // Its last second is the one before its end: see `Validity`.
    params.not_after = (issued + lifetime - Duration::from_secs(1)).into();
    params
}

/// Returns the name as a certificate carries it.
///
/// Peers verify a host by it, so verification must accept it. It rejects digits alone, which read
/// as an address, and labels that end in a hyphen.
fn dns_name(name: &str) -> Result<Ia5String, TlsError> {
    let error = || TlsError::Name(name.to_owned());
    DnsName::try_from(name).map_err(|_| error())?;
    name.try_into().map_err(|_| error())
}

pub(super) fn make_dir(dir: &Path) -> Result<(), TlsError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|source| TlsError::file("create", dir, source))
}

fn refuse_existing(paths: &[&Path]) -> Result<(), TlsError> {
    match paths.iter().find(|path| path.symlink_metadata().is_ok()) {
        Some(path) => Err(TlsError::Exists(path.to_path_buf())),
        None => Ok(()),
    }
}

/// Converts an error about an existing file to that of an authority, which nothing replaces.
fn of_authority(error: TlsError) -> TlsError {
    match error {
        TlsError::Exists(path) => TlsError::AuthorityExists(path),
        other => other,
    }
}

pub(super) fn read_file(path: &Path) -> Result<String, TlsError> {
    fs::read_to_string(path).map_err(|source| TlsError::file("read", path, source))
}

/// Writes the file atomically: a reader never sees half a key, and a crash leaves the old file. The
/// new file survives a loss of power.
pub(super) fn write_file(
    path: &Path,
    text: &[u8],
    mode: u32,
    replace: bool,
) -> Result<(), TlsError> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(".new");
    let draft = Path::new(&draft);
    let written = write_draft(draft, text, mode).and_then(|()| {
        let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        rustix::fs::renameat_with(CWD, draft, CWD, path, flags).map_err(io::Error::from)?;
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        File::open(dir.unwrap_or(Path::new("."))).and_then(|dir| dir.sync_all())
    });
    written.map_err(|source| {
        let _ = fs::remove_file(draft);
        match source.kind() {
            io::ErrorKind::AlreadyExists => TlsError::Exists(path.to_owned()),
            _ => TlsError::file("write", path, source),
        }
    })
}

fn write_draft(draft: &Path, text: &[u8], mode: u32) -> io::Result<()> {
    let _ = fs::remove_file(draft);
    let mut file = File::options().write(true).create_new(true).mode(mode).open(draft)?;
    file.write_all(text)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_host_is_replaced_by_force() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), "test").unwrap();
        let error = Authority::create(dir.path(), "test").unwrap_err();
        assert!(
            matches!(&error, TlsError::AuthorityExists(path) if path.ends_with(CA_CERTIFICATE)),
            "{error}"
        );
        assert!(!error.to_string().contains("overwrite it with --force"), "{error}");

        let host: HostName = "a".parse().unwrap();
        authority.issue(dir.path(), &host, &[], false).unwrap();
        let error = authority.issue(dir.path(), &host, &[], false).unwrap_err();
        assert!(
            matches!(&error, TlsError::Exists(path) if path.ends_with(HOST_CERTIFICATE)),
            "{error}"
        );
        assert!(error.to_string().contains("overwrite it with --force"), "{error}");
        authority.issue(dir.path(), &host, &[], true).unwrap();
    }
}
