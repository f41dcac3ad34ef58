//! How a signer that starts hears which hosts are revoked, before it renews any certificate.
//!
//! It may have been restored from an older copy, or another signer may have revoked a host since.
//! The authority signs what it hears, so it also listens to hosts whose certificates have ended:
//! after days without a signer, all have. A host that does not answer is down, or hides what it
//! knows; one answer is enough, once all were asked.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use aquifer_api::client::{CallError, Client};
use aquifer_api::message::Revocations;
use aquifer_api::path;
use aquifer_page::HostName;
use axum::http::StatusCode;
use rustls::ClientConfig;
use tokio::task::JoinSet;

use super::renewing::{blocking, problem};
use super::revoking::LARGEST;
use super::{Admission, ClusterDir, Revoking};
use crate::peers::Peers;

/// The time between two rounds of questions.
const PAUSE: Duration = Duration::from_secs(3);

/// Timeout of a question to one host.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The most hosts that are asked at a time.
const AT_ONCE: usize = 64;

/// A signer's questions to all hosts that it knows.
#[derive(Debug)]
pub(crate) struct Hearing {
    pub(crate) dir: ClusterDir,
    pub(crate) peers: Peers,
    pub(crate) revoking: Revoking,
    pub(crate) admission: Admission,
    /// Accepts certificates that have ended.
    pub(crate) tls: Arc<ClientConfig>,
}

impl Hearing {
    /// Asks until a host has answered, and then lets the signer renew certificates. Does nothing on
    /// other hosts.
    pub(crate) async fn run(self) {
        if self.admission.lifetime().is_none() {
            return;
        }
        while !self.ask_all().await {
            tokio::time::sleep(PAUSE).await;
        }
        self.admission.allow_renewals();
    }

    /// Asks all hosts; returns whether one answered, or there is none.
    async fn ask_all(&self) -> bool {
        let dir = self.dir.clone();
        let admitted = blocking(move || dir.admitted().map_err(problem)).await;
        let known = self.peers.addresses();
        if admitted.is_ok_and(|admitted| admitted.is_empty()) && known.is_empty() {
            return true;
        }
        let mut has_answer = false;
        for hosts in known.into_iter().collect::<Vec<_>>().chunks(AT_ONCE) {
            let hosts = hosts.iter().cloned().collect();
            for told in self.ask(hosts).await {
                has_answer = true;
                if let Err(error) = self.revoking.take_in(told).await {
                    tracing::warn!("cannot record revocations: {}", error.error);
                }
            }
        }
        has_answer
    }

    async fn ask(&self, hosts: BTreeMap<HostName, String>) -> Vec<Revocations> {
        let mut calls = JoinSet::new();
        for (host, address) in hosts {
            let client = Client::peer(&address, &host, self.tls.clone())
                .with_timeout(TIMEOUT)
                .with_largest(LARGEST);
            calls.spawn(async move {
                match client.get::<Revocations>(path::REVOCATIONS).await {
                    Ok(told) => Some(told),
                    // An older version, which knows of none.
                    Err(CallError::Refused { status: StatusCode::NOT_FOUND, .. }) => {
                        Some(Revocations::default())
                    }
                    Err(error) => {
                        tracing::debug!(%host, "tells no revocations: {error}");
                        None
                    }
                }
            });
        }
        calls.join_all().await.into_iter().flatten().collect()
    }
}
