//! The other hosts: what they could lend, and messages to them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aquifer_api::message::{self, Renew};
use aquifer_api::{Done, Problem, client::CallError, client::Client, path, status};
use aquifer_control::{Message, Offer};
use aquifer_page::{Bytes, HostName, LeaseId};
use rustls::ClientConfig;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;

use crate::config::PeerConfig;
use crate::wire;

/// How long a peer may take to say what it could lend. An overloaded host cannot wait for a dead one.
const OFFER_PATIENCE: Duration = Duration::from_secs(1);

/// How long a peer may take over what it has to start processes for.
const ASK_PATIENCE: Duration = Duration::from_secs(60);

/// The peers of the configuration.
#[derive(Clone, Debug)]
pub struct Peers {
    peers: Arc<BTreeMap<HostName, Peer>>,
}

#[derive(Debug)]
struct Peer {
    address: String,
    client: Client,
    last: Mutex<Last>,
}

#[derive(Clone, Debug, Default)]
struct Last {
    spare: Option<Bytes>,
    error: Option<String>,
}

impl Peers {
    /// Nobody is called yet.
    pub fn new(peers: &[PeerConfig], tls: &Arc<ClientConfig>) -> Self {
        let peers = peers.iter().map(|PeerConfig { name, address }| {
            let client = Client::peer(address, name, tls.clone());
            (name.clone(), Peer { address: address.clone(), client, last: Mutex::default() })
        });
        Self { peers: Arc::new(peers.collect()) }
    }

    /// Whether `host` is one of them.
    pub fn knows(&self, host: &HostName) -> bool {
        self.peers.contains_key(host)
    }

    /// Asks all at once what they could lend; those that do not answer within a second are left out.
    pub async fn offers(&self) -> Vec<Offer> {
        let mut calls = JoinSet::new();
        for host in self.peers.keys().cloned() {
            let peers = self.clone();
            calls.spawn(async move {
                let client = peers.peers.get(&host)?.client.clone().with_timeout(OFFER_PATIENCE);
                let answer = client.get::<message::Offer>(path::OFFER).await;
                peers.remember(&host, &answer, |offer| Some(offer.spare));
                answer.ok().map(|offer| Offer { host, spare: offer.spare })
            });
        }
        calls.join_all().await.into_iter().flatten().collect()
    }

    /// Says `message` to `to`; returns when its agent has taken it in.
    ///
    /// # Errors
    /// Why it could not be delivered; for a host that is no peer of ours, that.
    pub async fn say(&self, to: &HostName, message: &Message) -> Result<(), String> {
        let peer = self.peers.get(to).ok_or_else(|| unknown(to))?;
        let answer = wire::say(&peer.client, message).await;
        self.remember(to, &answer, |_| None);
        answer.map(|_: Done| ()).map_err(|error| error.to_string())
    }

    /// How this host gets at a lease of `lender` over NVMe.
    ///
    /// # Errors
    /// If the lender does not answer, or the lease is not this host's.
    pub async fn access(&self, lender: &HostName, lease: LeaseId) -> Result<message::Access, String> {
        let peer = self.peers.get(lender).ok_or_else(|| unknown(lender))?;
        let answer = peer.client.get(&path::access(lease)).await;
        self.remember(lender, &answer, |_| None);
        answer.map_err(|error| error.to_string())
    }

    /// Asks `to` for something that takes it a while.
    ///
    /// # Errors
    /// If it does not answer, or refuses.
    pub async fn ask<T: DeserializeOwned>(
        &self,
        to: &HostName,
        path: &str,
        what: &impl Serialize,
    ) -> Result<T, Problem> {
        let problem = |error| Problem { error, help: None };
        let peer = self.peers.get(to).ok_or_else(|| problem(unknown(to)))?;
        let answer = peer.client.clone().with_timeout(ASK_PATIENCE).post(path, what).await;
        answer.map_err(|error| match error {
            CallError::Refused { problem, .. } => problem,
            error => problem(error.to_string()),
        })
    }

    /// Tells `to` that these leases of its are still needed.
    pub async fn renew(&self, to: &HostName, leases: Vec<LeaseId>) {
        let Some(peer) = self.peers.get(to) else { return };
        let answer = peer.client.post::<_, Done>(path::RENEW, &Renew { leases }).await;
        self.remember(to, &answer, |_| None);
    }

    /// What was last heard of each.
    pub fn status(&self) -> Vec<status::Peer> {
        let status = |(host, peer): (&HostName, &Peer)| {
            let Last { spare, error } = peer.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
            status::Peer { host: host.clone(), address: peer.address.clone(), spare, error }
        };
        self.peers.iter().map(status).collect()
    }

    fn remember<T>(
        &self,
        host: &HostName,
        answer: &Result<T, CallError>,
        spare: impl Fn(&T) -> Option<Bytes>,
    ) {
        let Some(peer) = self.peers.get(host) else { return };
        let mut last = peer.last.lock().unwrap_or_else(PoisonError::into_inner);
        // Said once, however often the same is tried again.
        match answer {
            Ok(answer) => {
                if last.error.is_some() {
                    tracing::info!("{host} answers again");
                }
                *last = Last { spare: spare(answer).or(last.spare), error: None };
            }
            Err(error) => {
                let error = error.to_string();
                match last.error {
                    None => tracing::warn!("{host}: {error}"),
                    Some(_) => tracing::debug!("{host}: {error}"),
                }
                *last = Last { spare: None, error: Some(error) };
            }
        }
    }
}

fn unknown(host: &HostName) -> String {
    format!("{host} is no peer of this host: add a [[peer]] with its name and address to the configuration")
}
