//! The other hosts: their offers, and messages to them.

mod names;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aquifer_api::message::{self, Renew, Renewed};
use aquifer_api::{Problem, client::CallError, client::Client, path, status};
use aquifer_control::{Message, Offer};
use aquifer_page::{Bytes, HostName, LeaseId, lock};
use rustls::ClientConfig;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;

use crate::config::PeerConfig;
use crate::events::Events;
use crate::wire;

/// Timeout of an answer with an offer: an overloaded host cannot wait for a dead one.
const OFFER_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout of an answer for which the peer must start processes.
const ASK_TIMEOUT: Duration = Duration::from_secs(60);

/// Interval between calls to all peers without another reason: a wrong address or certificate then
/// shows before memory is short.
const CONTACT: Duration = Duration::from_secs(60);

/// The same interval while any peer has an error.
const CONTACT_SOON: Duration = Duration::from_secs(10);

/// The peers of the configuration, and former peers.
#[derive(Clone, Debug)]
pub struct Peers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    host: HostName,
    /// Random name of this agent process, new at each start.
    agent: String,
    tls: Arc<ClientConfig>,
    peers: BTreeMap<HostName, Peer>,
    /// Addresses at which peers call this host but do not reach this agent, each with the reason.
    strayed: Mutex<BTreeMap<String, String>>,
    events: Events,
}

#[derive(Debug)]
struct Peer {
    address: String,
    client: Client,
    /// Whether the configuration names the peer.
    listed: bool,
    last: Mutex<Last>,
}

/// The results of the latest calls to a peer.
#[derive(Clone, Debug, Default)]
struct Last {
    heard: Option<Instant>,
    spare: Option<(Bytes, Instant)>,
    /// The address at which the peer calls this host.
    calls: Option<String>,
    refused: bool,
    error: Option<String>,
}

impl Peers {
    /// Creates the peers without calling them. `former` holds hosts that the configuration no
    /// longer names.
    pub fn new(
        host: &HostName,
        peers: &[PeerConfig],
        former: BTreeMap<HostName, String>,
        tls: &Arc<ClientConfig>,
        events: Events,
    ) -> Self {
        let listed = peers.iter().map(|peer| (peer.name.clone(), peer.address.clone(), true));
        let former = former.into_iter().map(|(name, address)| (name, address, false));
        let peers = listed.chain(former).map(|(name, address, listed)| {
            let client = Client::peer(&address, &name, tls.clone());
            (name, Peer { address, client, listed, last: Mutex::default() })
        });
        let inner = Inner {
            host: host.clone(),
            // The name must only be random, and a random lease id provides that.
            agent: LeaseId::random().to_string(),
            tls: tls.clone(),
            peers: peers.collect(),
            strayed: Mutex::default(),
            events,
        };
        Self(Arc::new(inner))
    }

    /// Tells whether the configuration names `host`.
    pub fn knows(&self, host: &HostName) -> bool {
        self.0.peers.get(host).is_some_and(|peer| peer.listed)
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
                help: Some(format!("add a [[peer]] named {from} to the configuration of {host}")),
            }),
        }
    }

    /// Answers `from`, which asks how much this host would lend.
    ///
    /// # Errors
    /// If `from` is neither a peer nor this host's own name.
    pub fn offer(&self, from: &HostName, spare: Bytes) -> Result<message::Offer, Problem> {
        if *from != self.0.host {
            self.admit(from)?;
        }
        let you = self.0.peers.get(from).map(|peer| peer.address.clone()).unwrap_or_default();
        Ok(message::Offer { host: self.0.host.clone(), spare, agent: self.0.agent.clone(), you })
    }

    /// Calls all peers, then again at intervals, for as long as the caller polls the future.
    pub async fn keep_in_contact(&self) {
        loop {
            self.offers().await;
            self.check_name().await;
            let all_well = self.status().iter().all(|peer| peer.error.is_none());
            tokio::time::sleep(if all_well { CONTACT } else { CONTACT_SOON }).await;
        }
    }

    /// Asks all peers at once, and returns the offers that arrive within a second. Offers of peers
    /// that reach another agent under this host's name are left out: their grants would go there.
    pub async fn offers(&self) -> Vec<Offer> {
        let mut calls = JoinSet::new();
        let listed = self.0.peers.iter().filter(|(_, peer)| peer.listed);
        for host in listed.map(|(host, _)| host.clone()) {
            let peers = self.clone();
            calls.spawn(async move {
                let client = peers.0.peers.get(&host)?.client.clone().with_timeout(OFFER_TIMEOUT);
                let answer = client.get::<message::Offer>(path::OFFER).await;
                peers.remember(&host, &answer, |last, offer| {
                    last.spare = Some((offer.spare, Instant::now()));
                    last.calls = Some(offer.you.clone()).filter(|you| !you.is_empty());
                });
                let offer = answer.ok()?;
                peers.astray(&offer.you).is_none().then_some(Offer { host, spare: offer.spare })
            });
        }
        calls.join_all().await.into_iter().flatten().collect()
    }

    /// Sends `message` to `to`; returns once the agent there has taken the message in. For
    /// `mem_len_fin` the result says why the peer last failed to leave the lease.
    ///
    /// # Errors
    /// If `to` is unknown, refuses the message, or may not have received it.
    pub async fn say(&self, to: &HostName, message: &Message) -> Result<Option<String>, SayError> {
        let peer = self.0.peers.get(to).ok_or_else(|| SayError::Lost(unknown(to)))?;
        let answer = wire::say(&peer.client, message).await;
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
        let peer = self.0.peers.get(lender).ok_or_else(|| unknown(lender))?;
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
    ) -> Result<T, Problem> {
        let problem = |error| Problem { error, help: None };
        let peer =
            self.0.peers.get(to).filter(|peer| peer.listed).ok_or_else(|| problem(unknown(to)))?;
        let answer = peer.client.clone().with_timeout(ASK_TIMEOUT).post(path, what).await;
        answer.map_err(|error| match error {
            CallError::Refused { problem, .. } => problem,
            error => Problem { help: error.help(), error: error.to_string() },
        })
    }

    /// Tells `to` that this host still needs these leases; returns those that `to` does not have.
    pub async fn renew(&self, to: &HostName, renew: Renew) -> Vec<LeaseId> {
        let Some(peer) = self.0.peers.get(to) else { return Vec::new() };
        let answer = peer.client.post::<_, Renewed>(path::RENEW, &renew).await;
        self.remember(to, &answer, |_, _| ());
        answer.map(|renewed| renewed.lost).unwrap_or_default()
    }

    /// Returns the latest results for each peer, and for each former peer that is `unsettled`.
    pub fn status_with(&self, unsettled: impl Fn(&HostName) -> bool) -> Vec<status::Peer> {
        let shown = self.0.peers.iter().filter(|(host, peer)| peer.listed || unsettled(host));
        let status = |(host, peer): (&HostName, &Peer)| {
            let Last { heard, spare, calls, refused, error } = peer.last().clone();
            let age = |at: Instant| at.elapsed().as_secs_f64();
            status::Peer {
                host: host.clone(),
                address: peer.address.clone(),
                listed: peer.listed,
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
        let Some(peer) = self.0.peers.get(host) else { return };
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

impl Peer {
    fn last(&self) -> std::sync::MutexGuard<'_, Last> {
        lock(&self.last)
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

fn with_help(problem: &Problem) -> String {
    match &problem.help {
        Some(help) => format!("{}: {help}", problem.error),
        None => problem.error.clone(),
    }
}

fn unknown(host: &HostName) -> String {
    format!(
        "{host} is not a peer of this host: add a [[peer]] with its name and address \
         to the configuration"
    )
}
