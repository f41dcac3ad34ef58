//! Peers' messages and renewals.

use aquifer_page::{HostName, LeaseId};

use super::offers::Waiting;
use super::{Answer, Node, Ticket, Work};
use crate::{Event, Message};

impl Node {
    /// Takes in a peer's message. A recall waits for offers, so that this host knows where to move
    /// the pages.
    pub(super) fn hear(&mut self, from: HostName, message: Message, ticket: Ticket) {
        if !self.may_say(&from, &message) {
            return self.answer(ticket, Answer::NoPeer);
        }
        match message {
            Message::MemLenFin { .. } => self.with_offers(Waiting::Hear(from, message, ticket)),
            message => self.take_in(from, message, ticket),
        }
    }

    /// Passes a message to the controller. The answer to a `mem_bor_fin` waits until the memory is
    /// free, so that both hosts agree that the lease is returned.
    pub(super) fn take_in(&mut self, from: HostName, message: Message, ticket: Ticket) {
        let failure = match message {
            Message::MemLenFin { lease, .. } => self.borrowing.failures.get(&lease).cloned(),
            _ => None,
        };
        let fin = match message {
            Message::MemBorFin { lease, .. } if self.lent_to(&from).contains(&lease) => Some(lease),
            _ => None,
        };
        if self.is_asked_for_a_moved_lease(&message) {
            // The renewal tells the lender that the lease is here now.
            self.borrowing.renewed = None;
        }
        self.step(Event::Received { from, message });
        match fin {
            Some(lease) if self.work.contains(&Work::Lease(lease)) => {
                self.lending.fins.entry(lease).or_default().push(ticket);
            }
            _ => self.answer(ticket, Answer::Heard(failure)),
        }
    }

    /// Returns whether the message asks for a lease that has come here with its region.
    fn is_asked_for_a_moved_lease(&self, message: &Message) -> bool {
        let (Message::MemBorAck { lease, .. } | Message::MemLenFin { lease, .. }) = message else {
            return false;
        };
        let borrowed = self.controller.borrowed();
        borrowed.iter().any(|held| held.lease.lease == *lease && held.lease.generation > 0)
    }

    /// Tells whether a host may send this message. A former peer may still settle leases between
    /// the two hosts.
    fn may_say(&self, from: &HostName, message: &Message) -> bool {
        let holds = |lease| {
            let borrowed = self.controller.borrowed();
            borrowed.iter().any(|held| held.lease.lease == lease && held.lease.lender == *from)
        };
        self.settings.peers.contains(from)
            || match message {
                Message::MemBorFin { lease, .. } => self.lent_to(from).contains(lease),
                Message::MemBorAck { lease, .. } | Message::MemLenFin { lease, .. } => {
                    holds(*lease)
                }
                Message::MemBorReq { .. } | Message::MemBorRej { .. } => false,
            }
    }

    /// Notes that a borrower lives; returns those of its leases that this host does not have.
    pub(super) fn renewal(
        &mut self,
        from: &HostName,
        leases: Vec<LeaseId>,
        io_timeout_ms: Option<u64>,
    ) -> Vec<LeaseId> {
        if let Some(io_timeout) = io_timeout_ms {
            self.lending.io_timeout_ms.insert(from.clone(), io_timeout);
        }
        let lent = self.lent_to(from);
        let (here, others): (Vec<_>, Vec<_>) =
            leases.into_iter().partition(|lease| lent.contains(lease));
        here.into_iter().for_each(|lease| self.saw(lease));
        // What has moved to another host is not lost.
        let moved = self.moved_from(from);
        others.into_iter().filter(|lease| !moved.contains(lease)).collect()
    }

    pub(super) fn saw(&mut self, lease: LeaseId) {
        self.lending.signs.insert(lease, self.now);
        self.lending.missed.remove(&lease);
        self.step(Event::BorrowerSeen { lease });
    }
}
