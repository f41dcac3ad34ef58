//! The other hosts: their offers, and messages to them.

mod names;
mod offers;
mod summaries;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use aquifer_api::message::{self, Renew, Renewed};
use aquifer_api::status::Standing;
use aquifer_api::{Problem, Threshold, client::CallError, client::Client, path, status};
use aquifer_control::Message;
use aquifer_membership::About;
use aquifer_page::{Bytes, HostName, LeaseId, lock};
use hyper::StatusCode;
use rustls::ClientConfig;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;

pub use self::offers::Spare;
use crate::config::PeerConfig;
use crate::events::Events;
use crate::wire;

/// Timeout of an answer for which the peer must start processes.
const ASK_TIMEOUT: Duration = Duration::from_secs(60);

/// Interval between calls to all peers without another reason: a wrong address or certificate then
/// shows before memory is short.
const CONTACT: Duration = Duration::from_secs(60);

/// The same interval while any peer has an error.
const CONTACT_SOON: Duration = Duration::from_secs(10);

/// The peers of the configuration, the hosts of the cluster, and former peers.
#[derive(Clone, Debug)]
pub struct Peers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    host: HostName,
    /// Random name of this agent process, new at each start.
    agent: String,
    tls: Arc<ClientConfig>,
    peers: RwLock<BTreeMap<HostName, Arc<Peer>>>,
    /// Addresses at which peers call this host but do not reach this agent, each with the reason.
    strayed: Mutex<BTreeMap<String, String>>,
    /// The turns of questions to all hosts.
    asking: Arc<Semaphore>,
    events: Events,
}

#[derive(Debug)]
struct Peer {
    address: String,
    client: Client,
    /// For the questions of operators, which may come again soon.
    asking: Client,
    standing: Standing,
    /// When this host learned of the standing; `None` for peers of the configuration.
    since: Option<Instant>,
    about: About,
    last: Mutex<Last>,
}

/// The results of the latest calls to a peer.
#[derive(Clone, Debug, Default)]
struct Last {
    heard: Option<Instant>,
    spare: Option<(Bytes, Instant)>,
    /// Its latest news of that, and when they were new.
    told: Option<(Bytes, Instant)>,
    /// A digest of what it knows of agreements, by its news.
    agreements: Option<u64>,
    /// A digest of the revocations that it knows, by its news.
    revocations: Option<u64>,
    /// The address at which the peer calls this host.
    calls: Option<String>,
    refused: bool,
    error: Option<String>,
}

impl Peers {
    /// Creates the peers without calling them. `former` holds hosts that neither the configuration
    /// nor the cluster names any more.
    pub fn new(
        host: &HostName,
        peers: &[PeerConfig],
        former: BTreeMap<HostName, String>,
        tls: &Arc<ClientConfig>,
        events: Events,
    ) -> Self {
        let peer = |name: HostName, address: &str, standing| {
            let peer = Arc::new(Peer::new(address, &name, standing, tls));
            (name, peer)
        };
        let listed =
            peers.iter().map(|listed| peer(listed.name.clone(), &listed.address, Standing::Listed));
        let former =
            former.into_iter().map(|(name, address)| peer(name, &address, Standing::Former));
        let peers: BTreeMap<_, _> = former.chain(listed).collect();
        let inner = Inner {
            host: host.clone(),
            // The name must only be random, and a random lease id provides that.
            agent: LeaseId::random().to_string(),
            tls: tls.clone(),
            peers: RwLock::new(peers),
            strayed: Mutex::default(),
            asking: Arc::new(Semaphore::new(summaries::AT_ONCE)),
            events,
        };
        Self(Arc::new(inner))
    }

    /// Tells whether the configuration or the cluster names `host`.
    pub fn knows(&self, host: &HostName) -> bool {
        self.get(host).is_some_and(|peer| peer.is_known())
    }

    fn get(&self, host: &HostName) -> Option<Arc<Peer>> {
        read(&self.0.peers).get(host).cloned()
    }

    fn all(&self) -> BTreeMap<HostName, Arc<Peer>> {
        read(&self.0.peers).clone()
    }

    /// Returns the names of all that the configuration or the cluster names.
    pub fn known(&self) -> BTreeSet<HostName> {
        let known = self.all().into_iter().filter(|(_, peer)| peer.is_known());
        known.map(|(host, _)| host).collect()
    }

    /// Takes in what the cluster says of its hosts. Those of the configuration stay as they are;
    /// those that the cluster has forgotten become former peers. Those that left are known no more.
    pub(crate) fn follow(&self, cluster: &BTreeMap<HostName, Follow>) {
        let mut peers = write(&self.0.peers);
        for (host, follow) in cluster {
            let known = peers.get(host);
            if let Some(listed) = known.filter(|peer| peer.standing == Standing::Listed) {
                listed.hear_digests(follow);
                continue;
            }
            if *host == self.0.host {
                continue;
            }
            if let Some(known) = known.filter(|known| known.is_as(follow)) {
                known.hear(follow);
                continue;
            }
            let mut peer =
                Peer::new(&follow.address.to_string(), host, follow.standing, &self.0.tls);
            peer.about = follow.about.clone();
            if let Some(known) = known {
                peer.replaces(known);
            }
            peer.hear(follow);
            peers.insert(host.clone(), Arc::new(peer));
        }
        let gone =
            |host: &HostName, peer: &Peer| peer.since.is_some() && !cluster.contains_key(host);
        for (host, peer) in peers.iter_mut().filter(|(host, peer)| gone(host, peer)) {
            *peer = Arc::new(Peer::new(&peer.address, host, Standing::Former, &self.0.tls));
        }
    }

    /// Refuses a host that the configuration does not name.
    ///
    /// # Errors
    /// If `from` is no peer; the problem says how to make it one.
    pub fn admit(&self, from: &HostName) -> Result<(), Problem> {
        let host = &self.0.host;
        match self.knows(from) {
            true => Ok(()),
            false => Err(Problem {
                error: format!("{from} is not a peer of {host}"),
                help: Some(to_make_a_peer(from, host)),
            }),
        }
    }

    /// Calls all peers of the configuration, then again at intervals, for as long as the caller
    /// polls the future. Of the other hosts, gossip tells.
    pub async fn keep_in_contact(&self) {
        loop {
            self.ask_offers(self.standing(Standing::Listed), Threshold::Upper).await;
            self.check_name().await;
            let all_well = self.status().iter().all(|peer| peer.error.is_none());
            tokio::time::sleep(if all_well { CONTACT } else { CONTACT_SOON }).await;
        }
    }

    fn standing(&self, standing: Standing) -> impl Iterator<Item = HostName> + use<> {
        let all = self.all().into_iter();
        all.filter(move |(_, peer)| peer.standing == standing).map(|(host, _)| host)
    }

    /// Sends `message` to `to`; returns once the agent there has taken the message in. For
    /// `mem_len_fin` the result says why the peer last failed to leave the lease.
    ///
    /// # Errors
    /// If `to` is unknown, refuses the message, or may not have received it.
    pub async fn say(&self, to: &HostName, message: &Message) -> Result<Option<String>, SayError> {
        let peer = self.get(to).ok_or_else(|| SayError::Lost(unknown(to)))?;
        let answer = wire::say(&peer.client, message.clone()).await;
        self.remember(to, &answer, |_, _| ());
        answer.map_err(|error| match error {
            CallError::Refused { problem, .. } => SayError::Refused(problem.error),
            error => SayError::Lost(error.to_string()),
        })
    }

    /// Asks `lender` how this host reaches a lease over NVMe.
    ///
    /// # Errors
    /// If the lender is unknown or does not answer, or the lease is not this host's.
    pub async fn access(
        &self,
        lender: &HostName,
        lease: LeaseId,
    ) -> Result<message::Access, String> {
        let peer = self.get(lender).ok_or_else(|| unknown(lender))?;
        let answer = peer.client.get(&path::access(lease)).await;
        self.remember(lender, &answer, |_, _| ());
        answer.map_err(|error| error.to_string())
    }

    /// Sends `to` a request that may take up to a minute.
    ///
    /// # Errors
    /// If `to` is no peer, does not answer, or refuses.
    pub async fn ask<T: DeserializeOwned>(
        &self,
        to: &HostName,
        path: &str,
        what: &impl Serialize,
    ) -> Result<T, AskError> {
        let peer = self
            .get(to)
            .filter(|peer| peer.is_known())
            .ok_or_else(|| AskError::Refused(Problem { error: unknown(to), help: None }))?;
        let answer = peer.client.clone().with_timeout(ASK_TIMEOUT).post(path, what).await;
        answer.map_err(|error| match error {
            CallError::Refused { problem, .. } => AskError::Refused(problem),
            error => AskError::Lost(Problem { help: error.help(), error: error.to_string() }),
        })
    }

    /// Reads what `from` answers, if it is a peer and the answer has at most `largest` bytes.
    /// Returns `None` if it has nothing at this path.
    ///
    /// # Errors
    /// If `from` is no peer, does not answer, or refuses.
    pub async fn read<T: DeserializeOwned>(
        &self,
        from: &HostName,
        path: &str,
        largest: usize,
    ) -> Result<Option<T>, AskError> {
        let peer = self.get(from).filter(|peer| peer.is_known());
        let unknown = || AskError::Refused(Problem { error: unknown(from), help: None });
        let client = peer.ok_or_else(unknown)?.client.clone().with_largest(largest);
        match client.get(path).await {
            Ok(answer) => Ok(Some(answer)),
            Err(CallError::Refused { status: StatusCode::NOT_FOUND, .. }) => Ok(None),
            Err(CallError::Refused { problem, .. }) => Err(AskError::Refused(problem)),
            Err(error) => {
                Err(AskError::Lost(Problem { help: error.help(), error: error.to_string() }))
            }
        }
    }

    /// Returns the addresses of all that the configuration or the cluster names.
    pub(crate) fn addresses(&self) -> BTreeMap<HostName, String> {
        let known = self.all().into_iter().filter(|(_, peer)| peer.is_known());
        known.map(|(host, peer)| (host, peer.address.clone())).collect()
    }

    /// Returns the peers of the configuration.
    pub(crate) fn listed(&self) -> BTreeSet<HostName> {
        self.standing(Standing::Listed).collect()
    }

    /// Returns the digests that the cluster's hosts which are up tell of what they know of
    /// agreements.
    pub(crate) fn agreements(&self) -> BTreeMap<HostName, u64> {
        let known = self.all().into_iter().filter(|(_, peer)| peer.is_known());
        known.filter_map(|(host, peer)| Some((host, peer.last().agreements?))).collect()
    }

    /// Returns the digests that the cluster's hosts which are up tell of revocations.
    pub(crate) fn revocations(&self) -> BTreeMap<HostName, u64> {
        let known = self.all().into_iter().filter(|(_, peer)| peer.is_known());
        known.filter_map(|(host, peer)| Some((host, peer.last().revocations?))).collect()
    }

    /// Tells `to` that this host still needs these leases; returns those that `to` does not have.
    pub async fn renew(&self, to: &HostName, renew: Renew) -> Vec<LeaseId> {
        let Some(peer) = self.get(to) else { return Vec::new() };
        let answer = peer.client.post::<_, Renewed>(path::RENEW, &renew).await;
        self.remember(to, &answer, |_, _| ());
        answer.map(|renewed| renewed.lost).unwrap_or_default()
    }

    /// Returns the latest results for each peer, and for each former peer that is `unsettled`.
    pub fn status_with(&self, unsettled: impl Fn(&HostName) -> bool) -> Vec<status::Peer> {
        let all = self.all().into_iter();
        let shown = all.filter(|(host, peer)| peer.is_known() || unsettled(host));
        let status = |(host, peer): (HostName, Arc<Peer>)| {
            let Last { heard, spare, calls, refused, error, .. } = peer.last().clone();
            let age = |at: Instant| at.elapsed().as_secs_f64();
            status::Peer {
                host,
                address: peer.address.clone(),
                standing: peer.standing,
                admits: peer.about.admits,
                zone: peer.about.zone.clone(),
                since_s: peer.since.map(age),
                heard_s: heard.map(age),
                spare: spare.map(|(spare, _)| spare),
                spare_s: spare.map(|(_, at)| age(at)),
                refused,
                error: error.or_else(|| self.astray(&calls?)),
            }
        };
        shown.map(status).collect()
    }

    /// Returns the latest results for each peer.
    pub fn status(&self) -> Vec<status::Peer> {
        self.status_with(|_| false)
    }

    fn remember<T>(
        &self,
        host: &HostName,
        answer: &Result<T, CallError>,
        note: impl FnOnce(&mut Last, &T),
    ) {
        let Some(peer) = self.get(host) else { return };
        let mut last = peer.last();
        // Warn of the first failure only, not of each retry.
        match answer {
            Ok(answer) => {
                if last.error.is_some() {
                    tracing::info!("{host} answers again");
                }
                (last.refused, last.error, last.heard) = (false, None, Some(Instant::now()));
                note(&mut last, answer);
            }
            Err(error) => {
                let (refused, error) = match error {
                    CallError::Refused { problem, .. } => (true, with_help(problem)),
                    error => (false, error.to_string()),
                };
                match last.error {
                    None => tracing::warn!("{host}: {error}"),
                    Some(_) => tracing::debug!("{host}: {error}"),
                }
                if refused {
                    last.heard = Some(Instant::now());
                }
                (last.refused, last.error, last.spare) = (refused, Some(error), None);
            }
        }
    }
}

/// What the cluster says of a host.
#[derive(Clone, Debug)]
pub(crate) struct Follow {
    pub(crate) address: SocketAddr,
    pub(crate) standing: Standing,
    pub(crate) about: About,
    pub(crate) spare: Option<Bytes>,
    pub(crate) agreements: Option<u64>,
    pub(crate) revocations: Option<u64>,
}

impl Peer {
    fn new(address: &str, host: &HostName, standing: Standing, tls: &Arc<ClientConfig>) -> Self {
        let client = Client::peer(address, host, tls.clone());
        let asking = client.clone().with_timeout(summaries::SUMMARY_TIMEOUT);
        let asking = asking.with_largest(summaries::LARGEST_SUMMARY).keeping();
        let is_of_cluster = !matches!(standing, Standing::Listed | Standing::Former);
        Self {
            address: address.to_owned(),
            client,
            asking,
            standing,
            since: is_of_cluster.then(Instant::now),
            about: About::default(),
            last: Mutex::default(),
        }
    }

    /// Keeps the part of what was known of the same host that is still true.
    fn replaces(&mut self, known: &Self) {
        if self.standing == known.standing {
            self.since = known.since;
        }
        if self.standing != Standing::Up {
            self.last().told = known.last().told;
        }
    }

    fn is_as(&self, follow: &Follow) -> bool {
        self.standing == follow.standing
            && self.about == follow.about
            && self.address == follow.address.to_string()
    }

    /// Notes what the peer says that it knows.
    fn hear_digests(&self, follow: &Follow) {
        let mut last = self.last();
        (last.agreements, last.revocations) = (follow.agreements, follow.revocations);
    }

    /// Notes what the peer says that it can lend, and that it knows.
    fn hear(&self, follow: &Follow) {
        self.hear_digests(follow);
        let mut last = self.last();
        if let Some(spare) = follow.spare
            && last.told.is_none_or(|(told, _)| told != spare)
        {
            last.told = Some((spare, Instant::now()));
            last.spare = last.told;
        }
    }

    fn is_known(&self) -> bool {
        !matches!(self.standing, Standing::Former | Standing::Left)
    }

    fn last(&self) -> std::sync::MutexGuard<'_, Last> {
        lock(&self.last)
    }
}

/// The reason why a peer did not do what this host asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AskError {
    /// The peer refuses, and has changed nothing; or there is no such peer.
    Refused(Problem),
    /// The peer may have done it.
    Lost(Problem),
}

impl From<AskError> for Problem {
    fn from(error: AskError) -> Self {
        match error {
            AskError::Refused(problem) | AskError::Lost(problem) => problem,
        }
    }
}

/// The reasons why a message was not taken in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SayError {
    /// The message may not have arrived.
    Lost(String),
    /// The other agent refuses the message.
    Refused(String),
}

pub(crate) fn with_help(problem: &Problem) -> String {
    match &problem.help {
        Some(help) => format!("{}: {help}", problem.error),
        None => problem.error.clone(),
    }
}

fn read<T>(lock: &RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

fn unknown(host: &HostName) -> String {
    format!("{host} is not a peer of this host: {}", to_make_a_peer(host, "this host"))
}

fn to_make_a_peer(peer: &HostName, of: impl Display) -> String {
    format!(
        "join both to one cluster with 'aquifer cluster join', or add a [[peer]] named {peer} to \
         the configuration of {of}"
    )
}
