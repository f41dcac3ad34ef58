//! How this host leaves its cluster.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_api::order::{Departed, Leave};
use aquifer_api::status::Peer;
use aquifer_api::{Done, Problem, path};
use tokio::sync::Notify;
use tokio::task::JoinError;

use super::gossip::Gossip;
use super::{ClusterDir, ClusterError};
use crate::driver::{Command, Handle, Stays};
use crate::peers::Peers;
use crate::vms::Vms;

/// How long the order waits for memory that this host is about to borrow or to return.
const SETTLING: Duration = Duration::from_secs(10);

/// The interval between two attempts in that time.
const PACE: Duration = Duration::from_millis(250);

/// This host's way out of its cluster.
#[derive(Clone, Debug)]
pub(crate) struct Leaving {
    peers: Peers,
    gossip: Option<Gossip>,
    agent: Handle,
    dir: ClusterDir,
    vms: Vms,
    left: Arc<Notify>,
}

impl Leaving {
    pub(crate) fn new(
        dir: ClusterDir,
        peers: Peers,
        gossip: Option<Gossip>,
        agent: Handle,
        vms: Vms,
    ) -> Self {
        Self { peers, gossip, agent, dir, vms, left: Arc::default() }
    }

    /// Leaves, if no page of this host or of its VMs is elsewhere, and none of others is here.
    /// Tells the signers and all other hosts that this one leaves for good. The agent then ends.
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
        let deadline = Instant::now() + SETTLING;
        loop {
            let others = self.peers.status();
            self.check_signer(gossip, &others)?;
            self.check_vms().await?;
            let (here, with) = (self.clone(), gossip.clone());
            // It ends also if the caller hangs up: half left, the host would be of no use.
            let departed = tokio::spawn(async move { here.depart(&with, others).await }).await;
            let ended = |error: JoinError| {
                let why = Problem { error: error.to_string(), help: None };
                Err(Stays { why, passes: false })
            };
            match departed.unwrap_or_else(ended) {
                Err(Stays { passes: true, .. }) if Instant::now() < deadline => {
                    tokio::time::sleep(PACE).await;
                }
                other => return other.map_err(|stays| stays.why),
            }
        }
    }

    /// Leaves if nothing prevents it now.
    async fn depart(&self, gossip: &Gossip, others: Vec<Peer>) -> Result<Departed, Stays> {
        let left = self.agent.ask(|reply| Command::Leave { reply }).await;
        left.map_err(|why| Stays { why, passes: false })??;
        let (mut told, mut untold) = (false, None);
        for signer in others.into_iter().filter(|peer| peer.admits) {
            match self.peers.ask::<Done>(&signer.host, path::LEFT, &Leave {}).await {
                Ok(Done {}) => told = true,
                Err(error) => untold = Some(Problem::from(error).error),
            }
        }
        gossip.leave(true).await;
        tracing::info!("this host has left the cluster");
        self.left.notify_one();
        let none = || "no host that admits others is up".to_owned();
        let name_taken = (!told && !gossip.admits()).then(|| untold.unwrap_or_else(none));
        Ok(Departed { name_taken })
    }

    /// Refuses to leave while VMs have memory at lenders: this host's certificate reaches it.
    async fn check_vms(&self) -> Result<(), Problem> {
        let vms = self.vms.clone();
        let leased = tokio::task::spawn_blocking(move || vms.with_leases()).await;
        let leased = leased.map_err(|error| Problem { error: error.to_string(), help: None })??;
        if leased.is_empty() {
            return Ok(());
        }
        let names = leased.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        Err(Problem {
            error: format!("this host has VMs with memory at lenders: {names}"),
            help: Some(
                "move them away with 'aquifer host drain', or stop each with 'aquifer vm stop NAME'"
                    .to_owned(),
            ),
        })
    }

    /// Refuses to leave with the authority while hosts are in the cluster.
    fn check_signer(&self, gossip: &Gossip, others: &[Peer]) -> Result<(), Problem> {
        let failed = |error: ClusterError| Problem { error: error.to_string(), help: None };
        let mut hosts: BTreeSet<_> = self.dir.admitted().map_err(failed)?.into_iter().collect();
        hosts.extend(others.iter().map(|peer| peer.host.clone()));
        let left = hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        if !gossip.admits() || hosts.is_empty() {
            return Ok(());
        }
        Err(Problem {
            error: format!("this is the only host that can admit others, and {left} have joined"),
            help: Some(
                "let them leave first; for a host that is gone, run 'aquifer cluster forget NAME'"
                    .to_owned(),
            ),
        })
    }

    /// Waits until this host has left.
    pub(crate) async fn wait(&self) {
        self.left.notified().await;
    }
}
