use aquifer_api::Problem;
use aquifer_api::message::{Access, Offer, Renew};
use aquifer_api::order::{Borrow, Borrowed, Drain, Draining, Return, Returned};
use aquifer_api::status::Status;
use aquifer_control::Message;
use aquifer_page::{HostName, LeaseId};
use tokio::sync::{mpsc, oneshot};

/// The answer to a peer's message: a refusal, or, to `mem_len_fin`, why the last try to leave the lease failed.
pub type Heard = Result<Option<String>, Problem>;

/// What a request to the agent becomes; each carries the way back to who asked.
#[derive(Debug)]
pub enum Command {
    /// A peer's message. Answered when it has been acted on.
    Hear {
        /// The peer, as its certificate names it.
        from: HostName,
        /// The message.
        message: Message,
        /// Told that.
        reply: oneshot::Sender<Heard>,
    },
    /// A peer still needs its leases.
    Renew {
        /// The peer.
        from: HostName,
        /// Which.
        renew: Renew,
        /// Told, when that is noted, which of them are not here.
        reply: oneshot::Sender<Vec<LeaseId>>,
    },
    /// What this host would lend.
    Offer {
        /// The peer that asks.
        from: HostName,
        /// Told that; refused where the host is no peer.
        reply: oneshot::Sender<Result<Offer, Problem>>,
    },
    /// The operator wants back what was lent, or asks how far that is.
    Drain {
        /// The order; nothing for the question alone.
        order: Option<Drain>,
        /// Told how far it is.
        reply: oneshot::Sender<Draining>,
    },
    /// How a peer gets at a lease over NVMe.
    Access {
        /// The peer.
        from: HostName,
        /// Which.
        lease: LeaseId,
        /// Told that; nothing where the lease is not the peer's.
        reply: oneshot::Sender<Option<Access>>,
    },
    /// Everything about this host.
    Status {
        /// Told that.
        reply: oneshot::Sender<Status>,
    },
    /// The operator borrows.
    Borrow {
        /// How much.
        order: Borrow,
        /// Told when the memory is swapped on.
        reply: oneshot::Sender<Result<Borrowed, Problem>>,
    },
    /// The operator gives back.
    Return {
        /// What.
        order: Return,
        /// Told when it is gone.
        reply: oneshot::Sender<Result<Returned, Problem>>,
    },
}

/// The way to the driver.
#[derive(Clone, Debug)]
pub struct Handle(pub(crate) mpsc::Sender<Command>);

impl Handle {
    /// Asks the driver and waits for its answer.
    ///
    /// # Errors
    /// The agent is stopping.
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
