//! Settings for hosts' certificates.

use std::time::Duration;

use aquifer_transport::tls::{LIFETIME, LONGEST_LIFETIME, SHORTEST_DRILL, SHORTEST_LIFETIME};
use serde::Deserialize;

use super::duration;

/// Settings for the certificates that this host signs, if it can admit others.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CertificatesConfig {
    /// The time from a certificate's issue to its end. Hosts renew theirs after a third of it.
    #[serde(deserialize_with = "duration")]
    pub lifetime: Duration,
    /// Whether the lifetime may be shorter than an hour, for drills: hosts then lose contact with
    /// each other when the signer is away for minutes or seconds.
    pub for_drills: bool,
}

impl Default for CertificatesConfig {
    fn default() -> Self {
        Self { lifetime: LIFETIME, for_drills: false }
    }
}

impl CertificatesConfig {
    pub(super) fn validate(&self) -> Result<(), String> {
        let shortest = if self.for_drills { SHORTEST_DRILL } else { SHORTEST_LIFETIME };
        if (shortest..=LONGEST_LIFETIME).contains(&self.lifetime) {
            return Ok(());
        }
        let help = match self.for_drills {
            true => "",
            false => "; with for_drills = true, it may be 5s",
        };
        Err(format!(
            "[certificates] lifetime = \"{}\" must be between {} and {}{help}",
            humantime::format_duration(self.lifetime),
            humantime::format_duration(shortest),
            humantime::format_duration(LONGEST_LIFETIME),
        ))
    }
}
