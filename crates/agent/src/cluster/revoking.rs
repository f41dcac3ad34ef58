//! How all hosts learn within seconds that a host may not be in the cluster any more.
//!
//! A signer ends the host's certificates and changes the key of the gossip: it signs both with the
//! authority's key, so that no other host can. It calls all hosts that it knows. Gossip tells a
//! digest of what each host knows, and a host that sees another digest asks. A host that was away
//! hears no gossip, since the key has changed; it calls the hosts that it knows, until one answers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aquifer_api::message::{GossipKey, Revocations, Revoked};
use aquifer_api::order::{Forget, Forgotten};
use aquifer_api::status::Standing;
use aquifer_api::{Done, Problem, path};
use aquifer_page::{HostName, lock};
use aquifer_transport::tls::{Identity, Revocation, Validity};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::{Admission, ClusterDir, Gossip, Key};
use crate::driver::{Command, Handle};
use crate::peers::Peers;

/// The time between two looks at what gossip tells.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The time between two calls to hosts that gossip says nothing of.
const CALL_INTERVAL: Duration = Duration::from_secs(5);

/// Timeout of a call that tells one host.
const TELL_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a host that leaves can still tell the others.
const FAREWELL: Duration = Duration::from_secs(2);

/// The largest answer with revocations, in bytes.
const LARGEST: usize = 8 << 20;

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
    /// One change at a time.
    changing: Mutex<()>,
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

fn problem(error: impl std::fmt::Display) -> Problem {
    Problem { error: error.to_string(), help: None }
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
        let changing = Mutex::default();
        Self(Arc::new(Inner { identity, dir, peers, gossip, agent, changes, changing }))
    }

    /// Returns what this host knows, for another host of the cluster.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn known(&self) -> Result<Revocations, Problem> {
        let revoked = self.0.identity.revocations().list().into_iter();
        let of = |Revocation { host, until, signature }| Revoked { host, until, signature };
        let key = self.0.dir.latest_key().map_err(problem)?;
        Ok(Revocations { revoked: revoked.map(of).collect(), key })
    }

    /// Takes in what the authority signed of this, wherever it comes from.
    ///
    /// # Errors
    /// If it cannot be recorded.
    pub(crate) async fn take_in(&self, told: Revocations) -> Result<(), Problem> {
        let here = self.clone();
        let taken = tokio::task::spawn_blocking(move || here.0.take_in(told)).await;
        let (is_new, hosts) = taken.map_err(problem)??;
        if is_new {
            self.apply();
        }
        for host in hosts {
            let _ = self.0.agent.0.send(Command::HostRevoked(host)).await;
        }
        Ok(())
    }

    /// Makes all parts of the agent act on the revocations.
    fn apply(&self) {
        let known = self.0.identity.revocations();
        self.0.changes.send_modify(|changes| *changes += 1);
        if let Some(gossip) = &self.0.gossip {
            gossip.tell_revocations(known.digest());
        }
    }

    /// Ends the membership of a host: this host is a signer. Tells all hosts that it can reach.
    ///
    /// # Errors
    /// If this host is no signer, or a file cannot be written.
    pub(crate) async fn forget(
        &self,
        admission: &Admission,
        Forget { host }: Forget,
    ) -> Result<Forgotten, Problem> {
        if host == *self.0.identity.host() {
            return Err(Problem {
                error: format!("{host} is this host"),
                help: Some("run 'aquifer cluster leave'".to_owned()),
            });
        }
        let (signer, gone) = (admission.clone(), host.clone());
        let ended = tokio::task::spawn_blocking(move || signer.forget(&gone)).await;
        self.take_in(ended.map_err(problem)??).await?;
        let (told, untold) = self.tell_all(&host).await?;
        Ok(Forgotten { host, told, untold })
    }

    /// A host leaves by itself. The answer reaches it before its certificates end: the connection
    /// is closed then.
    ///
    /// # Errors
    /// If this host is no signer.
    pub(crate) fn left(&self, admission: Admission, host: HostName) -> Result<(), Problem> {
        if admission.lifetime().is_none() {
            return Err(problem(format!(
                "{} does not admit hosts to the cluster",
                self.0.identity.host()
            )));
        }
        admission.free(&host)?;
        let here = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(FAREWELL).await;
            if let Err(error) = here.forget(&admission, Forget { host }).await {
                tracing::warn!("cannot end the certificates of a host that left: {}", error.error);
            }
        });
        Ok(())
    }

    /// Tells all hosts but one; returns those that know, and those that could not be told.
    async fn tell_all(&self, gone: &HostName) -> Result<(Vec<HostName>, Vec<HostName>), Problem> {
        let known = Arc::new(self.known()?);
        let mut calls = JoinSet::new();
        for host in self.0.peers.known().into_iter().filter(|host| host != gone) {
            let (peers, known) = (self.0.peers.clone(), known.clone());
            calls.spawn(async move {
                let told = peers.ask::<Done>(&host, path::REVOCATIONS, &*known);
                (matches!(timeout(TELL_TIMEOUT, told).await, Ok(Ok(_))), host)
            });
        }
        let (told, untold): (Vec<_>, Vec<_>) =
            calls.join_all().await.into_iter().partition(|(told, _)| *told);
        let mut names = [told, untold].map(|hosts| {
            let mut names: Vec<_> = hosts.into_iter().map(|(_, host)| host).collect();
            names.sort();
            names
        });
        Ok((std::mem::take(&mut names[0]), std::mem::take(&mut names[1])))
    }

    /// Learns from the other hosts for as long as the caller polls the future.
    pub(crate) async fn run(self) {
        // Those that the previous agent knew.
        self.apply();
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
        let asked = self.0.peers.read::<Revocations>(host, path::REVOCATIONS, LARGEST).await;
        match asked {
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

    /// Waits until a certificate with these times is revoked.
    pub(crate) async fn revoked(&self, host: &HostName, validity: &Validity) {
        let mut changes = self.0.changes.subscribe();
        while !self.0.identity.revocations().covers(host, validity) {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

impl Inner {
    /// Returns whether anything is new, and the hosts that are newly revoked.
    fn take_in(&self, told: Revocations) -> Result<(bool, Vec<HostName>), Problem> {
        let _changing = lock(&self.changing);
        let before = self.identity.revocations();
        let of = |Revoked { host, until, signature }| Revocation { host, until, signature };
        let new = told.revoked.into_iter().map(of).collect();
        let is_new = self.identity.revoke(new).map_err(problem)?;
        let key = told.key.map_or(Ok(false), |key| self.take_key(&key))?;
        let now = self.identity.revocations().list().into_iter();
        let hosts = now.map(|known| known.host);
        let hosts = hosts.filter(|host| self.identity.revoked_until(host) > before.until(host));
        Ok((is_new || key, hosts.collect()))
    }

    fn take_key(&self, told: &GossipKey) -> Result<bool, Problem> {
        let Some(gossip) = &self.gossip else { return Ok(false) };
        let known = self.dir.latest_key().map_err(problem)?;
        let claim = key_claim(told.number, &told.key);
        // Two signers may have changed it at once: all hosts agree on one of both.
        let is_newer =
            known.is_none_or(|known| (known.number, &known.key) < (told.number, &told.key));
        if !is_newer || !self.identity.is_signed(&claim, &told.signature) {
            return Ok(false);
        }
        let key = Key::from_hex(&told.key).ok_or_else(|| problem("this is no key"))?;
        self.dir.keep_latest_key(told).map_err(problem)?;
        gossip.change_key(key);
        Ok(true)
    }
}
