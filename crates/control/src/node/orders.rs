//! The operator's orders in progress.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use aquifer_page::{Bytes, HostName, VolumeId};

use super::offers::Waiting;
use super::{Answer, Contact, Node, Output, Problem, Ticket};
use crate::{Cause, Decision, Event, What};

/// Orders in progress: at most one borrowing, any number of returns.
#[derive(Clone, Debug, Default)]
pub(super) struct Orders {
    borrow: Option<Borrowing>,
    returns: Vec<Pending>,
}

/// How long a return waits for the lenders' word that their memory is free. The controller repeats
/// its message to them in any case.
const CONFIRMATION: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
struct Borrowing {
    /// The volume that the order creates, once it is known.
    volume: Option<VolumeId>,
    /// The ordered swap priority, if any.
    priority: Option<u16>,
    ticket: Ticket,
}

#[derive(Clone, Debug)]
struct Pending {
    left: BTreeSet<VolumeId>,
    gone: Vec<VolumeId>,
    /// When the last volume was gone.
    since: Option<Duration>,
    ticket: Ticket,
}

impl Orders {
    /// Learns from a decision how the borrowing ends or goes on.
    pub(super) fn note(&mut self, decision: &Decision) -> Option<Output> {
        match &decision.what {
            What::Activates { volume, cause: Cause::ByHand, .. } => {
                if let Some(borrowing) = &mut self.borrow {
                    borrowing.volume = Some(*volume);
                }
                None
            }
            What::NobodyLends { wanted, cause: Cause::ByHand, .. } => {
                self.end_request(Answer::NobodyLends(*wanted))
            }
            What::Abandons { cause: Some(Cause::ByHand), .. } => self.cancel(),
            What::BorrowRefused { cause: Cause::ByHand, .. } => {
                self.end_request(failed(format!("this host {decision}"), None))
            }
            _ => None,
        }
    }

    /// Explains the end of a borrowing that the operator has taken back.
    fn cancel(&mut self) -> Option<Output> {
        let error =
            "an 'aquifer host return' cancelled this order, and its leases go back".to_owned();
        self.end_request(failed(error, None))
    }

    /// Answers a borrowing that has no volume yet.
    fn end_request(&mut self, answer: Answer) -> Option<Output> {
        let ended = self.borrow.take_if(|borrowing| borrowing.volume.is_none())?;
        Some(Output::Answer(ended.ticket, answer))
    }

    /// Learns that an action has ended, and answers its order.
    pub(super) fn note_event(&mut self, event: &Event, now: Duration) -> Vec<Output> {
        match event {
            Event::Activated { volume } => {
                self.end_borrowing(*volume, Answer::Borrowed(*volume)).into_iter().collect()
            }
            Event::ActivationFailed { volume, why } => {
                // A return that waits for this volume has nothing more to wait for.
                self.returned(*volume, now);
                self.end_borrowing(*volume, failed(why.clone(), None)).into_iter().collect()
            }
            Event::Deactivated { volume } => {
                self.returned(*volume, now);
                Vec::new()
            }
            Event::DeactivationFailed { volume, why } => self.not_returned(*volume, why),
            _ => Vec::new(),
        }
    }

    /// Returns the ordered swap priority of this volume, if any.
    pub(super) fn priority_of(&self, volume: VolumeId) -> Option<u16> {
        self.borrow.as_ref().filter(|borrowing| borrowing.volume == Some(volume))?.priority
    }

    /// Returns whether an order to borrow is in progress.
    pub(super) fn is_borrowing(&self) -> bool {
        self.borrow.is_some()
    }

    fn end_borrowing(&mut self, volume: VolumeId, answer: Answer) -> Option<Output> {
        let ended = self.borrow.take_if(|borrowing| borrowing.volume == Some(volume))?;
        Some(Output::Answer(ended.ticket, answer))
    }

    fn returned(&mut self, volume: VolumeId, now: Duration) {
        for pending in &mut self.returns {
            if pending.left.remove(&volume) {
                pending.gone.push(volume);
            }
            if pending.left.is_empty() {
                pending.since.get_or_insert(now);
            }
        }
    }

    /// Answers returns without remaining volumes, once lenders have confirmed or [`CONFIRMATION`]
    /// is over.
    pub(super) fn conclude(&mut self, confirmed: bool, now: Duration) -> Vec<Output> {
        let over = |pending: &mut Pending| {
            let waited = pending.since.map(|since| now.saturating_sub(since));
            waited.is_some_and(|waited| confirmed || waited > CONFIRMATION)
        };
        let done = self.returns.extract_if(.., over);
        done.map(|done| Output::Answer(done.ticket, Answer::Returned(done.gone))).collect()
    }

    fn not_returned(&mut self, volume: VolumeId, why: &str) -> Vec<Output> {
        let help = "the volume stays in use; return it when there is more free memory";
        let failures = self.returns.extract_if(.., |pending| pending.left.contains(&volume));
        failures
            .map(|pending| Output::Answer(pending.ticket, failed(why.to_owned(), Some(help))))
            .collect()
    }
}

pub(super) fn failed(error: String, help: Option<&str>) -> Answer {
    Answer::Failed(Problem { error, help: help.map(str::to_owned) })
}

/// Explains for each peer why it does not lend `wanted`, as the answer to
/// [`Answer::NobodyLends`].
pub fn nobody_lends(wanted: Bytes, peers: &BTreeMap<HostName, Contact>) -> Problem {
    let why = |(host, peer): (&HostName, &Contact)| match (&peer.error, peer.spare) {
        (Some(error), _) if peer.refused => format!("{host} refuses ({error})"),
        (Some(error), None) => format!("{host} does not answer ({error})"),
        (Some(error), Some(_)) => error.clone(),
        (None, Some(spare)) => format!("{host} has {spare} to spare"),
        (None, None) => format!("{host} has not answered yet"),
    };
    let mut reasons: Vec<_> = peers.iter().map(why).collect();
    // All peers may give the same reason.
    reasons.dedup();
    let help = if peers.is_empty() {
        reasons.push("this host has no peers".to_owned());
        "join it to a cluster with 'aquifer cluster join', or add a [[peer]] for each other host \
         to the configuration"
    } else if peers.values().all(|peer| peer.error.is_some()) {
        "'aquifer status' shows all peers, and when each was last heard from"
    } else {
        "hosts lend in extents of 64MiB; 'aquifer status' shows all peers"
    };
    let error = format!("no host lends {wanted}: {}", reasons.join(", "));
    Problem { error, help: Some(help.to_owned()) }
}

impl Node {
    pub(super) fn borrow(&mut self, bytes: Bytes, priority: Option<u16>, ticket: Ticket) {
        if self.has_left {
            return self.answer(ticket, failed("this host leaves its cluster".to_owned(), None));
        }
        if self.orders.is_borrowing() {
            let error = "another 'aquifer host borrow' is in progress".to_owned();
            return self.answer(ticket, failed(error, Some("wait for it to end")));
        }
        self.orders.borrow = Some(Borrowing { volume: None, priority, ticket });
        self.with_offers(Waiting::Borrow(bytes));
    }

    pub(super) fn give_back(&mut self, which: Option<VolumeId>, ticket: Ticket) {
        let volumes = self.controller.volumes().into_iter();
        let swap = volumes.filter(|volume| volume.owner.is_swap());
        let volumes: BTreeSet<_> = swap.map(|volume| volume.volume).collect();
        let left = match which {
            None => volumes,
            Some(volume) if volumes.contains(&volume) => BTreeSet::from([volume]),
            Some(volume) => {
                let error = format!("this host has no volume {volume}");
                let help = "'aquifer status' lists the volumes";
                return self.answer(ticket, failed(error, Some(help)));
            }
        };
        if which.is_none() {
            // A return of everything also cancels borrowings that wait for offers.
            self.offers.cancel_borrowing();
        }
        let nothing = left.is_empty();
        if !nothing {
            self.orders.returns.push(Pending { left, gone: Vec::new(), since: None, ticket });
        }
        self.step(Event::Return { volume: which });
        if nothing {
            self.answer(ticket, Answer::Returned(Vec::new()));
        }
        if which.is_none() {
            self.outputs.extend(self.orders.cancel());
        }
    }
}
