//! How this host leaves its cluster.

use std::sync::Arc;

use aquifer_api::order::{Departed, Leave};
use aquifer_api::{Done, Problem, path};
use tokio::sync::Notify;

use super::gossip::Gossip;
use crate::driver::{Command, Handle};
use crate::peers::Peers;

/// This host's way out of its cluster.
#[derive(Clone, Debug)]
pub(crate) struct Leaving {
    peers: Peers,
    gossip: Option<Gossip>,
    agent: Handle,
    left: Arc<Notify>,
}

impl Leaving {
    pub(crate) fn new(peers: Peers, gossip: Option<Gossip>, agent: Handle) -> Self {
        Self { peers, gossip, agent, left: Arc::default() }
    }

    /// Leaves, if no page of this host is elsewhere and no page of others is here. Tells the
    /// signers and all other hosts that this one leaves for good. The agent then ends.
    pub(crate) async fn leave(&self, _: Leave) -> Result<Departed, Problem> {
        let Some(gossip) = &self.gossip else {
            return Err(Problem {
                error: "this host belongs to no cluster that it could leave".to_owned(),
                help: Some(
                    "'aquifer cluster init' made its certificate: stop the agent, and remove the \
                     directory 'tls' of its configuration"
                        .to_owned(),
                ),
            });
        };
        let others = self.peers.status();
        if gossip.admits() && !others.is_empty() {
            return Err(Problem {
                error: "this is the only host that can admit others to the cluster".to_owned(),
                help: Some("let the other hosts leave first".to_owned()),
            });
        }
        self.agent.ask(|reply| Command::Leave { reply }).await??;
        let (mut told, mut untold) = (false, None);
        for signer in others.into_iter().filter(|peer| peer.admits) {
            match self.peers.ask::<Done>(&signer.host, path::LEFT, &Leave {}).await {
                Ok(Done {}) => told = true,
                Err(problem) => untold = Some(problem.error),
            }
        }
        gossip.leave(true).await;
        tracing::info!("this host has left the cluster");
        self.left.notify_one();
        let none = || "no host that admits others is up".to_owned();
        let name_taken = (!told && !gossip.admits()).then(|| untold.unwrap_or_else(none));
        Ok(Departed { name_taken })
    }

    /// Waits until this host has left.
    pub(crate) async fn wait(&self) {
        self.left.notified().await;
    }
}
