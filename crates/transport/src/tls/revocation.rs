//! Certificates that ended early: signed by the authority, so that no other host can revoke one.
//!
//! A revocation names a host and a time, and ends all its certificates that were issued until then.
//! So it also ends those that the signer has no record of, and a new machine can have the name.
//! Revocations merge in any order: of two for one host, the later holds. A revocation says when the
//! last of these certificates ends. A year after that, hosts forget it: their clocks may be wrong.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_page::HostName;
use ring::digest::{Context, SHA256};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::authority::write_file;
use super::joining::certificate;
use super::{TlsError, Validity};

/// The file of the revocations that a host knows, beside its certificate.
pub const REVOCATIONS: &str = "revoked.json";

/// The end of all certificates of a host that were issued until a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation {
    /// The host that the certificates name.
    pub host: HostName,
    /// Seconds since 1970. Certificates issued until then are revoked.
    pub until: u64,
    /// Seconds since 1970. Then all these certificates have ended, and nobody renews them.
    pub ends: u64,
    /// The authority's signature (ECDSA P-256, SHA-256, ASN.1 DER) as hexadecimal digits.
    pub signature: String,
}

/// How long after its end a host forgets a revocation: a clock that is ahead must lose none.
const KEPT: u64 = 366 * 24 * 3600;

/// The revocations that a host knows; at most one for each name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Revocations(BTreeMap<HostName, Revocation>);

/// Returns the bytes that the authority signs. A certificate begins otherwise, and a name has no
/// zero byte.
pub(super) fn claim(host: &HostName, until: u64, ends: u64) -> Vec<u8> {
    format!("aquifer revoke\0{host}\0{until}\0{ends}").into_bytes()
}

pub(super) fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    let byte = |digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok();
    text.len().is_multiple_of(2).then(|| digits.map(byte).collect()).flatten()
}

/// Returns whether one of these authorities signed the bytes.
pub(super) fn is_signed(
    content: &[u8],
    signature: &str,
    authorities: &[CertificateDer<'_>],
) -> bool {
    let Some(signature) = unhex(signature) else { return false };
    authorities.iter().any(|authority| {
        X509Certificate::from_der(authority).is_ok_and(|(_, parsed)| {
            let key = &parsed.public_key().subject_public_key.data;
            let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key);
            key.verify(content, &signature).is_ok()
        })
    })
}

/// Records revocations beside the certificate that a host is about to get: those that the authority
/// (PEM) signed.
///
/// # Errors
/// [`TlsError::Peer`] if the authority's certificate is malformed, [`TlsError::File`] if the file
/// cannot be read or written.
pub fn keep_revocations(
    dir: &Path,
    new: Vec<Revocation>,
    authority_pem: &str,
) -> Result<(), TlsError> {
    let authorities = [certificate(authority_pem)?];
    let mut known = Revocations::load(dir, &authorities)?;
    match known.merge(new, &authorities, SystemTime::now()) {
        true => known.store(dir),
        false => Ok(()),
    }
}

impl Revocation {
    fn is_of(&self, authorities: &[CertificateDer<'_>]) -> bool {
        is_signed(&claim(&self.host, self.until, self.ends), &self.signature, authorities)
    }
}

impl Revocations {
    /// Reads the file in `dir`; none if there is no file. Leaves out what no authority signed.
    pub(super) fn load(dir: &Path, authorities: &[CertificateDer<'_>]) -> Result<Self, TlsError> {
        let path = dir.join(REVOCATIONS);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self::default());
            }
            Err(source) => return Err(TlsError::file("read", &path, source)),
        };
        let read: Vec<Revocation> = serde_json::from_slice(&text)
            .map_err(|error| TlsError::file("read", &path, error.into()))?;
        let mut known = Self::default();
        known.merge(read, authorities, SystemTime::now());
        Ok(known)
    }

    pub(super) fn store(&self, dir: &Path) -> Result<(), TlsError> {
        let path = dir.join(REVOCATIONS);
        let text = serde_json::to_vec_pretty(&self.list())
            .map_err(|error| TlsError::file("write", &path, error.into()))?;
        write_file(&path, &text, 0o644, true)
    }

    /// Takes in the revocations that an authority signed, and forgets those that are long over;
    /// returns whether any is new. Of two with the same time, the one that ends later holds.
    pub(super) fn merge(
        &mut self,
        others: impl IntoIterator<Item = Revocation>,
        authorities: &[CertificateDer<'_>],
        now: SystemTime,
    ) -> bool {
        let least = seconds(now).saturating_sub(KEPT);
        self.0.retain(|_, known| known.ends >= least);
        let mut is_new = false;
        for other in others.into_iter().filter(|other| other.ends >= least) {
            let known = self.0.get(&other.host).map(|known| (known.until, known.ends));
            let is_later = known.is_none_or(|known| known < (other.until, other.ends));
            if is_later && other.is_of(authorities) {
                self.0.insert(other.host.clone(), other);
                is_new = true;
            }
        }
        is_new
    }

    /// Returns all, by name.
    pub fn list(&self) -> Vec<Revocation> {
        self.0.values().cloned().collect()
    }

    /// Returns until when the certificates of a host are revoked.
    pub fn until(&self, host: &HostName) -> Option<SystemTime> {
        self.0.get(host).map(|known| UNIX_EPOCH + Duration::from_secs(known.until))
    }

    /// Returns when the revocation of a host is over.
    pub fn ends(&self, host: &HostName) -> Option<SystemTime> {
        self.0.get(host).map(|known| UNIX_EPOCH + Duration::from_secs(known.ends))
    }

    /// Returns whether a certificate of this host, with these times, is revoked.
    pub fn covers(&self, host: &HostName, validity: &Validity) -> bool {
        self.until(host).is_some_and(|until| validity.issued <= until)
    }

    /// Returns a number that two hosts with the same revocations share; zero for none.
    pub fn digest(&self) -> u64 {
        if self.0.is_empty() {
            return 0;
        }
        let mut digest = Context::new(&SHA256);
        for Revocation { host, until, ends, .. } in self.0.values() {
            digest.update(&claim(host, *until, *ends));
            digest.update(b"\0");
        }
        let mut first = [0; 8];
        first.copy_from_slice(&digest.finish().as_ref()[..8]);
        u64::from_be_bytes(first).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::Authority;
    use rustls::pki_types::pem::PemObject as _;

    fn authority(dir: &Path) -> (Authority, CertificateDer<'static>) {
        let authority = Authority::create(dir, "test").unwrap();
        let certificate = authority.certificate().unwrap();
        (authority, CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap())
    }

    /// Seconds since 1970, far in the future.
    const FAR: u64 = 9_000_000_000;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn only_what_the_authority_signed_revokes() {
        let dir = tempfile::tempdir().unwrap();
        let (authority_a, a) = authority(&dir.path().join("a"));
        let (authority_b, b) = authority(&dir.path().join("b"));
        let host: HostName = "c".parse().unwrap();
        let good = authority_a.revoke(&host, at(1000), at(FAR)).unwrap();
        let foreign = authority_b.revoke(&host, at(2000), at(FAR)).unwrap();
        let later = Revocation { until: 3000, ..good.clone() };
        let longer = Revocation { ends: FAR + 1, ..good.clone() };
        let other = Revocation { host: "d".parse().unwrap(), ..good.clone() };
        let mut known = Revocations::default();
        let false_ones = [foreign.clone(), later, longer, other];
        assert!(!known.merge(false_ones, std::slice::from_ref(&a), at(0)));
        assert_eq!(known.digest(), 0);
        assert!(known.merge([good.clone()], std::slice::from_ref(&a), at(0)));
        assert!(!known.merge([good], std::slice::from_ref(&a), at(0)));
        let of = |issued| Validity { issued: at(issued), ends: at(9000) };
        assert!(known.covers(&host, &of(1000)) && known.covers(&host, &of(0)));
        assert!(!known.covers(&host, &of(1001)), "a new machine has the name");
        assert!(!known.covers(&"d".parse().unwrap(), &of(0)));
        known.store(dir.path()).unwrap();
        assert_eq!(Revocations::load(dir.path(), &[a]).unwrap(), known);
        assert_eq!(Revocations::load(dir.path(), &[b]).unwrap(), Revocations::default());
    }

    #[test]
    fn revocations_merge_alike_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let (authority, a) = authority(dir.path());
        let one = |name: &str, until| {
            authority.revoke(&name.parse().unwrap(), at(until), at(FAR)).unwrap()
        };
        let all = [one("c", 5), one("c", 9), one("d", 1), one("c", 7)];
        let merged = |order: [usize; 4]| {
            let mut known = Revocations::default();
            known.merge(order.map(|index| all[index].clone()), std::slice::from_ref(&a), at(0));
            known
        };
        let first = merged([0, 1, 2, 3]);
        assert_eq!(first.until(&"c".parse().unwrap()), Some(at(9)));
        for order in [[3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
            assert_eq!(merged(order).list().len(), 2);
            assert_eq!(merged(order).digest(), first.digest());
        }

        // Two signers revoked the host within one second.
        let ending = |ends| authority.revoke(&"c".parse().unwrap(), at(9), at(ends)).unwrap();
        let both = [ending(FAR), ending(FAR + 1)];
        for order in [[0, 1], [1, 0]] {
            let mut known = Revocations::default();
            for index in order {
                known.merge([both[index].clone()], std::slice::from_ref(&a), at(0));
            }
            assert_eq!(known.list(), both[1..]);
        }
    }

    #[test]
    fn a_revocation_is_forgotten_long_after_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let (authority, a) = authority(dir.path());
        let one =
            |name: &str, ends| authority.revoke(&name.parse().unwrap(), at(10), at(ends)).unwrap();
        let authorities = std::slice::from_ref(&a);
        let mut known = Revocations::default();
        assert!(known.merge([one("c", 100), one("d", 200)], authorities, at(50)));
        assert!(!known.merge([], authorities, at(100 + KEPT)), "nothing is new");
        assert_eq!(known.list().len(), 2, "this clock may be ahead");
        let later = at(101 + KEPT);
        assert!(!known.merge([one("c", 100)], authorities, later), "a host that is behind");
        assert_eq!(known.list().iter().map(|known| known.host.as_str()).collect::<Vec<_>>(), ["d"]);
    }

    #[test]
    fn a_new_member_begins_with_the_list() {
        let dir = tempfile::tempdir().unwrap();
        let (authority, a) = authority(&dir.path().join("ca"));
        let (other, _) = self::authority(&dir.path().join("other"));
        let host: HostName = "c".parse().unwrap();
        let list = vec![
            authority.revoke(&host, at(10), at(FAR)).unwrap(),
            other.revoke(&"d".parse().unwrap(), at(10), at(FAR)).unwrap(),
        ];
        keep_revocations(dir.path(), list, &authority.certificate().unwrap()).unwrap();
        let known = Revocations::load(dir.path(), &[a]).unwrap();
        assert_eq!((known.list().len(), known.until(&host)), (1, Some(at(10))));
    }
}
