//! How all hosts learn within seconds that a host may not be in the cluster any more.
//!
//! A signer ends the host's certificates and changes the key of the gossip: it signs both with the
//! authority's key, so that no other host can. It calls all hosts that it knows, and then frees the
//! name. Gossip tells a digest of what each host knows, and a host that sees another digest asks. A
//! host that was away hears no gossip, since the key has changed; it calls the hosts that it knows,
//! until one answers.
//!
//! Each host first ends connections, then records the revocation, then frees the host's leases, and
//! changes the key last: a new machine of that name is heard only under the new key.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aquifer_api::message::{GossipKey, Revocations, Revoked};
use aquifer_api::order::{Forget, Forgotten};
use aquifer_api::status::Standing;
use aquifer_api::{Done, Problem, path};
use aquifer_page::{HostName, lock};
use aquifer_transport::tls::{self, Identity, Revocation, Validity};
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::admitting::Ended;
use super::renewing::{blocking, problem};
use super::{Admission, ClusterDir, Gossip, Key};
use crate::driver::{Command, Handle};
use crate::peers::{AskError, Peers};

/// The time between two looks at what gossip tells.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The time between two calls to hosts that gossip says nothing of.
const CALL_INTERVAL: Duration = Duration::from_secs(5);

/// Timeout of a question to one host.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout of a call that tells one host.
const TELL_TIMEOUT: Duration = Duration::from_secs(3);

/// The largest answer with revocations, in bytes.
pub(super) const LARGEST: usize = 8 << 20;

/// This host's part in telling of revoked hosts.
#[derive(Clone, Debug)]
pub(crate) struct Revoking(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    identity: Identity,
    dir: ClusterDir,
    peers: Peers,
    gossip: Option<Gossip>,
    agent: Handle,
    /// Counts the changes.
    changes: watch::Sender<u64>,
    /// The revocations that all parts of the agent act on.
    applied: AsyncMutex<tls::Revocations>,
    /// The latest key of the gossip. Held while it changes.
    key: Mutex<Option<GossipKey>>,
}

/// Returns the bytes that the authority signs of a key.
pub(super) fn key_claim(number: u64, key: &str) -> Vec<u8> {
    format!("aquifer gossip key\0{number}\0{key}").into_bytes()
}

/// Returns the last life that a host can have begun before its certificates were revoked.
pub(super) fn last_life(until: SystemTime) -> u64 {
    let until = until.duration_since(UNIX_EPOCH).unwrap_or_default() + Duration::from_secs(1);
    u64::try_from(until.as_millis()).unwrap_or(u64::MAX) - 1
}

/// Returns what a host knows as a message.
pub(super) fn to_message(identity: &Identity, key: Option<GossipKey>) -> Revocations {
    let of = |Revocation { host, until, ends, signature }| Revoked { host, until, ends, signature };
    Revocations { revoked: identity.revocations().list().into_iter().map(of).collect(), key }
}

impl Revoking {
    pub(crate) fn new(
        identity: Identity,
        dir: ClusterDir,
        peers: Peers,
        gossip: Option<Gossip>,
        agent: Handle,
    ) -> Self {
        let changes = watch::Sender::new(0);
        // The former agent acted on these.
        let applied = AsyncMutex::new(identity.revocations());
        // Without it, this host learns it again.
        let key = Mutex::new(dir.latest_key().unwrap_or_default());
        Self(Arc::new(Inner { identity, dir, peers, gossip, agent, changes, applied, key }))
    }

    /// Returns what this host knows, for another host of the cluster.
    pub(crate) fn known(&self) -> Revocations {
        to_message(&self.0.identity, lock(&self.0.key).clone())
    }

    /// Takes in what the authority signed of this, wherever it comes from.
    ///
    /// # Errors
    /// If it cannot be recorded. What this process does with it, it does nevertheless.
    pub(crate) async fn take_in(&self, told: Revocations) -> Result<(), Problem> {
        let here = self.clone();
        // Also if the caller hangs up.
        tokio::spawn(async move { here.take_in_all(told).await }).await.map_err(problem)?
    }

    async fn take_in_all(&self, told: Revocations) -> Result<(), Problem> {
        let Revocations { revoked, key } = told;
        let of =
            |Revoked { host, until, ends, signature }| Revocation { host, until, ends, signature };
        let (identity, new) = (self.0.identity.clone(), revoked.into_iter().map(of).collect());
        let recorded = blocking(move || identity.revoke(new).map_err(problem)).await;
        self.apply().await;
        if let Some(key) = key {
            self.take_key(key).await?;
        }
        recorded.map(drop)
    }

    /// Makes all parts of the agent act on the revocations.
    async fn apply(&self) {
        let mut applied = self.0.applied.lock().await;
        let known = self.0.identity.revocations();
        let before = std::mem::replace(&mut *applied, known.clone());
        self.0.changes.send_modify(|changes| *changes += 1);
        if let Some(gossip) = &self.0.gossip {
            gossip.tell_revocations(known.digest());
        }
        let hosts = known.list().into_iter().map(|known| known.host);
        for host in hosts.filter(|host| known.until(host) > before.until(host)) {
            tracing::info!(%host, "it may not be in the cluster any more");
            let _ = self.0.agent.0.send(Command::HostRevoked(host)).await;
        }
    }

    /// Changes the key of the gossip, if the authority signed a later one.
    async fn take_key(&self, told: GossipKey) -> Result<(), Problem> {
        let here = self.clone();
        blocking(move || here.0.take_key(&told)).await
    }

    /// Ends the membership of a host: this host is a signer. Tells all hosts that it can reach,
    /// before a new machine can have the name.
    ///
    /// # Errors
    /// If this host is no signer, or a file cannot be written.
    pub(crate) async fn forget(
        &self,
        admission: Admission,
        order: Forget,
    ) -> Result<Forgotten, Problem> {
        let here = self.clone();
        // Also if the caller hangs up, as a host that leaves may.
        tokio::spawn(async move { here.end(admission, order).await }).await.map_err(problem)?
    }

    async fn end(&self, admission: Admission, order: Forget) -> Result<Forgotten, Problem> {
        let host = order.host.clone();
        if host == *self.0.identity.host() {
            return Err(Problem {
                error: format!("{host} is this host"),
                help: Some("run 'aquifer cluster leave'".to_owned()),
            });
        }
        // A host of an older version would never learn another key, and would hear nobody.
        let older = self.0.peers.without_revocations(&host);
        let (signer, changes_key) = (admission.clone(), older.is_empty());
        let ended = blocking(move || signer.forget(&order, changes_key)).await;
        // Also if a part failed: what this process knows, it acts on.
        self.apply().await;
        let Ended { until, key } = ended?;
        if let Some(key) = key {
            self.take_key(key).await?;
        }
        let (told, untold) = self.tell_all(&host).await;
        let gone = host.clone();
        blocking(move || admission.free(&gone, until)).await?;
        Ok(Forgotten { host, told, untold, older })
    }

    /// Tells all hosts but one; returns those that know, and those that could not be told.
    async fn tell_all(&self, gone: &HostName) -> (Vec<HostName>, Vec<HostName>) {
        let mut known = self.known();
        // All else, they learn by gossip. The message stays short.
        known.revoked.retain(|revoked| revoked.host == *gone);
        let known = Arc::new(known);
        let mut calls = JoinSet::new();
        for host in self.0.peers.known().into_iter().filter(|host| host != gone) {
            let (peers, known) = (self.0.peers.clone(), known.clone());
            calls.spawn(async move {
                let told = peers.ask::<Done>(&host, path::REVOCATIONS, &*known);
                (matches!(timeout(TELL_TIMEOUT, told).await, Ok(Ok(_))), host)
            });
        }
        let mut calls = calls.join_all().await;
        calls.sort();
        let (told, untold): (Vec<_>, Vec<_>) = calls.into_iter().partition(|(told, _)| *told);
        let names =
            |calls: Vec<(bool, HostName)>| calls.into_iter().map(|(_, host)| host).collect();
        (names(told), names(untold))
    }

    /// Learns from the other hosts for as long as the caller polls the future.
    pub(crate) async fn run(self) {
        // Those that the previous agent knew.
        self.apply().await;
        let mut asked = BTreeMap::new();
        let (mut called, mut last): (Option<Instant>, _) = (None, None);
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let own = self.0.identity.revocations().digest();
            let mut told = self.0.peers.revocations();
            // What was asked for then, and known then, is no reason to ask again.
            told.retain(|host, digest| *digest != own && asked.get(host) != Some(&(*digest, own)));
            for (host, digest) in told {
                if self.ask(&host).await {
                    asked.insert(host, (digest, own));
                }
            }
            if called.is_none_or(|called| called.elapsed() >= CALL_INTERVAL) {
                called = Some(Instant::now());
                last = self.call_silent(last).await;
            }
        }
    }

    /// Asks the next of the hosts that gossip says nothing of, and returns it. They may be down, or
    /// have another key than this host and those that it hears.
    async fn call_silent(&self, last: Option<HostName>) -> Option<HostName> {
        let is_silent = |standing| matches!(standing, Standing::Listed | Standing::Down);
        let peers = self.0.peers.status().into_iter().filter(|peer| is_silent(peer.standing));
        let silent: Vec<_> = peers.map(|peer| peer.host).collect();
        let next = silent.iter().find(|host| Some(*host) > last.as_ref()).or(silent.first());
        if let Some(host) = next {
            self.ask(host).await;
        }
        next.cloned()
    }

    /// Asks a host for what it knows; returns whether it answered.
    async fn ask(&self, host: &HostName) -> bool {
        let asked = self.0.peers.read::<Revocations>(host, path::REVOCATIONS, LARGEST);
        // A host that is down must not keep this one from asking others.
        let late = |_| Err(AskError::Lost(problem("it takes too long")));
        match timeout(ASK_TIMEOUT, asked).await.unwrap_or_else(late) {
            Ok(Some(told)) => match self.take_in(told).await {
                Ok(()) => true,
                Err(error) => {
                    tracing::warn!("cannot record revocations: {}", error.error);
                    false
                }
            },
            // An older version.
            Ok(None) => true,
            Err(error) => {
                tracing::debug!(%host, "cannot ask for revocations: {error:?}");
                false
            }
        }
    }

    /// Returns whether a certificate with these times is revoked.
    pub(crate) fn is_revoked(&self, host: &HostName, validity: &Validity) -> bool {
        self.0.identity.revocations().covers(host, validity)
    }

    /// Waits until a certificate with these times is revoked.
    pub(crate) async fn revoked(&self, host: &HostName, validity: &Validity) {
        let mut changes = self.0.changes.subscribe();
        while !self.is_revoked(host, validity) {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

impl Inner {
    fn take_key(&self, told: &GossipKey) -> Result<(), Problem> {
        let Some(gossip) = &self.gossip else { return Ok(()) };
        let mut known = lock(&self.key);
        if !is_newer(known.as_ref(), told) {
            return Ok(());
        }
        if !self.identity.is_signed(&key_claim(told.number, &told.key), &told.signature) {
            return Ok(());
        }
        let key = Key::from_hex(&told.key).ok_or_else(|| problem("this is no key"))?;
        // On the disk first: after a restart, a host with the former key would hear nobody.
        self.dir.keep_latest_key(told).map_err(problem)?;
        *known = Some(told.clone());
        gossip.change_key(key);
        Ok(())
    }
}

/// Returns whether a key replaces the one that is known. Two signers may have changed it at once:
/// all hosts agree on one of both.
fn is_newer(known: Option<&GossipKey>, told: &GossipKey) -> bool {
    known.is_none_or(|known| (known.number, &known.key) < (told.number, &told.key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_hosts_agree_on_one_key() {
        let key =
            |number, key: &str| GossipKey { number, key: key.to_owned(), signature: String::new() };
        let all = [key(1, "f"), key(2, "a"), key(2, "b")];
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]] {
            let known = order.into_iter().fold(None, |known: Option<&GossipKey>, next| {
                if is_newer(known, &all[next]) { Some(&all[next]) } else { known }
            });
            assert_eq!(known, Some(&all[2]));
        }
        assert!(!is_newer(Some(&all[0]), &all[0]), "it is known");
    }
}
