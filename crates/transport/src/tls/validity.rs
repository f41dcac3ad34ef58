//! How long a certificate holds, and when its host asks for the next one: policy without a clock.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::authority::CLOCK_SKEW;
use super::identity::certificates;
use super::{HOST_CERTIFICATE, TlsError};

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// The lifetime of a host's certificate, unless the operator chooses another.
pub const LIFETIME: Duration = Duration::from_secs(7 * 24 * 3600);
/// The shortest lifetime outside drills: a signer may be down for two thirds of it.
pub const SHORTEST_LIFETIME: Duration = HOUR;
/// The shortest lifetime of all.
pub const SHORTEST_DRILL: Duration = Duration::from_secs(5);
/// The longest lifetime that a signer gives. A host renews a longer one at once.
pub const LONGEST_LIFETIME: Duration = Duration::from_secs(30 * 24 * 3600);
/// The time after its end in which a certificate can still be renewed, and nothing else.
pub const GRACE: Duration = Duration::from_secs(30 * 24 * 3600);

/// How far in the future a certificate may have been issued: the clocks of hosts differ.
const AHEAD: Duration = Duration::from_secs(10 * 60);

/// The time between two attempts to renew doubles from the first of these to the second.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(600));

/// The times of a certificate, in whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// When it was issued.
    pub issued: SystemTime,
    /// The first moment at which nobody accepts it any more.
    pub ends: SystemTime,
}

/// What a certificate's remaining time calls for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// It does not hold yet: the clock of a signer was wrong. It can be renewed, and opens nothing
    /// else.
    Early,
    /// More than a third of its lifetime is left.
    Good,
    /// Less than a third is left: renewal fails, or the agent does not run.
    Ending,
    /// It has ended. It can be renewed, and opens nothing else.
    Ended,
    /// It ended too long ago to be renewed.
    Lost,
}

impl Validity {
    /// Reads the times of a certificate (DER).
    ///
    /// # Errors
    /// [`TlsError::Peer`] if it is malformed.
    pub fn of(certificate: &CertificateDer<'_>) -> Result<Self, TlsError> {
        let malformed = |_| TlsError::Peer("its certificate is malformed".to_owned());
        let (_, parsed) = X509Certificate::from_der(certificate).map_err(malformed)?;
        let time = |seconds: i64| UNIX_EPOCH + Duration::from_secs(seconds.max(0).cast_unsigned());
        let validity = parsed.validity();
        Ok(Self {
            issued: time(validity.not_before.timestamp()) + CLOCK_SKEW,
            // A certificate holds until the end of its last second (RFC 5280, section 4.1.2.5).
            ends: time(validity.not_after.timestamp()) + Duration::from_secs(1),
        })
    }

    /// Reads the times of the host's certificate in `dir`.
    ///
    /// # Errors
    /// [`TlsError::Pem`] if it cannot be read, [`TlsError::Peer`] if it is malformed.
    pub fn of_host(dir: &Path) -> Result<Self, TlsError> {
        Self::of(&certificates(&dir.join(HOST_CERTIFICATE))?[0])
    }

    /// Returns the time from its issue to its end.
    pub fn lifetime(&self) -> Duration {
        self.ends.duration_since(self.issued).unwrap_or_default()
    }

    /// Returns the time that is left; zero if it has ended.
    pub fn left(&self, now: SystemTime) -> Duration {
        self.ends.duration_since(now).unwrap_or_default()
    }

    /// Returns when the host begins to ask for the next certificate: after a third of the lifetime,
    /// so that a signer can be down for two thirds. A certificate from before lifetimes were short
    /// is renewed at once.
    pub fn renewal_at(&self) -> SystemTime {
        if self.is_long() { self.issued } else { self.issued + self.lifetime() / 3 }
    }

    /// Returns whether the host asks for the next certificate now. It also does so if this one is
    /// of the future, because the clock of a signer was wrong.
    pub fn is_due(&self, now: SystemTime) -> bool {
        now >= self.renewal_at() || self.issued > now + AHEAD
    }

    /// Returns whether the certificate lives longer than any that a signer gives now: it is from
    /// before certificates were short.
    pub fn is_long(&self) -> bool {
        self.lifetime() > LONGEST_LIFETIME + DAY
    }

    /// Returns whether peers accept the certificate at this time.
    pub fn holds(&self, now: SystemTime) -> bool {
        now < self.ends && now + CLOCK_SKEW >= self.issued
    }

    /// Says what the remaining time calls for.
    pub fn expiry(&self, now: SystemTime) -> Expiry {
        let left = self.left(now);
        if now + CLOCK_SKEW < self.issued {
            Expiry::Early
        } else if now.duration_since(self.ends).is_ok_and(|ended| ended > GRACE) {
            Expiry::Lost
        } else if left.is_zero() {
            Expiry::Ended
        } else if left < self.lifetime() / 3 {
            Expiry::Ending
        } else {
            Expiry::Good
        }
    }

    /// Returns the time from one failed attempt to renew to the next: it doubles with each failure,
    /// and is short for a short lifetime.
    pub fn retry_after(&self, failures: u32) -> Duration {
        let (first, last) = RETRY;
        let doubled = first.saturating_mul(1_u32.checked_shl(failures).unwrap_or(u32::MAX));
        doubled.min(last).min(self.lifetime() / 20).max(first / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lasting(lifetime: Duration) -> Validity {
        let issued = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        Validity { issued, ends: issued + lifetime }
    }

    #[test]
    fn a_week_is_renewed_from_its_third_day_on() {
        let week = lasting(LIFETIME);
        assert_eq!(week.renewal_at(), week.issued + LIFETIME / 3);
        for (after, expiry) in [
            (Duration::ZERO, Expiry::Good),
            (DAY * 4, Expiry::Good),
            (DAY * 5, Expiry::Ending),
            (LIFETIME, Expiry::Ended),
            (LIFETIME + GRACE, Expiry::Ended),
            (LIFETIME + GRACE + HOUR, Expiry::Lost),
        ] {
            assert_eq!(week.expiry(week.issued + after), expiry, "{after:?}");
        }
    }

    #[test]
    fn a_certificate_of_the_future_is_renewed_at_once() {
        let week = lasting(LIFETIME);
        let set_back = |by: Duration| week.issued - by;
        assert_eq!(week.expiry(set_back(HOUR)), Expiry::Good);
        assert!(week.holds(set_back(HOUR)) && week.is_due(set_back(HOUR)));
        assert!(!week.is_due(set_back(AHEAD)), "clocks differ");
        assert_eq!(week.expiry(set_back(DAY * 2)), Expiry::Early);
        assert!(!week.holds(set_back(DAY * 2)) && week.is_due(set_back(DAY * 2)));
        assert!(!week.is_due(week.issued) && week.is_due(week.issued + LIFETIME / 2));
        assert!(week.holds(week.issued) && !week.holds(week.ends));
    }

    #[test]
    fn a_certificate_of_years_is_renewed_at_once() {
        let years = lasting(DAY * 3653);
        assert_eq!(years.renewal_at(), years.issued);
        let longest = lasting(LONGEST_LIFETIME);
        assert!(longest.renewal_at() > longest.issued, "not each second again");
    }

    #[test]
    fn attempts_grow_rare_but_never_too_rare() {
        let week = lasting(LIFETIME);
        let waits: Vec<_> = (0..12).map(|failures| week.retry_after(failures).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]);
        assert_eq!(week.retry_after(u32::MAX), Duration::from_secs(600));
        let drill = lasting(Duration::from_secs(60));
        assert_eq!(drill.retry_after(9), Duration::from_secs(3));
        assert_eq!(lasting(SHORTEST_DRILL).retry_after(9), Duration::from_millis(500));
    }
}
