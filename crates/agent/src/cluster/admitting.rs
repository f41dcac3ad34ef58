//! How a signer answers a host that wants to join, or needs its next certificate.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use aquifer_api::Problem;
use aquifer_api::message::{GossipKey, Join, Joined, MemberAddress};
use aquifer_api::order::Forget;
use aquifer_api::status::Standing;
use aquifer_page::{HostName, lock};
use aquifer_transport::tls::{
    Authority, GRACE, Identity, Renewal, Revocations, TEN_YEARS, TlsError, Validity, host_name,
    other_names, own_certificate, same_key,
};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;
use tokio::time::timeout;

use super::record::Record;
use super::revoking::{key_claim, last_life, to_message};
use super::token::Refusal;
use super::{ClusterDir, ClusterError, Gossip, Key};
use crate::config::Config;
use crate::peers::Peers;

/// How long a renewal waits for a signer that has just started: less than the caller does.
const HEARING_TIMEOUT: Duration = Duration::from_secs(5);

/// This host's part in the admission of others.
#[derive(Clone, Debug)]
pub(crate) struct Admission {
    signer: Option<Signer>,
    host: HostName,
    own: SocketAddr,
    identity: Identity,
    peers: Peers,
    gossip: Option<Gossip>,
}

/// Signs certificates of this lifetime. Admissions, renewals and revocations hold the lock.
#[derive(Clone, Debug)]
struct Signer {
    dir: Arc<Mutex<ClusterDir>>,
    lifetime: Duration,
    /// Whether this signer has heard from the other hosts which of them are revoked.
    has_heard: Arc<watch::Sender<bool>>,
}

/// A host that asks for its next certificate, as its present one says.
#[derive(Clone, Debug)]
pub(crate) struct Certified {
    /// The present certificate, which the authority signed and nobody revoked.
    pub(crate) certificate: CertificateDer<'static>,
    /// Its times.
    pub(crate) validity: Validity,
}

impl Certified {
    /// Returns whether the certificate ended, not longer ago than the time of grace, or does not
    /// hold yet.
    pub(crate) fn is_lapsed(&self) -> bool {
        !self.validity.holds(SystemTime::now())
    }
}

fn refused(error: impl Into<String>, help: impl Into<String>) -> Problem {
    Problem { error: error.into(), help: Some(help.into()) }
}

fn failed(error: ClusterError) -> Problem {
    Problem { error: format!("this signer cannot admit hosts: {error}"), help: None }
}

impl Admission {
    /// Returns this host's part.
    pub(crate) fn new(
        config: &Config,
        peers: Peers,
        gossip: Option<Gossip>,
        identity: Identity,
    ) -> Self {
        let dir = ClusterDir::new(&config.cluster);
        let lifetime = config.certificates.lifetime;
        let signer = dir.admits().then(|| Signer {
            dir: Arc::new(Mutex::new(dir)),
            lifetime,
            has_heard: Arc::new(watch::Sender::new(false)),
        });
        Self { signer, host: config.host.clone(), own: config.listen, identity, peers, gossip }
    }

    /// Returns the lifetime of the certificates that this host signs; `None` if it signs none.
    pub(crate) fn lifetime(&self) -> Option<Duration> {
        self.signer.as_ref().map(|signer| signer.lifetime)
    }

    /// Lets this host renew certificates of others: it has heard which hosts are revoked.
    pub(crate) fn allow_renewals(&self) {
        if let Some(signer) = &self.signer {
            signer.has_heard.send_replace(true);
        }
    }

    /// Returns whether this host, if it is a signer, has heard which hosts are revoked.
    pub(super) fn has_heard(&self) -> bool {
        self.signer.as_ref().is_none_or(|signer| *signer.has_heard.borrow())
    }

    /// Waits for some seconds until this host may renew certificates of others.
    pub(crate) async fn wait_to_renew(&self) {
        if let Some(signer) = &self.signer {
            let mut has_heard = signer.has_heard.subscribe();
            // If it takes longer, the renewal says so.
            let _ = timeout(HEARING_TIMEOUT, has_heard.wait_for(|heard| *heard)).await;
        }
    }

    /// Admits a host, or says where it can join. A host that does not renew its certificate runs an
    /// older version, and gets one that lasts.
    pub(crate) fn admit(&self, join: &Join, renews: bool) -> Result<Joined, Problem> {
        let peers = self.peers.status();
        let Some(signer) = self.signer.clone() else { return Err(self.no_signer()) };
        let signer = if renews { signer } else { Signer { lifetime: TEN_YEARS, ..signer } };
        let known = peers.into_iter().filter(|peer| peer.standing == Standing::Up);
        let known = known.filter_map(|peer| Some((peer.host, peer.address.parse().ok()?)));
        let members = known.chain([(self.host.clone(), self.own)]).collect();
        let life = self.gossip.as_ref().and_then(|gossip| gossip.last_life(&join.host));
        let dir = lock(&signer.dir);
        let revoked = self.identity.revocations().until(&join.host);
        // Hosts ignore the lives of a revoked host of this name.
        let life = life.max(revoked.map(last_life)).unwrap_or_default();
        let issued = issue_time(revoked, SystemTime::now());
        let joined = signer.admit(&dir, join, (&self.host, issued), (members, life))?;
        let latest = dir.latest_key().map_err(failed)?;
        Ok(Joined { revocations: Some(to_message(&self.identity, latest)), ..joined })
    }

    fn no_signer(&self) -> Problem {
        let signer = self.peers.status().into_iter().find(|peer| peer.admits);
        Problem {
            error: format!("{} cannot admit hosts to the cluster", self.host),
            help: signer.map(|signer| format!("join {} ({})", signer.address, signer.host)),
        }
    }

    /// Signs the next certificate of a host of the cluster, unless it was revoked: its connection
    /// may still be open then.
    pub(crate) fn renew(&self, from: &Certified, request: &str) -> Result<String, Problem> {
        let Some(signer) = &self.signer else { return Err(self.no_signer()) };
        if !*signer.has_heard.borrow() {
            return Err(refused(
                format!("{} asks the other hosts first which of them are revoked", self.host),
                "try again in some seconds, or start the agents of more hosts",
            ));
        }
        let host = host_name(&from.certificate).map_err(|error| failed(error.into()))?;
        let dir = lock(&signer.dir);
        let revoked = self.identity.revocations();
        if revoked.covers(&host, &from.validity) {
            return Err(refused(format!("the certificates of {host} are revoked"), HELP_REJOIN));
        }
        signer.renew(&dir, (from, &host), request, revoked.until(&host))
    }

    /// Renews the certificate of this host, which is a signer.
    pub(crate) fn renew_own(&self, tls: &Path) -> Result<(), Problem> {
        let Some(signer) = &self.signer else { return Err(self.no_signer()) };
        let dir = lock(&signer.dir);
        sign_own(&dir, tls, &self.identity, signer.lifetime).map_err(|error| failed(error.into()))
    }
}

impl Admission {
    /// Ends the certificates of a host, and makes this host know it, before any other call here
    /// signs. If the host is hostile, ends the tokens that it knows. Returns until when its
    /// certificates are revoked. The name stays taken: see [`Self::free`].
    pub(super) fn forget(&self, Forget { host, force }: &Forget) -> Result<SystemTime, Problem> {
        let Some(signer) = &self.signer else { return Err(self.no_signer()) };
        let dir = lock(&signer.dir);
        let tls = |error: TlsError| failed(error.into());
        let authority = Authority::load(dir.path()).map_err(tls)?;
        let record = dir.record(host).map_err(failed)?.unwrap_or_default();
        let (until, ends) =
            revocation_times(&record, &self.identity.revocations(), host, SystemTime::now());
        let revocation = authority.revoke(host, until, ends).map_err(tls)?;
        self.identity.revoke(vec![revocation]).map_err(tls)?;
        tracing::info!(%host, "ended its certificates");
        if *force {
            // Against the command that makes tokens.
            let locked = dir.lock().map_err(failed)?;
            dir.end_tokens(host).map_err(failed)?;
            drop(locked);
        }
        Ok(until)
    }

    /// Ends also what this signer issued to these hosts before it heard that another signer had
    /// revoked them: such certificates would escape. Returns the hosts that it concerns. The caller
    /// has taken in the revocations.
    ///
    /// A new machine has a certificate that no revocation covers, and none from before.
    pub(super) fn revoke_late(&self, hosts: &[HostName]) -> Result<Vec<HostName>, Problem> {
        let Some(signer) = &self.signer else { return Ok(Vec::new()) };
        let dir = lock(&signer.dir);
        let tls = |error: TlsError| failed(error.into());
        let known = self.identity.revocations();
        let mut late = Vec::new();
        for host in hosts.iter().filter(|host| *host != self.identity.host()) {
            let (record, until) = (dir.record(host).map_err(failed)?, known.until(host));
            let Some((record, until)) = record.zip(until) else { continue };
            let Some(issued) = record.issued().filter(|issued| *issued > until) else { continue };
            if record.began().is_some_and(|began| began > until) {
                continue;
            }
            let (_, ends) = revocation_times(&record, &known, host, SystemTime::now());
            let authority = Authority::load(dir.path()).map_err(tls)?;
            late.push(authority.revoke(host, issued, ends).map_err(tls)?);
        }
        let found: Vec<_> = late.iter().map(|revocation| revocation.host.clone()).collect();
        if !late.is_empty() {
            tracing::warn!(hosts = ?found, "ends what it issued after another signer revoked them");
            self.identity.revoke(late).map_err(tls)?;
        }
        Ok(found)
    }

    /// Makes the cluster's next key for gossip.
    pub(super) fn next_key(&self) -> Result<GossipKey, Problem> {
        let Some(signer) = &self.signer else { return Err(self.no_signer()) };
        let dir = lock(&signer.dir);
        let authority = Authority::load(dir.path()).map_err(|error| failed(error.into()))?;
        let former = dir.latest_key().map_err(failed)?;
        let number = former.map_or(1, |former| former.number.saturating_add(1));
        let key = Key::random().map_err(|_| failed(ClusterError::Random))?.to_hex();
        let signature = authority.sign_text(&key_claim(number, &key));
        let signature = signature.map_err(|error| failed(error.into()))?;
        Ok(GossipKey { number, key, signature })
    }

    /// Frees the name of a host whose certificates ended, once all hosts that can be told know it.
    /// The name stays that of a host whose certificate was issued later.
    pub(super) fn free(&self, host: &HostName, until: SystemTime) -> Result<(), Problem> {
        let Some(signer) = &self.signer else { return Err(self.no_signer()) };
        lock(&signer.dir).free(host, until).map_err(failed)
    }
}

/// Returns the time of issue for a certificate: now, or after those that are revoked, of a host
/// that had the name before.
fn issue_time(revoked: Option<SystemTime>, now: SystemTime) -> SystemTime {
    revoked.map_or(now, |until| now.max(until + Duration::from_secs(1)))
}

/// Returns until when the certificates of a host are to be revoked: each that it may have is from
/// before, also if the clock was set back since. Returns also when the last of them cannot even be
/// renewed any more. The host may have one of ten years that the record does not name: from before
/// certificates were short, or of another signer.
fn revocation_times(
    record: &Record,
    known: &Revocations,
    host: &HostName,
    now: SystemTime,
) -> (SystemTime, SystemTime) {
    let after = known.until(host).map(|until| until + Duration::from_secs(1));
    let until = [record.issued(), after].into_iter().flatten().fold(now, SystemTime::max);
    let longest = record.ends().unwrap_or(until).max(until + TEN_YEARS);
    // Clocks differ.
    let ends = longest + GRACE + Duration::from_secs(24 * 3600);
    (until, known.ends(host).map_or(ends, |known| known.max(ends)))
}

impl Signer {
    /// Admits a host. The same host with the same key may ask again, if the answer was lost.
    /// `members` are all hosts of the cluster that this one knows, itself among them; `life` is the
    /// last of a host with that name.
    fn admit(
        &self,
        dir: &ClusterDir,
        join: &Join,
        (own, issued_at): (&HostName, SystemTime),
        (members, life): (BTreeMap<HostName, SocketAddr>, u64),
    ) -> Result<Joined, Problem> {
        let request = BASE64_STANDARD.decode(&join.request).map_err(|error| {
            refused(format!("the request for a certificate is malformed: {error}"), HELP_VERSION)
        })?;
        let address = join.address.to_string();
        let claimed = (join.host.as_str(), address.as_str(), request.as_slice());
        let checked = dir.check_proof(&join.token, claimed, &join.proof, SystemTime::now());
        checked.map_err(failed)?.map_err(|refusal| match refusal {
            Refusal::Unknown => refused(
                format!("{own} does not know this token"),
                "run 'aquifer cluster token' there, and use the command that it prints",
            ),
            Refusal::Ended => refused(
                "the token has ended",
                format!("run 'aquifer cluster token' on {own} for another"),
            ),
        })?;
        let known = fs::read_to_string(dir.issued(&join.host)).ok();
        let is_other = known.is_some_and(|known| !same_key(&known, &request));
        if is_other || is_taken(&join.host, own, &dir.admitted().map_err(failed)?) {
            return Err(refused(
                format!("the name {} is taken by another host of this cluster", join.host),
                format!(
                    "choose another name with --host; or, if that host is gone for good, run \
                     'aquifer cluster forget {}' on {own}",
                    join.host
                ),
            ));
        }
        if issued_at > SystemTime::now() + DAY {
            return Err(refused(
                format!("the name {} had certificates of the future, which are revoked", join.host),
                "choose another name with --host",
            ));
        }
        check_address(join, &members)?;
        let authority = Authority::load(dir.path()).map_err(|error| failed(error.into()))?;
        let authority = authority.with_lifetime(self.lifetime);
        let names = [join.address.ip().to_string()];
        let certificate = authority
            .sign(&request, &join.host, &names, issued_at)
            .map_err(|error| failed(error.into()))?;
        // Against the command that makes tokens.
        let locked = dir.lock().map_err(failed)?;
        dir.note_token(&join.token, &join.host).map_err(failed)?;
        drop(locked);
        let record = dir.record(&join.host).map_err(failed)?.unwrap_or_default();
        dir.keep_record(&join.host, &record.with(&certificate, None)).map_err(failed)?;
        let key = dir.key().map_err(failed)?;
        let key = key.ok_or_else(|| Problem {
            error: format!("{own} has no key of the cluster"),
            help: None,
        })?;
        tracing::info!(host = %join.host, address = %join.address, "admitted to the cluster");
        let member = |(host, address)| MemberAddress { host, address };
        Ok(Joined {
            certificate,
            authority: authority.certificate().map_err(|error| failed(error.into()))?,
            key: key.to_hex(),
            members: members.into_iter().map(member).collect(),
            life,
            revocations: None,
        })
    }
}

impl Signer {
    /// Signs the next certificate of a host, with the names of the present one. A signer that has
    /// no record of the host, such as one restored from an older copy, still trusts a short
    /// certificate of the authority that has not ended. A long one must have a key of the record:
    /// before hosts could be revoked, the name may have been given to another machine.
    fn renew(
        &self,
        dir: &ClusterDir,
        (from, host): (&Certified, &HostName),
        request: &str,
        revoked: Option<SystemTime>,
    ) -> Result<String, Problem> {
        let request = BASE64_STANDARD.decode(request).map_err(|error| {
            refused(format!("the request for a certificate is malformed: {error}"), HELP_VERSION)
        })?;
        let record = dir.record(host).map_err(failed)?;
        if from.is_lapsed() && record.is_none() {
            return Err(refused(
                format!("the certificate of {host} has lapsed, and no host {host} has joined here"),
                HELP_REJOIN,
            ));
        }
        let record = record.unwrap_or_default();
        if from.validity.is_long() && !record.has_key_of(&from.certificate) {
            return Err(refused(
                format!(
                    "the certificate of {host} is of another machine than the host {host} here"
                ),
                HELP_REJOIN,
            ));
        }
        let tls = |error: TlsError| failed(error.into());
        let names = other_names(&from.certificate).map_err(tls)?;
        let authority = Authority::load(dir.path()).map_err(tls)?.with_lifetime(self.lifetime);
        let issued = issue_time(revoked, SystemTime::now());
        let certificate = authority.sign(&request, host, &names, issued).map_err(tls)?;
        let record = record.since(revoked).with(&certificate, Some(&from.certificate));
        dir.keep_record(host, &record).map_err(failed)?;
        tracing::info!(%host, "renewed its certificate");
        Ok(certificate)
    }
}

/// Renews the certificate of the signer itself, in `tls`.
pub(super) fn sign_own(
    dir: &ClusterDir,
    tls: &Path,
    own: &Identity,
    lifetime: Duration,
) -> Result<(), TlsError> {
    if own.revocations().covers(own.host(), &own.validity()) {
        return Err(TlsError::Peer(format!(
            "another signer revoked {}: run 'aquifer cluster leave --force', and join again",
            own.host()
        )));
    }
    let issued = issue_time(own.revocations().until(own.host()), SystemTime::now());
    let authority = Authority::load(dir.path())?.with_lifetime(lifetime);
    let names = other_names(&own_certificate(tls)?)?;
    let renewal = Renewal::prepare(tls, own.host())?;
    let certificate = authority.sign(renewal.der(), own.host(), &names, issued)?;
    renewal.keep(&certificate)?;
    own.refresh();
    Ok(())
}

/// Returns whether another host has the name but for its case: certificates do not tell them apart
/// (RFC 5280, section 7.2).
fn is_taken(name: &HostName, own: &HostName, admitted: &[HostName]) -> bool {
    let alike = |other: &HostName| other.as_str().eq_ignore_ascii_case(name.as_str());
    alike(own) || admitted.iter().any(|other| other != name && alike(other))
}

/// Refuses an address at which no other host could reach this one.
fn check_address(join: &Join, members: &BTreeMap<HostName, SocketAddr>) -> Result<(), Problem> {
    const HELP: &str = "name the address of this host with --address";
    let Join { host, address, .. } = join;
    let ip = address.ip();
    if ip.is_unspecified() || ip.is_multicast() || address.port() == 0 {
        return Err(refused(format!("{address} is not an address of one host"), HELP));
    }
    match members.iter().find(|(other, at)| *other != host && *at == address) {
        Some((other, _)) => Err(refused(format!("{other} is at {address}"), HELP)),
        None => Ok(()),
    }
}

const DAY: Duration = Duration::from_secs(24 * 3600);

const HELP_REJOIN: &str = "run 'aquifer cluster leave --force' there, and join it again";

const HELP_VERSION: &str = "install the same version of aquifer on both hosts";

#[cfg(test)]
mod tests;
