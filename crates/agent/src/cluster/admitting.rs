//! How a signer answers a host that wants to join, or needs its next certificate.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use aquifer_api::Problem;
use aquifer_api::message::{GossipKey, Join, Joined, MemberAddress, Revocations, Revoked};
use aquifer_api::status::Standing;
use aquifer_page::{HostName, lock};
use aquifer_transport::tls::{
    Authority, Identity, Renewal, Revocation, TlsError, Validity, host_name, other_names,
    own_certificate, same_key,
};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use rustls::pki_types::CertificateDer;

use super::revoking::{key_claim, last_life};
use super::token::Refusal;
use super::{ClusterDir, ClusterError, Gossip, Key};
use crate::config::Config;
use crate::peers::Peers;

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

/// Admits hosts, one at a time, for this lifetime of their certificates.
#[derive(Clone, Debug)]
struct Signer(Arc<Mutex<ClusterDir>>, Duration);

/// A host that asks for its next certificate, as its present one says.
#[derive(Clone, Debug)]
pub(crate) struct Certified {
    /// The present certificate, which the authority signed and nobody revoked.
    pub(crate) certificate: CertificateDer<'static>,
    /// Its times.
    pub(crate) validity: Validity,
    /// Whether it has ended, not longer ago than the time of grace.
    pub(crate) has_ended: bool,
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
        let signer = dir.admits().then(|| Signer(Arc::new(Mutex::new(dir)), lifetime));
        Self { signer, host: config.host.clone(), own: config.listen, identity, peers, gossip }
    }

    /// Returns the lifetime of the certificates that this host signs; `None` if it signs none.
    pub(crate) fn lifetime(&self) -> Option<Duration> {
        self.signer.as_ref().map(|Signer(_, lifetime)| *lifetime)
    }

    /// Returns the time of issue for a certificate of this host: now, or after those of a host that
    /// had the name before and is revoked.
    fn issue_time(&self, host: &HostName) -> SystemTime {
        let revoked = self.identity.revoked_until(host);
        let after = revoked.map(|until| until + Duration::from_secs(1));
        after.map_or_else(SystemTime::now, |after| after.max(SystemTime::now()))
    }

    /// Admits a host, or says where it can join.
    pub(crate) fn admit(&self, join: &Join) -> Result<Joined, Problem> {
        let peers = self.peers.status();
        let Some(signer) = &self.signer else { return Err(self.no_signer()) };
        let known = peers.into_iter().filter(|peer| peer.standing == Standing::Up);
        let known = known.filter_map(|peer| Some((peer.host, peer.address.parse().ok()?)));
        let members = known.chain([(self.host.clone(), self.own)]).collect();
        let life = self.gossip.as_ref().and_then(|gossip| gossip.last_life(&join.host));
        // Hosts ignore the lives of a revoked host of this name.
        let revoked = self.identity.revoked_until(&join.host).map(last_life);
        let issued = self.issue_time(&join.host);
        signer.admit(join, (&self.host, issued), members, life.max(revoked).unwrap_or_default())
    }

    fn no_signer(&self) -> Problem {
        let signer = self.peers.status().into_iter().find(|peer| peer.admits);
        Problem {
            error: format!("{} cannot admit hosts to the cluster", self.host),
            help: signer.map(|signer| format!("join {} ({})", signer.address, signer.host)),
        }
    }

    /// Signs the next certificate of a host of the cluster.
    pub(crate) fn renew(&self, from: &Certified, request: &str) -> Result<String, Problem> {
        let Some(signer) = &self.signer else { return Err(self.no_signer()) };
        let host = host_name(&from.certificate).map_err(|error| failed(error.into()))?;
        signer.renew(from, &host, request, self.issue_time(&host))
    }

    /// Renews the certificate of this host, which is a signer.
    pub(crate) fn renew_own(&self, tls: &Path) -> Result<(), Problem> {
        let Some(Signer(dir, lifetime)) = &self.signer else { return Err(self.no_signer()) };
        let issued = self.issue_time(&self.host);
        let dir = lock(dir);
        sign_own(&dir, tls, &self.host, (issued, *lifetime)).map_err(|error| failed(error.into()))
    }
}

impl Admission {
    /// Frees the name of a host that leaves.
    pub(crate) fn free(&self, host: &HostName) -> Result<(), Problem> {
        let Some(Signer(dir, _)) = &self.signer else { return Err(self.no_signer()) };
        lock(dir).free(host).map(drop).map_err(failed)
    }

    /// Frees the name of a host that left or is gone, and ends its certificates. Returns that end,
    /// and the key of the gossip from now on.
    pub(crate) fn forget(&self, host: &HostName) -> Result<Revocations, Problem> {
        let Some(Signer(dir, _)) = &self.signer else {
            let error = format!("{} does not admit hosts to the cluster", self.host);
            return Err(Problem { error, help: None });
        };
        let dir = lock(dir);
        dir.free(host).map_err(failed)?;
        let tls = |error: TlsError| failed(error.into());
        let authority = Authority::load(dir.path()).map_err(tls)?;
        let Revocation { host, until, signature } =
            authority.revoke(host, SystemTime::now()).map_err(tls)?;
        let former = dir.latest_key().map_err(failed)?;
        let number = former.map_or(1, |former| former.number + 1);
        let key = Key::random().map_err(|_| failed(ClusterError::Random))?.to_hex();
        let key_signature = authority.sign_text(&key_claim(number, &key)).map_err(tls)?;
        tracing::info!(%host, "ended its certificates, and changed the key of the gossip");
        Ok(Revocations {
            revoked: vec![Revoked { host, until, signature }],
            key: Some(GossipKey { number, key, signature: key_signature }),
        })
    }
}

impl Signer {
    /// Admits a host. The same host with the same key may ask again, if the answer was lost.
    /// `members` are all hosts of the cluster that this one knows, itself among them; `life` is the
    /// last of a host with that name.
    fn admit(
        &self,
        join: &Join,
        (own, issued_at): (&HostName, SystemTime),
        members: BTreeMap<HostName, SocketAddr>,
        life: u64,
    ) -> Result<Joined, Problem> {
        let dir = lock(&self.0);
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
        let issued = dir.issued(&join.host);
        let known = fs::read_to_string(&issued).ok();
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
        check_address(join, &members)?;
        let authority = Authority::load(dir.path()).map_err(|error| failed(error.into()))?;
        let authority = authority.with_lifetime(self.1);
        let names = [join.address.ip().to_string()];
        let certificate = authority
            .sign(&request, &join.host, &names, issued_at)
            .map_err(|error| failed(error.into()))?;
        dir.keep_issued(&join.host, &certificate).map_err(failed)?;
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
        })
    }
}

impl Signer {
    /// Signs the next certificate of a host, with the names of the present one. A signer that has
    /// no record of the host, such as one restored from an older copy, still trusts a certificate
    /// of the authority that has not ended.
    fn renew(
        &self,
        from: &Certified,
        host: &HostName,
        request: &str,
        issued: SystemTime,
    ) -> Result<String, Problem> {
        let dir = lock(&self.0);
        let request = BASE64_STANDARD.decode(request).map_err(|error| {
            refused(format!("the request for a certificate is malformed: {error}"), HELP_VERSION)
        })?;
        if from.has_ended && !dir.issued(host).exists() {
            return Err(refused(
                format!("the certificate of {host} has ended, and no host {host} has joined here"),
                "run 'aquifer cluster leave --force' there, and join it again",
            ));
        }
        let tls = |error: TlsError| failed(error.into());
        let names = other_names(&from.certificate).map_err(tls)?;
        let authority = Authority::load(dir.path()).map_err(tls)?.with_lifetime(self.1);
        let certificate = authority.sign(&request, host, &names, issued).map_err(tls)?;
        dir.keep_issued(host, &certificate).map_err(failed)?;
        tracing::info!(%host, "renewed its certificate");
        Ok(certificate)
    }
}

/// Renews the certificate of the signer itself, in `tls`.
pub(super) fn sign_own(
    dir: &ClusterDir,
    tls: &Path,
    host: &HostName,
    (issued, lifetime): (SystemTime, Duration),
) -> Result<(), TlsError> {
    let authority = Authority::load(dir.path())?.with_lifetime(lifetime);
    let names = other_names(&own_certificate(tls)?)?;
    let renewal = Renewal::prepare(tls, host)?;
    let certificate = authority.sign(renewal.der(), host, &names, issued)?;
    renewal.keep(&certificate)
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

const HELP_VERSION: &str = "install the same version of aquifer on both hosts";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use aquifer_transport::tls::{Identity, LIFETIME, Request};

    use super::super::Token;
    use super::*;

    fn request(dir: &Path, host: &str, token: &Token) -> (Request, Join) {
        let name: HostName = host.parse().unwrap();
        let request = Request::prepare(&dir.join(host), &name).unwrap();
        let address = SocketAddr::from(([192, 0, 2, 1], 7070));
        let proof = token.proof(host, &address.to_string(), request.der());
        let der = BASE64_STANDARD.encode(request.der());
        (request, Join { token: token.id(), host: name, address, request: der, proof })
    }

    #[test]
    fn a_host_is_admitted_and_its_name_is_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let cluster = ClusterDir::new(dir.path().join("cluster"));
        cluster.create("test").unwrap();
        let token = cluster.new_token(Duration::from_secs(60)).unwrap();
        let signer = Signer(Arc::new(Mutex::new(cluster.clone())), LIFETIME);
        let now = SystemTime::now();
        let own: HostName = "a".parse().unwrap();
        let members = BTreeMap::from([("a".parse().unwrap(), ([192, 0, 2, 9], 7070).into())]);

        let (ours, join) = request(dir.path(), "b", &token);
        let own = (&own, now);
        let first = signer.admit(&join, own, members.clone(), 7).unwrap();
        let again = signer.admit(&join, own, members.clone(), 7).unwrap();
        assert_eq!((first.members.len(), &first.key), (1, &again.key));
        ours.keep(&join.host, &again.certificate, &again.authority, token.authority()).unwrap();
        Identity::verify_own(&dir.path().join("b")).unwrap();

        assert_eq!(first.life, 7);
        // Another machine with the same name, and one with the signer's.
        let elsewhere = dir.path().join("elsewhere");
        for (host, what) in [
            ("b", "the name b is taken"),
            ("B", "the name B is taken"),
            ("a", "the name a is taken"),
            ("A", "the name A is taken"),
        ] {
            let (_, join) = request(&elsewhere, host, &token);
            let refused = signer.admit(&join, own, members.clone(), 7).unwrap_err();
            assert!(refused.error.contains(what) && refused.help.is_some(), "{refused:?}");
        }
        for (address, what) in [
            ("0.0.0.0:7070", "0.0.0.0:7070 is not an address of one host"),
            ("[ff02::1]:7070", "[ff02::1]:7070 is not an address of one host"),
            ("192.0.2.9:7070", "a is at 192.0.2.9:7070"),
        ] {
            let (request, mut join) = request(&elsewhere, "c", &token);
            join.address = address.parse().unwrap();
            join.proof = token.proof("c", address, request.der());
            let refused = signer.admit(&join, own, members.clone(), 0).unwrap_err();
            assert_eq!(refused.error, what);
        }
        // A token of another cluster, and a proof for another request.
        let (_, mut join) = request(&elsewhere, "c", &token);
        join.host = "d".parse().unwrap();
        let refused = signer.admit(&join, own, members, 7).unwrap_err();
        assert_eq!(refused.error, "a does not know this token");
        assert!(!cluster.path().join("hosts/d.pem").exists());
    }
}
