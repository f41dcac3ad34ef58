//! The channels for answers to requests, by ticket.

use std::collections::{BTreeMap, HashMap};

use aquifer_api::Problem;
use aquifer_api::order::{Borrowed, Provided, Returned, RotatesKeys};
use aquifer_api::status::Peer;
use aquifer_control::node::{Answer, Contact, Ticket, nobody_lends};
use aquifer_page::{HostName, LeaseId};
use tokio::sync::oneshot::Sender;

use super::command::Stays;
use super::{Driver, Heard, Parts};

/// Requests that wait for an answer.
#[derive(Debug, Default)]
pub(super) struct Replies {
    last: u64,
    waiting: HashMap<Ticket, Reply>,
}

/// The channel for the answer to a request.
#[derive(Debug)]
pub(super) enum Reply {
    /// To a message of this host.
    Heard(HostName, Sender<Heard>),
    Renewed(Sender<Vec<LeaseId>>),
    Borrowed(Sender<Result<Borrowed, Problem>>),
    Provided(Sender<Result<Provided, Problem>>),
    Returned(Sender<Result<Returned, Problem>>),
    Rotates(Sender<Result<RotatesKeys, Problem>>),
    /// To a claim.
    Done(Sender<Result<(), Problem>>),
    /// To the order to leave the cluster.
    Left(Sender<Result<(), Stays>>),
}

impl Replies {
    /// Keeps a channel until its answer comes or its requester is gone.
    pub(super) fn keep(&mut self, reply: Reply) -> Ticket {
        self.waiting.retain(|_, reply| !reply.is_closed());
        self.last += 1;
        self.waiting.insert(Ticket(self.last), reply);
        Ticket(self.last)
    }
}

impl Reply {
    fn is_closed(&self) -> bool {
        match self {
            Self::Heard(_, reply) => reply.is_closed(),
            Self::Renewed(reply) => reply.is_closed(),
            Self::Borrowed(reply) => reply.is_closed(),
            Self::Provided(reply) => reply.is_closed(),
            Self::Returned(reply) => reply.is_closed(),
            Self::Rotates(reply) => reply.is_closed(),
            Self::Done(reply) => reply.is_closed(),
            Self::Left(reply) => reply.is_closed(),
        }
    }
}

impl Driver {
    /// Sends an answer in the words of the API.
    pub(super) fn answer(&mut self, ticket: Ticket, answer: Answer) {
        let Some(reply) = self.replies.waiting.remove(&ticket) else {
            if let Answer::Provided(live) = answer {
                self.parts.borrower.refuse(&live);
            }
            return;
        };
        let Parts { borrower, peers, .. } = &self.parts;
        // The requester may be gone; the failed send does not matter then.
        match (reply, answer) {
            (Reply::Heard(_, reply), Answer::Heard(failed)) => drop(reply.send(Ok(failed))),
            (Reply::Heard(from, reply), Answer::NoPeer) => {
                drop(reply.send(peers.admit(&from).map(|()| None)));
            }
            (Reply::Renewed(reply), Answer::Renewed(lost)) => drop(reply.send(lost)),
            (Reply::Borrowed(reply), Answer::Borrowed(volume)) => {
                drop(reply.send(borrower.borrowed(volume)));
            }
            (Reply::Borrowed(reply), Answer::NobodyLends(wanted)) => {
                let error = nobody_lends(wanted, &contacts(peers.status()));
                drop(reply.send(Err(error)));
            }
            (Reply::Borrowed(reply), Answer::Failed(error)) => {
                drop(reply.send(Err(error)));
            }
            (Reply::Provided(reply), Answer::Provided(live)) => self.provide(live, reply),
            (Reply::Provided(reply), Answer::NobodyLends(wanted)) => {
                let error = nobody_lends(wanted, &contacts(peers.status()));
                drop(reply.send(Err(error)));
            }
            (Reply::Provided(reply), Answer::Failed(error)) => drop(reply.send(Err(error))),
            (Reply::Returned(reply), Answer::Returned(volumes)) => {
                drop(reply.send(Ok(Returned { volumes })));
            }
            (Reply::Returned(reply), Answer::Failed(error)) => {
                drop(reply.send(Err(error)));
            }
            (Reply::Rotates(reply), Answer::Rotates(leases)) => {
                drop(reply.send(Ok(RotatesKeys { leases })));
            }
            (Reply::Rotates(reply), Answer::Failed(error)) => drop(reply.send(Err(error))),
            (Reply::Done(reply), Answer::Claimed | Answer::Permitted) => drop(reply.send(Ok(()))),
            (Reply::Done(reply), Answer::Failed(error)) => {
                drop(reply.send(Err(error)));
            }
            (Reply::Left(reply), Answer::Left) => drop(reply.send(Ok(()))),
            (Reply::Left(reply), Answer::Tied(why)) => {
                drop(reply.send(Err(Stays { why, passes: true })));
            }
            (Reply::Left(reply), Answer::Failed(why)) => {
                drop(reply.send(Err(Stays { why, passes: false })));
            }
            // The node answers each request with its own kind of answer.
            _ => {}
        }
    }
}

/// Converts the latest results of calls to the node's type.
pub(super) fn contacts(peers: Vec<Peer>) -> BTreeMap<HostName, Contact> {
    let contact = |peer: Peer| {
        let Peer { host, refused, error, spare, .. } = peer;
        (host, Contact { refused, error, spare })
    };
    peers.into_iter().map(contact).collect()
}
