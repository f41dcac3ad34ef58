//! How all hosts learn within seconds that a host may not be in the cluster any more.
//!
//! A signer ends the host's certificates and changes the key of the gossip: it signs both with the
//! authority's key, so that no other host can. It calls all hosts that it knows, and then frees the
//! name. Gossip tells a digest of what each host knows, and a host that sees another digest asks. A
//! host that was away hears no gossip, since the key has changed; it calls the hosts that it knows,
//! until one answers.
//!
//! Each host first ends connections, then records the revocation, then frees the host's leases, and
//! changes the key last: a new machine of that name is heard only under the new key. If one called
//! before this host learned of the revocation, it is asked which leases are its own.

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

use super::renewing::{blocking, problem};
use super::{Admission, ClusterDir, Gossip, Key};
use crate::driver::{Command, Handle};
use crate::peers::{AskError, Peers};

/// The time between two looks at what gossip tells.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The time between two calls to hosts that gossip says nothing of.
const CALL_INTERVAL: Duration = Duration::from_secs(5);

/// After this time a host that tells another digest is asked again, although nothing changed: it or
/// this host may have had a wrong clock then.
const ASKED_INTERVAL: Duration = Duration::from_secs(60);

/// The most hosts that are asked at a time: one that does not answer keeps few others waiting.
const AT_ONCE: usize = 4;

/// Timeout of a question to one host.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout of a call that tells one host.
const TELL_TIMEOUT: Duration = Duration::from_secs(3);

/// The longest list that a call tells, in bytes: half of what a host takes in.
const LONGEST_TOLD: usize = 1 << 20;

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
    admission: Admission,
    /// Counts the changes.
    changes: watch::Sender<u64>,
    /// The revocations that all parts of the agent act on.
    applied: AsyncMutex<tls::Revocations>,
    /// The latest key of the gossip. Held while it changes.
    key: Mutex<Option<GossipKey>>,
    /// When the latest certificate was issued with which each host has called.
    callers: Mutex<BTreeMap<HostName, SystemTime>>,
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
        (agent, admission): (Handle, Admission),
    ) -> Self {
        let changes = watch::Sender::new(0);
        // The former agent acted on these.
        let applied = AsyncMutex::new(identity.revocations());
        // Without it, this host learns it again.
        let key = Mutex::new(dir.latest_key().unwrap_or_default());
        Self(Arc::new(Inner {
            identity,
            dir,
            peers,
            gossip,
            agent,
            admission,
            changes,
            applied,
            key,
            callers: Mutex::default(),
        }))
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
        let hosts: Vec<_> = revoked.iter().map(|revoked| revoked.host.clone()).collect();
        let of =
            |Revoked { host, until, ends, signature }| Revocation { host, until, ends, signature };
        let (identity, new) = (self.0.identity.clone(), revoked.into_iter().map(of).collect());
        let recorded = blocking(move || identity.revoke(new).map_err(problem)).await;
        let admission = self.0.admission.clone();
        let late = blocking(move || admission.revoke_late(&hosts)).await;
        self.apply().await;
        if let Some(key) = key {
            self.take_key(key).await?;
        }
        recorded?;
        for host in late? {
            let here = self.clone();
            // The caller does not wait for all others.
            tokio::spawn(async move {
                let admission = here.0.admission.clone();
                if let Err(error) = here.tell_all(admission, &host, false).await {
                    tracing::warn!(%host, "cannot change the key that it has: {}", error.error);
                }
            });
        }
        Ok(())
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
            let latest = lock(&self.0.callers).get(&host).copied();
            let command = match latest > known.until(&host) {
                // This host hears late: a new machine has the name, and may have leases here. It
                // gives back those that are not its own.
                true => Command::HostAnew(host),
                false => Command::HostRevoked(host),
            };
            let _ = self.0.agent.0.send(command).await;
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
        // It may have been restored from an older copy: hosts would ignore the key that follows.
        admission.wait_to_renew().await;
        let is_other = |other: &HostName| *other != host;
        if !admission.has_heard() && !order.force && self.0.peers.known().iter().any(is_other) {
            return Err(Problem {
                error: "this signer asks the other hosts first which of them are revoked".into(),
                help: Some(
                    "start the agents of more hosts; if all are lost, run 'aquifer cluster forget' \
                     with --force here"
                        .to_owned(),
                ),
            });
        }
        let (signer, force) = (admission.clone(), order.force);
        let ended = blocking(move || signer.forget(&order)).await;
        // Also if a part failed: what this process knows, it acts on.
        self.apply().await;
        let until = ended?;
        let calls = self.tell_all(admission.clone(), &host, force).await?;
        let gone = host.clone();
        blocking(move || admission.free(&gone, until)).await?;
        let older = names(&calls, &Heard::Older);
        let untold = [names(&calls, &Heard::Nothing), older.clone()].concat();
        Ok(Forgotten { host, told: names(&calls, &Heard::Knows), untold, older })
    }

    /// Tells all hosts but the one that is gone, and then changes the key of the gossip.
    ///
    /// A host of an older version would never learn another key, and would hear nobody. So the key
    /// stays if one answers, unless the caller forces it. A host that does not answer has no say:
    /// the host that is gone may have made it up.
    async fn tell_all(
        &self,
        admission: Admission,
        gone: &HostName,
        force: bool,
    ) -> Result<Vec<(HostName, Heard)>, Problem> {
        let hosts = self.0.peers.known().into_iter().filter(|host| host != gone);
        let mut calls = self.tell(hosts.collect(), gone).await;
        if force || names(&calls, &Heard::Older).is_empty() {
            self.take_key(blocking(move || admission.next_key()).await?).await?;
            let hosts = names(&calls, &Heard::Knows);
            calls.retain(|(_, heard)| *heard != Heard::Knows);
            calls.extend(self.tell(hosts, gone).await);
        }
        Ok(calls)
    }

    /// Tells these hosts that one is gone, and the key of the gossip. None may have the key while
    /// it lacks earlier revocations: it would tell it to a host that they concern.
    async fn tell(&self, hosts: Vec<HostName>, gone: &HostName) -> Vec<(HostName, Heard)> {
        let mut known = self.known();
        if serde_json::to_vec(&known).is_ok_and(|text| text.len() > LONGEST_TOLD) {
            // All else, they learn by gossip.
            known.revoked.retain(|revoked| revoked.host == *gone);
        }
        let known = Arc::new(known);
        let mut calls = JoinSet::new();
        for host in hosts {
            let (peers, known) = (self.0.peers.clone(), known.clone());
            calls.spawn(async move {
                let heard = timeout(TELL_TIMEOUT, tell(&peers, &host, &known)).await;
                (host, heard.unwrap_or(Heard::Nothing))
            });
        }
        calls.join_all().await
    }

    /// Learns from the other hosts for as long as the caller polls the future.
    pub(crate) async fn run(self) {
        // Those that the previous agent knew.
        self.apply().await;
        let mut asked: BTreeMap<HostName, ((u64, u64), Instant)> = BTreeMap::new();
        let (mut called, mut last): (Option<Instant>, _) = (None, None);
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let own = self.0.identity.revocations().digest();
            let mut told = self.0.peers.revocations();
            asked.retain(|_, (_, at)| at.elapsed() < ASKED_INTERVAL);
            // What was asked for then, and known then, is no reason to ask again soon.
            told.retain(|host, digest| {
                let is_new = |(before, _): &(_, _)| *before != (*digest, own);
                *digest != own && asked.get(host).is_none_or(is_new)
            });
            for some in told.into_iter().collect::<Vec<_>>().chunks(AT_ONCE) {
                let mut questions = JoinSet::new();
                for (host, digest) in some.iter().cloned() {
                    let here = self.clone();
                    questions.spawn(async move { here.ask(&host).await.then_some((host, digest)) });
                }
                for (host, digest) in questions.join_all().await.into_iter().flatten() {
                    asked.insert(host, ((digest, own), Instant::now()));
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
        self.0.identity.is_revoked(host, validity)
    }

    fn note_caller(&self, host: &HostName, validity: &Validity) {
        let mut callers = lock(&self.0.callers);
        let latest = callers.entry(host.clone()).or_insert(validity.issued);
        *latest = validity.issued.max(*latest);
    }

    /// Waits until a certificate with these times, with which a host calls, is revoked.
    pub(crate) async fn revoked(&self, host: &HostName, validity: &Validity) {
        self.note_caller(host, validity);
        let mut changes = self.0.changes.subscribe();
        while !self.is_revoked(host, validity) {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

/// What a host knows after it was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heard {
    /// All of it.
    Knows,
    /// Nothing yet.
    Nothing,
    /// Nothing: it runs an older version.
    Older,
}

async fn tell(peers: &Peers, host: &HostName, known: &Revocations) -> Heard {
    match peers.ask::<Done>(host, path::REVOCATIONS, known).await {
        Ok(Done {}) => Heard::Knows,
        Err(AskError::Lost(_)) => Heard::Nothing,
        Err(AskError::Refused(_)) => {
            match peers.read::<Revocations>(host, path::REVOCATIONS, LARGEST).await {
                Ok(None) => Heard::Older,
                _ => Heard::Nothing,
            }
        }
    }
}

/// Returns the names of the hosts that heard this, in their order.
fn names(calls: &[(HostName, Heard)], heard: &Heard) -> Vec<HostName> {
    let hosts = calls.iter().filter(|(_, found)| found == heard).map(|(host, _)| host.clone());
    let mut hosts: Vec<_> = hosts.collect();
    hosts.sort();
    hosts
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
    use std::path::Path;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;
    use tokio_rustls::TlsAcceptor;

    use super::*;
    use crate::config::{Config, PeerConfig};
    use crate::events::Events;

    /// Answers each request as agents of an older version do, or not at all.
    async fn answer(listener: TcpListener, identity: Identity, is_silent: bool) {
        let acceptor = TlsAcceptor::from(identity.server_config());
        let mut kept = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let mut request = [0; 4096];
            if !is_silent && stream.read(&mut request).await.is_ok() {
                let body = r#"{"error":"there is no such path"}"#;
                let head = "HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\n";
                let length = body.len();
                let text = format!("{head}content-length: {length}\r\n\r\n{body}");
                let _ = stream.write_all(text.as_bytes()).await;
            }
            kept.push(stream);
        }
    }

    #[tokio::test]
    async fn a_host_of_an_older_version_is_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let authority = tls::Authority::create(&dir.path().join("ca"), "test").unwrap();
        let identity = |name: &str| {
            let at = dir.path().join(name);
            authority.issue(&at, &name.parse().unwrap(), &[], false).unwrap();
            Identity::load(&at).unwrap()
        };
        let mut listed = Vec::new();
        for (name, is_silent) in [("old", false), ("silent", true)] {
            let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            listed.push(PeerConfig { name: name.parse().unwrap(), address });
            tokio::spawn(answer(listener, identity(name), is_silent));
        }
        let (own, config) = ("own".parse().unwrap(), identity("own").client_config());
        let peers = Peers::new(&own, &listed, BTreeMap::new(), &config, Events::default());
        let known = Revocations::default();
        let calls = async |name: &str| tell(&peers, &name.parse().unwrap(), &known).await;
        assert_eq!(calls("old").await, Heard::Older);
        timeout(Duration::from_millis(500), calls("silent")).await.unwrap_err();
    }

    /// Returns the part of host 'a', which is no signer, and the commands to its driver.
    fn part(
        dir: &Path,
        authority: &tls::Authority,
        listed: &[PeerConfig],
    ) -> (Revoking, mpsc::Receiver<Command>) {
        let own = "a".parse().unwrap();
        authority.issue(dir, &own, &[], false).unwrap();
        let identity = Identity::load(dir).unwrap();
        let cluster = dir.join("cluster");
        let config: Config = toml::from_str(&format!("host = 'a'\ncluster = {cluster:?}")).unwrap();
        let tls = identity.client_config();
        let peers = Peers::new(&own, listed, BTreeMap::new(), &tls, Events::default());
        let admission = Admission::new(&config, peers.clone(), None, identity.clone());
        let (commands, inbox) = mpsc::channel(8);
        let acts = (Handle(commands), admission);
        (Revoking::new(identity, ClusterDir::new(&cluster), peers, None, acts), inbox)
    }

    #[tokio::test]
    async fn only_a_host_that_answers_keeps_the_key() {
        let dir = tempfile::tempdir().unwrap();
        let authority = tls::Authority::create(&dir.path().join("ca"), "test").unwrap();
        let gone = "gone".parse().unwrap();
        let all = [("old", false, false), ("forced", false, true), ("silent", true, false)];
        for (name, is_silent, force) in all {
            let at = dir.path().join(name);
            let name: HostName = name.parse().unwrap();
            authority.issue(&at, &name, &[], false).unwrap();
            let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            tokio::spawn(answer(listener, Identity::load(&at).unwrap(), is_silent));
            let listed = [PeerConfig { name: name.clone(), address }];
            let (revoking, _inbox) = part(&at.join("a"), &authority, &listed);
            let told = revoking.tell_all(revoking.0.admission.clone(), &gone, force).await;
            match is_silent || force {
                // It is to make a key, and is no signer.
                true => assert!(told.unwrap_err().error.contains("cannot admit hosts")),
                false => assert_eq!(told.unwrap(), [(name, Heard::Older)]),
            }
        }
    }

    #[tokio::test]
    async fn a_late_revocation_takes_no_lease_of_a_new_machine() {
        let dir = tempfile::tempdir().unwrap();
        let authority = tls::Authority::create(&dir.path().join("ca"), "test").unwrap();
        let host: HostName = "b".parse().unwrap();
        let (revoking, mut inbox) = part(dir.path(), &authority, &[]);
        let second = |number: u64| UNIX_EPOCH + Duration::from_secs(2_000_000_000 + number);
        let revoked = |number| {
            let revoked = authority.revoke(&host, second(number), second(number) + tls::TEN_YEARS);
            let Revocation { host, until, ends, signature } = revoked.unwrap();
            Revocations { revoked: vec![Revoked { host, until, ends, signature }], key: None }
        };
        let mut told = async |number| {
            revoking.take_in(revoked(number)).await.unwrap();
            inbox.try_recv().unwrap()
        };
        assert!(matches!(told(0).await, Command::HostRevoked(_)));
        let new = Validity { issued: second(20), ends: second(1000) };
        timeout(Duration::from_millis(1), revoking.revoked(&host, &new)).await.unwrap_err();
        assert!(matches!(told(10).await, Command::HostAnew(_)));
        assert!(matches!(told(20).await, Command::HostRevoked(_)), "that machine, too");
    }

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
