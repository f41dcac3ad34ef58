//! The operator's orders in progress.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use aquifer_api::order::{Borrow, Borrowed, Return, Returned};
use aquifer_api::{Problem, status};
use aquifer_control::{Cause, Decision, Event, What};
use aquifer_page::{Bytes, VolumeId};
use tokio::sync::oneshot;

use super::{Driver, Waiting};
use crate::borrower::Borrower;
use crate::peers::Peers;

/// Orders in progress: at most one borrowing, any number of returns.
#[derive(Debug, Default)]
pub(super) struct Orders {
    borrow: Option<Borrowing>,
    returns: Vec<Pending>,
}

/// How long a return waits for the lenders' word that their memory is free. The controller repeats
/// its message to them in any case.
const CONFIRMATION: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Borrowing {
    /// The volume that the order creates, once it is known.
    volume: Option<VolumeId>,
    /// The ordered swap priority, if any.
    priority: Option<u16>,
    reply: Reply<Borrowed>,
}

#[derive(Debug)]
struct Pending {
    left: BTreeSet<VolumeId>,
    gone: Vec<VolumeId>,
    /// When the last volume was gone.
    since: Option<Instant>,
    reply: Reply<Returned>,
}

/// The channel back to the order's sender.
type Reply<T> = oneshot::Sender<Result<T, Problem>>;

impl Orders {
    /// Learns from a decision how the borrowing ends or goes on.
    pub(super) fn note(&mut self, decision: &Decision, peers: &Peers) {
        match &decision.what {
            What::Activates { volume, cause: Cause::ByHand, .. } => {
                if let Some(borrowing) = &mut self.borrow {
                    borrowing.volume = Some(*volume);
                }
            }
            What::NobodyLends { wanted, cause: Cause::ByHand, .. } => {
                self.refuse_borrow(nobody_lends(*wanted, &peers.status()));
            }
            What::Abandons { cause: Some(Cause::ByHand), .. } => self.refuse_borrow(given_back()),
            What::BorrowRefused { .. } => {
                let error = format!("this host {decision}");
                self.refuse_borrow(Problem { error, help: None });
            }
            _ => {}
        }
    }

    fn refuse_borrow(&mut self, problem: Problem) {
        if let Some(borrowing) = self.borrow.take_if(|borrowing| borrowing.volume.is_none()) {
            let _ = borrowing.reply.send(Err(problem));
        }
    }

    /// Learns that an action has ended, and answers its order.
    pub(super) fn note_event(&mut self, event: &Event, borrower: &Borrower) {
        match event {
            Event::Activated { volume } => self.answer_borrow(*volume, borrower.borrowed(*volume)),
            Event::ActivationFailed { volume, why } => {
                self.answer_borrow(*volume, Err(Problem { error: why.clone(), help: None }));
            }
            Event::Deactivated { volume } => self.returned(*volume),
            Event::DeactivationFailed { volume, why } => self.not_returned(*volume, why),
            _ => {}
        }
    }

    /// Returns the ordered swap priority of this volume, if any.
    pub(super) fn priority_of(&self, volume: VolumeId) -> Option<u16> {
        self.borrow.as_ref().filter(|borrowing| borrowing.volume == Some(volume))?.priority
    }

    fn answer_borrow(&mut self, volume: VolumeId, answer: Result<Borrowed, Problem>) {
        if let Some(borrowing) = self.borrow.take_if(|borrowing| borrowing.volume == Some(volume)) {
            let _ = borrowing.reply.send(answer);
        }
    }

    fn returned(&mut self, volume: VolumeId) {
        for pending in &mut self.returns {
            if pending.left.remove(&volume) {
                pending.gone.push(volume);
            }
            if pending.left.is_empty() {
                pending.since.get_or_insert_with(Instant::now);
            }
        }
    }

    /// Answers returns without remaining volumes, once lenders have confirmed or [`CONFIRMATION`]
    /// is over.
    pub(super) fn conclude(&mut self, confirmed: bool) {
        let over = |p: &mut Pending| {
            p.since.is_some_and(|since| confirmed || since.elapsed() > CONFIRMATION)
        };
        for done in self.returns.extract_if(.., over) {
            let _ = done.reply.send(Ok(Returned { volumes: done.gone }));
        }
    }

    fn not_returned(&mut self, volume: VolumeId, why: &str) {
        for failed in self.returns.extract_if(.., |pending| pending.left.contains(&volume)) {
            let help = Some(
                "the volume stays in use; return it when there is more free memory".to_owned(),
            );
            let _ = failed.reply.send(Err(Problem { error: why.to_owned(), help }));
        }
    }
}

/// Explains the end of a borrowing that the operator has taken back.
fn given_back() -> Problem {
    let error = "an 'aquifer host return' cancelled this order, and its leases go back".to_owned();
    Problem { error, help: None }
}

/// Explains for each peer why it does not lend.
fn nobody_lends(wanted: Bytes, peers: &[status::Peer]) -> Problem {
    let why = |peer: &status::Peer| match (&peer.error, peer.spare) {
        (Some(error), _) if peer.refused => format!("{} refuses ({error})", peer.host),
        (Some(error), None) => format!("{} does not answer ({error})", peer.host),
        (Some(error), Some(_)) => error.clone(),
        (None, Some(spare)) => format!("{} has {spare} to spare", peer.host),
        (None, None) => format!("{} has not answered yet", peer.host),
    };
    let mut reasons: Vec<_> = peers.iter().map(why).collect();
    // All peers may give the same reason.
    reasons.dedup();
    let help = if peers.is_empty() {
        reasons.push("this host has no peers".to_owned());
        "add a [[peer]] with its name and address for each other host to the configuration"
    } else if peers.iter().all(|peer| peer.error.is_some()) {
        "'aquifer status' shows all peers, and when each was last heard from"
    } else {
        "hosts lend in extents of 64MiB; 'aquifer status' shows all peers"
    };
    let reasons = reasons.join(", ");
    Problem { error: format!("no host lends {wanted}: {reasons}"), help: Some(help.to_owned()) }
}

impl Driver {
    pub(super) fn order_borrow(&mut self, order: &Borrow, reply: Reply<Borrowed>) {
        if self.orders.borrow.is_some() {
            let error = "another 'aquifer host borrow' is in progress".to_owned();
            let _ = reply.send(Err(Problem { error, help: Some("wait for it to end".to_owned()) }));
            return;
        }
        self.orders.borrow = Some(Borrowing { volume: None, priority: order.priority, reply });
        self.waiting.push(Waiting::Borrow(order.bytes));
        self.ask_offers();
    }

    pub(super) fn order_return(&mut self, order: &Return, reply: Reply<Returned>) {
        let volumes: BTreeSet<_> =
            self.controller.volumes().iter().map(|volume| volume.volume).collect();
        let left = match order.volume {
            None => volumes,
            Some(volume) if volumes.contains(&volume) => BTreeSet::from([volume]),
            Some(volume) => {
                let error = format!("this host has no volume {volume}");
                let help = Some("'aquifer status' lists the volumes".to_owned());
                let _ = reply.send(Err(Problem { error, help }));
                return;
            }
        };
        if order.volume.is_none() {
            // A return of everything also cancels borrowings that wait for offers.
            self.waiting.retain(|waiting| !matches!(waiting, Waiting::Borrow(_)));
        }
        if !left.is_empty() {
            self.orders.returns.push(Pending { left, gone: Vec::new(), since: None, reply });
            self.step(Event::Return { volume: order.volume });
        } else {
            self.step(Event::Return { volume: order.volume });
            let _ = reply.send(Ok(Returned { volumes: Vec::new() }));
        }
        if order.volume.is_none() {
            self.orders.refuse_borrow(given_back());
        }
    }
}
