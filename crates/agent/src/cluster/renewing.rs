//! How this host keeps a valid certificate: it asks any signer for the next one in good time.
//!
//! [`Validity`] decides when. While no signer answers, the present certificate serves until its
//! end. After that this host reaches no other and none reaches it, except that gossip goes on, and
//! connections that are open stay open. A signer renews a certificate that ended, so the host comes
//! back by itself. The same holds for one of the future, after the clock of a signer was wrong.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aquifer_api::message::{NextCertificate, SignedCertificate};
use aquifer_api::status::{Certificate, CertificateState, Standing};
use aquifer_api::{Problem, path};
use aquifer_page::{HostName, lock};
use aquifer_transport::tls::{Expiry, Identity, Renewal, TlsError, Validity};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::admitting::sign_own;
use super::{Admission, ClusterDir};
use crate::config::Config;
use crate::peers::Peers;

/// The longest time between two looks at the clock, which may be set.
const CLOCK_POLL_INTERVAL: Duration = Duration::from_secs(60);

/// How often a host that needs a certificate looks for a signer that came up.
const SIGNER_POLL_INTERVAL: Duration = Duration::from_secs(2);

/// After a success, the pause is as after so many failures.
const PAUSE: u32 = 7;

/// How long one signer may take.
const SIGNER_TIMEOUT: Duration = Duration::from_secs(8);

/// After this time without an answer, this host asks one more signer: that one may be up.
const PATIENCE: Duration = Duration::from_secs(1);

/// A certificate that lives longer than a signer gives by more than this is renewed.
const SLACK: Duration = Duration::from_secs(60);

/// This host's certificate, and the task that renews it.
#[derive(Clone, Debug)]
pub(crate) struct Renewing {
    identity: Identity,
    tls: PathBuf,
    peers: Peers,
    admission: Admission,
    /// Why the last attempt failed; `None` if it did not.
    failed: Arc<Mutex<Option<String>>>,
}

/// The failed attempts since the last success, or [`PAUSE`].
#[derive(Debug, Default)]
struct Attempts {
    failures: u32,
    last: Option<Instant>,
    /// The signers that were asked.
    asked: BTreeSet<HostName>,
}

/// Loads this host's certificate, as an agent begins. A signer renews its own first if need be.
///
/// # Errors
/// If the certificate is missing, not of the authority beside it, or ended and cannot be renewed.
pub(crate) fn open(config: &Config, cluster: &ClusterDir) -> Result<Identity, TlsError> {
    let tls = &config.tls;
    let validity = Validity::of_host(tls)?;
    let (now, lifetime) = (SystemTime::now(), config.certificates.lifetime);
    if cluster.admits() && is_due(&validity, now, Some(lifetime)) {
        // It renews no certificate of another host.
        let own = Identity::load(tls)?;
        if let Err(error) = sign_own(cluster, tls, &own, lifetime) {
            tracing::warn!("cannot renew the certificate of this signer: {error}");
        }
    }
    let identity = Identity::load(tls)?;
    identity.follow()?;
    let is_member = matches!(cluster.key(), Ok(Some(_)));
    match (Identity::verify_own(tls), identity.validity().expiry(now)) {
        (Err(_), Expiry::Ended) if is_member => tracing::warn!(
            "the certificate of this host has ended: no other host accepts it until a signer has \
             renewed it"
        ),
        // Not an error: if the clock is ahead, the agent must run when it is set right.
        (Err(error), Expiry::Lost) if is_member => tracing::warn!(
            "no signer renews the certificate of this host any more, by its clock: {error}"
        ),
        (Err(_), Expiry::Early) if is_member => tracing::warn!(
            "the certificate of this host does not hold yet, by its clock: no other host accepts \
             it until a signer has renewed it, or the clock is right"
        ),
        (verified, _) => verified?,
    }
    Ok(identity)
}

/// Returns whether it is time for the next certificate. A signer, which gives this lifetime, also
/// replaces a longer one of its own.
fn is_due(validity: &Validity, now: SystemTime, gives: Option<Duration>) -> bool {
    validity.is_due(now) || gives.is_some_and(|gives| validity.lifetime() > gives + SLACK)
}

/// Returns whether to keep the present certificate: the next ends before it, and soon. The clock of
/// the signer is behind, or this host's ahead.
fn is_worse(next: &Validity, present: &Validity, now: SystemTime) -> bool {
    next.ends < present.ends && next.left(now) < next.lifetime() / 3
}

impl Renewing {
    pub(crate) fn new(
        config: &Config,
        identity: Identity,
        peers: Peers,
        admission: Admission,
    ) -> Self {
        let tls = config.tls.clone();
        Self { identity, tls, peers, admission, failed: Arc::default() }
    }

    /// Returns why the last attempt to renew failed.
    pub(crate) fn failed(&self) -> Option<String> {
        lock(&self.failed).clone()
    }

    /// Describes this host's certificate for people.
    pub(crate) fn certificate(&self) -> Certificate {
        describe(&self.validity(), SystemTime::now(), self.failed())
    }

    /// Returns the times of this host's certificate.
    pub(crate) fn validity(&self) -> Validity {
        self.identity.validity()
    }

    /// Renews the certificate for as long as the caller polls the future.
    pub(crate) async fn run(self) {
        let mut attempts = Attempts::default();
        loop {
            let (validity, now) = (self.validity(), SystemTime::now());
            if !is_due(&validity, now, self.admission.lifetime()) {
                // An attempt may fail after it replaced the certificate.
                *lock(&self.failed) = None;
                let wait = validity.renewal_at().duration_since(now).unwrap_or_default();
                tokio::time::sleep(wait.min(CLOCK_POLL_INTERVAL)).await;
                continue;
            }
            let signers = self.signers();
            if attempts.is_turn(&validity, &signers) {
                self.attempt(&mut attempts, signers).await;
            } else {
                tokio::time::sleep(SIGNER_POLL_INTERVAL.min(validity.retry_after(0))).await;
            }
        }
    }

    /// Returns the hosts that are up and may sign. Those of the configuration say nothing by
    /// gossip.
    fn signers(&self) -> BTreeSet<HostName> {
        let says = self.peers.status().into_iter().filter(|peer| peer.admits);
        says.map(|peer| peer.host).chain(self.peers.listed()).collect()
    }

    async fn attempt(&self, attempts: &mut Attempts, signers: BTreeSet<HostName>) {
        let renewed = self.renew(&signers).await;
        let failed = renewed.as_ref().err().map(|problem| problem.error.clone());
        match &failed {
            None => tracing::info!("this host has its next certificate"),
            // Only the first of a series.
            Some(error) if self.failed().is_none() => {
                tracing::warn!("cannot renew the certificate: {error}; trying again");
            }
            Some(error) => tracing::debug!("cannot renew the certificate: {error}"),
        }
        // With a signer whose clock is far behind, the next certificate is due at once, too.
        let failures = if failed.is_some() { attempts.failures.saturating_add(1) } else { PAUSE };
        *attempts = Attempts { failures, last: Some(Instant::now()), asked: signers };
        *lock(&self.failed) = failed;
    }

    /// Asks one signer after the other, those first that are up, and keeps the first certificate.
    async fn renew(&self, signers: &BTreeSet<HostName>) -> Result<(), Problem> {
        let (admission, tls) = (self.admission.clone(), self.tls.clone());
        if admission.lifetime().is_some() {
            return blocking(move || admission.renew_own(&tls)).await;
        }
        let mut why = Problem { error: "no host that admits others is up".to_owned(), help: None };
        // A host that lost the others' gossip finds the signer among all.
        let all = if signers.is_empty() { self.peers.known() } else { signers.clone() };
        let up = self.peers.status().into_iter().filter(|peer| peer.standing == Standing::Up);
        let up: BTreeSet<_> = up.map(|peer| peer.host).collect();
        let mut signers = all.intersection(&up).chain(all.difference(&up)).cloned();
        let mut asked = JoinSet::new();
        loop {
            if let Some(signer) = signers.next() {
                let here = self.clone();
                asked.spawn(async move {
                    let silent = |_| Err(problem(format!("{signer} does not answer")));
                    timeout(SIGNER_TIMEOUT, here.ask(&signer)).await.unwrap_or_else(silent)
                });
            }
            match timeout(PATIENCE, asked.join_next()).await {
                Ok(Some(Ok(Ok((renewal, signed))))) => match self.keep(renewal, signed).await {
                    Ok(()) => return Ok(()),
                    Err(failed) => why = failed,
                },
                Ok(Some(Ok(Err(refused)))) => why = refused,
                Ok(Some(Err(error))) => why = problem(error),
                Ok(None) => return Err(why),
                Err(_) => {}
            }
        }
    }

    async fn ask(&self, signer: &HostName) -> Result<(Renewal, SignedCertificate), Problem> {
        let (tls, host) = (self.tls.clone(), self.identity.host().clone());
        let renewal = blocking(move || Renewal::prepare(&tls, &host).map_err(problem)).await?;
        let next = NextCertificate { request: BASE64_STANDARD.encode(renewal.der()) };
        let signed = self.peers.ask::<SignedCertificate>(signer, path::CERTIFICATE, &next).await?;
        let next = CertificateDer::from_pem_slice(signed.certificate.as_bytes());
        let next = Validity::of(&next.map_err(problem)?).map_err(problem)?;
        if is_worse(&next, &self.validity(), SystemTime::now()) {
            return Err(problem(format!(
                "the certificate of {signer} would end too soon: set the clocks of both hosts"
            )));
        }
        Ok((renewal, signed))
    }

    async fn keep(&self, renewal: Renewal, signed: SignedCertificate) -> Result<(), Problem> {
        let identity = self.identity.clone();
        let keep = move || {
            renewal.keep(&signed.certificate).map_err(problem)?;
            identity.refresh();
            Ok(())
        };
        // Also if the caller stops: half kept, it would be of no use.
        tokio::spawn(blocking(keep)).await.map_err(problem)?
    }
}

impl Attempts {
    /// Returns whether to ask now: the pause is over, or a signer came up meanwhile.
    fn is_turn(&self, validity: &Validity, signers: &BTreeSet<HostName>) -> bool {
        let pause = validity.retry_after(self.failures.saturating_sub(1));
        self.last.is_none_or(|last| last.elapsed() >= pause) || !signers.is_subset(&self.asked)
    }
}

/// Describes a certificate for people.
pub fn describe(validity: &Validity, now: SystemTime, failed: Option<String>) -> Certificate {
    let ends = validity.ends.duration_since(UNIX_EPOCH).unwrap_or_default();
    Certificate {
        state: match validity.expiry(now) {
            Expiry::Early => CertificateState::Early,
            Expiry::Good => CertificateState::Good,
            Expiry::Ending => CertificateState::Ending,
            Expiry::Ended => CertificateState::Ended,
            Expiry::Lost => CertificateState::Lost,
        },
        ends: ends.as_secs(),
        left_s: validity.left(now).as_secs(),
        lifetime_s: validity.lifetime().as_secs(),
        failed,
    }
}

pub(super) fn problem(error: impl std::fmt::Display) -> Problem {
    Problem { error: error.to_string(), help: None }
}

/// Does what waits for the disk.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    tokio::task::spawn_blocking(work).await.map_err(problem)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signer_that_comes_up_is_asked_at_once() {
        let issued = SystemTime::now();
        let week = Validity { issued, ends: issued + Duration::from_secs(7 * 24 * 3600) };
        let hosts = |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect();
        let mut attempts = Attempts::default();
        assert!(attempts.is_turn(&week, &BTreeSet::new()), "the first attempt");
        attempts = Attempts { failures: 20, last: Some(Instant::now()), asked: hosts(&["a"]) };
        assert!(!attempts.is_turn(&week, &hosts(&["a"])) && !attempts.is_turn(&week, &hosts(&[])));
        assert!(attempts.is_turn(&week, &hosts(&["a", "b"])));
        // While it was down, others were asked in vain.
        attempts = Attempts { failures: 20, last: Some(Instant::now()), asked: hosts(&[]) };
        assert!(attempts.is_turn(&week, &hosts(&["a"])));
    }

    #[test]
    fn a_signer_whose_clock_is_behind_shortens_nothing() {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        let now = SystemTime::now();
        let week = |issued| Validity { issued, ends: issued + 7 * DAY };
        let present = week(now - 3 * DAY);
        assert!(is_worse(&week(now - 5 * DAY), &present, now));
        assert!(!is_worse(&week(now), &present, now));
        assert!(!is_worse(&week(now - 4 * DAY), &present, now), "it serves for days");
        assert!(!is_worse(&week(now - 5 * DAY), &week(now - 6 * DAY), now), "it is better");
        // One of ten years from before.
        let long = Validity { issued: now, ends: now + 3653 * DAY };
        assert!(!is_worse(&week(now), &long, now) && is_worse(&week(now - 6 * DAY), &long, now));
    }

    #[test]
    fn a_signer_replaces_a_longer_certificate_of_its_own() {
        let issued = SystemTime::now();
        let week = Validity { issued, ends: issued + Duration::from_secs(7 * 24 * 3600) };
        assert!(!is_due(&week, issued, None) && !is_due(&week, issued, Some(week.lifetime())));
        assert!(is_due(&week, issued, Some(Duration::from_secs(20))));
        assert!(is_due(&week, issued + week.lifetime() / 2, None));
    }
}
