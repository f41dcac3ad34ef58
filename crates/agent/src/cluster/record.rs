//! What a signer records of the certificates that it gave to a host, in `hosts/NAME.pem`.
//!
//! The newest is first. Behind it are those that the host may still use: the one that it showed
//! when it asked, because the answer may be lost; and those that were issued later or end later,
//! because a clock was wrong or certificates lived for years. A revocation must cover them all. The
//! first that the signer knows of this machine also stays: it tells since when it has the name.

use std::fmt::Write as _;
use std::time::SystemTime;

use aquifer_transport::tls::{Validity, have_same_key};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

/// The certificates of a host, newest first.
#[derive(Debug, Default)]
pub(super) struct Record(Vec<(CertificateDer<'static>, Validity)>);

impl Record {
    /// Reads a record. Leaves out what is damaged.
    pub(super) fn of(pem: &str) -> Self {
        let all = CertificateDer::pem_slice_iter(pem.as_bytes()).flatten();
        Self(all.filter_map(with_validity).collect())
    }

    /// Returns the record with a new certificate (PEM), for which the host showed another.
    pub(super) fn with(self, new: &str, shown: Option<&CertificateDer<'static>>) -> Self {
        let mut all = Self::of(new).0;
        let Some((_, newest)) = all.first().cloned() else { return self };
        all.extend(shown.cloned().and_then(with_validity));
        let latest = |time: fn(&Validity) -> SystemTime| {
            self.0.iter().max_by_key(|(_, validity)| time(validity))
        };
        let (issued, ends) = (latest(|validity| validity.issued), latest(|validity| validity.ends));
        all.extend(issued.filter(|(_, former)| former.issued > newest.issued).cloned());
        all.extend(ends.filter(|(_, former)| former.ends > newest.ends).cloned());
        // The last is oldest.
        all.extend(self.0.iter().rev().min_by_key(|(_, validity)| validity.issued).cloned());
        let mut known = Vec::new();
        all.retain(|(certificate, _)| {
            let is_new = !known.contains(certificate);
            known.push(certificate.clone());
            is_new
        });
        Self(all)
    }

    /// Returns the record without the certificates that were issued until a time, when another
    /// machine had the name.
    pub(super) fn since(mut self, until: Option<SystemTime>) -> Self {
        self.0.retain(|(_, validity)| Some(validity.issued) > until);
        self
    }

    /// Returns the time of the first issue.
    pub(super) fn began(&self) -> Option<SystemTime> {
        self.0.iter().map(|(_, validity)| validity.issued).min()
    }

    /// Returns the time of the last issue.
    pub(super) fn issued(&self) -> Option<SystemTime> {
        self.0.iter().map(|(_, validity)| validity.issued).max()
    }

    /// Returns the end of the certificate that holds longest.
    pub(super) fn ends(&self) -> Option<SystemTime> {
        self.0.iter().map(|(_, validity)| validity.ends).max()
    }

    /// Returns whether one of the certificates has the key of this one.
    pub(super) fn has_key_of(&self, other: &CertificateDer<'_>) -> bool {
        self.0.iter().any(|(certificate, _)| have_same_key(certificate, other))
    }

    /// Returns the record as PEM.
    pub(super) fn to_pem(&self) -> String {
        let mut pem = String::new();
        for (certificate, _) in &self.0 {
            pem += "-----BEGIN CERTIFICATE-----\n";
            let text = BASE64_STANDARD.encode(certificate);
            for line in text.as_bytes().chunks(64) {
                // Writing to a string does not fail.
                let _ = writeln!(pem, "{}", String::from_utf8_lossy(line));
            }
            pem += "-----END CERTIFICATE-----\n";
        }
        pem
    }
}

fn with_validity(
    certificate: CertificateDer<'static>,
) -> Option<(CertificateDer<'static>, Validity)> {
    let validity = Validity::of(&certificate).ok()?;
    Some((certificate, validity))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use aquifer_page::HostName;
    use aquifer_transport::tls::{Authority, Renewal, TEN_YEARS};

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    #[test]
    fn a_record_keeps_what_a_host_may_still_use() {
        let dir = tempfile::tempdir().unwrap();
        let (host, now): (HostName, _) = ("b".parse().unwrap(), SystemTime::now());
        let sign = |issued, lifetime| {
            let authority = Authority::load(dir.path()).unwrap().with_lifetime(lifetime);
            let request = Renewal::prepare(dir.path(), &host).unwrap();
            authority.sign(request.der(), &host, &[], issued).unwrap()
        };
        let der = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        Authority::create(dir.path(), "test").unwrap();
        let (years, future) = (sign(now, TEN_YEARS), sign(now + DAY * 400, DAY * 7));
        let weeks: Vec<_> = (0..3).map(|days| sign(now + DAY * days, DAY * 7)).collect();

        let mut record = Record::of(&years);
        record = record.with(&future, Some(&der(&years)));
        for pair in weeks.windows(2) {
            record = record.with(&pair[0], None).with(&pair[1], Some(&der(&pair[0])));
        }
        let read = Record::of(&record.to_pem());
        assert_eq!(read.0, record.0);
        assert_eq!(read.0[0].0, der(&weeks[2]), "the newest is first");
        assert_eq!(read.0.len(), 4, "and the list stays short");
        for kept in [&weeks[2], &weeks[1], &years, &future] {
            assert!(read.has_key_of(&der(kept)));
        }
        assert!(!read.has_key_of(&der(&weeks[0])), "nobody uses it any more");
        assert_eq!(read.issued(), Some(Validity::of(&der(&future)).unwrap().issued));
        assert_eq!(read.ends(), Some(Validity::of(&der(&years)).unwrap().ends));
        assert!(Record::of("damaged").issued().is_none());

        // It began a day ago, however often it renews.
        let mut often = Record::of(&sign(now - DAY, DAY * 7));
        for days in 0..4 {
            let next = sign(now + DAY * days, DAY * 7);
            often = often.with(&next, None);
        }
        assert!(often.began() < Some(now - DAY / 2) && often.0.len() == 2);
        let rest = often.since(Some(now + DAY));
        assert!(rest.began() == rest.issued() && rest.began() > Some(now + DAY));
    }
}
