//! Requests to the agent as commands for the driver, and the channel that carries them.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use aquifer_api::cluster::Summary;
use aquifer_api::message::{Access, Offer, Permit, Renew};
use aquifer_api::order::{
    Borrow, BorrowFor, Borrowed, Claim, Drain, Draining, Provided, Return, Returned, RotateKeys,
    RotatesKeys, Settle,
};
use aquifer_api::status::Status;
use aquifer_api::{Problem, Threshold};
use aquifer_control::{Message, ledger};
use aquifer_page::{Bytes, HostName, LeaseId, RegionName, VolumeId};
use aquifer_region::process::RegionSpec;
use aquifer_vm::memory::Room;
use tokio::sync::{mpsc, oneshot};

/// The answer to a peer's message: a refusal or, for `mem_len_fin`, why the borrower last failed to
/// leave the lease.
pub type Heard = Result<Option<String>, Problem>;

/// A request to the agent, with the channel for its answer.
#[derive(Debug)]
pub enum Command {
    /// A peer's message; the answer follows once the agent has acted on it.
    Hear {
        /// The peer, as its certificate names it.
        from: HostName,
        /// The message.
        message: Message,
        /// Receives the answer.
        reply: oneshot::Sender<Heard>,
    },
    /// The hosts that the configuration or the cluster names have changed.
    Peers(BTreeSet<HostName>),
    /// A host of the cluster stopped, or answers no host.
    HostDown {
        /// The host.
        host: HostName,
        /// The address of its agent.
        address: SocketAddr,
    },
    /// A host may not be in the cluster any more.
    HostRevoked(HostName),
    /// A host of the cluster is up, and its agent may have started again.
    HostAnew(HostName),
    /// A peer's word that it still needs its leases.
    Renew {
        /// The peer, as its certificate names it.
        from: HostName,
        /// The leases, and how long the peer's I/O waits for this host.
        renew: Renew,
        /// Receives those of the leases that this host does not have.
        reply: oneshot::Sender<Vec<LeaseId>>,
    },
    /// A peer's word that it may move a region to another host, which needs a lease of this one.
    Permit {
        /// The peer, as its certificate names it.
        from: HostName,
        /// The lease and the other host.
        permit: Permit,
        /// Receives the end: the other host may use the lease.
        reply: oneshot::Sender<Result<(), Problem>>,
    },
    /// The word that a region with leases of other hosts may come here.
    Expect {
        /// The region, as the other host describes it.
        memory: Box<RegionSpec>,
        /// Receives the region as this host uses it.
        reply: oneshot::Sender<Result<RegionSpec, Problem>>,
    },
    /// The word that a region that was expected does not come.
    Miss {
        /// The region's volume.
        volume: VolumeId,
    },
    /// The question how much this host would lend.
    Offer {
        /// The peer that asks.
        from: HostName,
        /// The limit of the room for VMs.
        below: Threshold,
        /// Receives the offer, or a refusal if the host is no peer.
        reply: oneshot::Sender<Result<Offer, Problem>>,
    },
    /// An order to drain this host, or the question how far a drain is.
    Drain {
        /// The order; `None` for the question alone.
        order: Option<Drain>,
        /// Whether the VMs are part of it. The next agent then goes on with the drain.
        vms: bool,
        /// Receives the progress. It is an error only if the VMs are part and cannot be listed.
        reply: oneshot::Sender<Result<Draining, Problem>>,
    },
    /// The question how a peer reaches a lease over NVMe.
    Access {
        /// The peer, as its certificate names it.
        from: HostName,
        /// The lease.
        lease: LeaseId,
        /// Receives the access; `None` if the peer has no such lease, or NVMe does not reach it.
        reply: oneshot::Sender<Option<Access>>,
    },
    /// The question for this host's status.
    Status {
        /// Receives the status.
        reply: oneshot::Sender<Status>,
    },
    /// The question for what this host tells other hosts of its memory.
    Summary {
        /// Receives the summary.
        reply: oneshot::Sender<Summary>,
    },
    /// The operator's order to borrow.
    Borrow {
        /// The amount and the swap priority.
        order: Borrow,
        /// Receives the volume once the kernel swaps to it, or the reason for a failure.
        reply: oneshot::Sender<Result<Borrowed, Problem>>,
    },
    /// The question of a region's maker for memory.
    BorrowFor {
        /// The region and its needs.
        order: BorrowFor,
        /// Receives the leases, or the reason for a failure.
        reply: oneshot::Sender<Result<Provided, Problem>>,
    },
    /// The word of a region's maker that the region exists, or will not.
    Settle {
        /// The region's volume.
        order: Settle,
        /// Receives whether this host holds the leases.
        reply: oneshot::Sender<Result<(), Problem>>,
    },
    /// The operator's order to return borrowed memory.
    Return {
        /// The volume, or all volumes.
        order: Return,
        /// Receives the volumes once they are gone, or the reason for a failure.
        reply: oneshot::Sender<Result<Returned, Problem>>,
    },
    /// The operator's order to replace keys of leases.
    RotateKeys {
        /// The lease, or all leases.
        order: RotateKeys,
        /// Receives the leases at once, or the reason for a refusal.
        reply: oneshot::Sender<Result<RotatesKeys, Problem>>,
    },
    /// The claim of a command that is about to give memory to a VM or a region.
    Claim {
        /// The memory.
        order: Claim,
        /// Receives the promise, or the reason against it.
        reply: oneshot::Sender<Result<(), Problem>>,
    },
    /// A peer's word that it is about to move a VM here.
    TakeVm {
        /// The peer.
        from: HostName,
        /// The cache of the VM.
        claim: ledger::Claim,
        /// Up to where this host may use its memory then.
        below: Option<Threshold>,
        /// Receives the promise, or the reason against it.
        reply: oneshot::Sender<Result<(), Problem>>,
    },
    /// The word that a VM does not come, although this host promised its memory.
    LostVm {
        /// The peer that offered it.
        from: HostName,
        /// The VM.
        vm: RegionName,
        /// The reason.
        why: String,
    },
    /// The question whether VMs may start here by themselves.
    AdmitsVms {
        /// Receives the answer: no while this host drains.
        reply: oneshot::Sender<bool>,
    },
    /// The balancer's question by how much VMs may grow.
    Room {
        /// Receives the room; `None` if the ledger counts no VM.
        reply: oneshot::Sender<Option<Room>>,
    },
    /// The balancer's order to recall lent memory, because VMs are to grow by it.
    Reclaim {
        /// The bytes.
        bytes: Bytes,
    },
    /// The operator's order to leave the cluster: this host no longer lends or borrows.
    Leave {
        /// Receives the end, or the reason why the host must stay.
        reply: oneshot::Sender<Result<(), Stays>>,
    },
}

/// Why this host stays in its cluster.
#[derive(Debug)]
pub struct Stays {
    /// What keeps it.
    pub why: Problem,
    /// Whether that may end by itself within moments.
    pub passes: bool,
}

/// The sending end of the driver's command channel.
#[derive(Clone, Debug)]
pub struct Handle(pub(crate) mpsc::Sender<Command>);

impl Handle {
    /// Tells the driver, which does not answer.
    pub(crate) async fn tell(&self, command: Command) {
        // An agent that is stopping decides nothing any more.
        let _ = self.0.send(command).await;
    }

    /// Asks the driver and waits for its answer.
    ///
    /// # Errors
    /// If the agent is stopping.
    pub async fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, Problem> {
        let stopping = || Problem { error: "the agent is stopping".to_owned(), help: None };
        let (reply, answer) = oneshot::channel();
        self.0.send(command(reply)).await.map_err(|_| stopping())?;
        answer.await.map_err(|_| stopping())
    }
}
