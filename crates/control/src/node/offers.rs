//! When the node asks peers for offers, and the input that waits for them.

use std::collections::BTreeMap;

use aquifer_page::{Bytes, HostName, LeaseId};

use super::{Node, Output, Ticket};
use crate::{Event, Message, Offer, RegionRequest, Role};

/// The node asks peers for offers once M_u exceeds this share of T_upper x M_t. The answers are
/// then there when needed, and an idle host asks no peer.
const ASK_EARLY: f64 = 0.9;

/// Offers on their way, and the input that waits for them.
#[derive(Clone, Debug, Default)]
pub(super) struct Offers {
    /// Whether the period's step waits for peers' offers.
    asking: bool,
    waiting: Vec<Waiting>,
}

/// Input that the controller handles well only with peers' offers.
#[derive(Clone, Debug)]
pub(super) enum Waiting {
    /// A lender recalls a lease.
    Hear(HostName, Message, Ticket),
    /// The operator borrows.
    Borrow(Bytes),
    /// A region needs memory.
    BorrowFor(RegionRequest),
    /// A lease needs a second copy of so many bytes.
    Protect(LeaseId, Bytes),
    /// A lease of so many bytes is left, as its lender is gone.
    Abandon(LeaseId, Bytes),
    /// A lease of so many bytes is to be replaced, so that its pages get another key.
    Rotate(LeaseId, Bytes),
    /// A former peer holds pages of regions.
    Part(HostName),
}

impl Offers {
    /// Forgets the orders to borrow that wait for offers.
    pub(super) fn cancel_borrowing(&mut self) {
        self.waiting.retain(|waiting| !matches!(waiting, Waiting::Borrow(_)));
    }

    /// Returns the bytes for regions that wait for offers.
    pub(super) fn requested(&self) -> Bytes {
        let bytes = self.waiting.iter().map(|waiting| match waiting {
            Waiting::BorrowFor(request) => request.bytes,
            Waiting::Protect(_, bytes) | Waiting::Abandon(_, bytes) | Waiting::Rotate(_, bytes) => {
                *bytes
            }
            Waiting::Hear(..) | Waiting::Borrow(_) | Waiting::Part(_) => Bytes::ZERO,
        });
        bytes.fold(Bytes::ZERO, Bytes::saturating_add)
    }
}

impl Node {
    pub(super) fn wants_offers(&self) -> bool {
        let config = &self.controller.facts().config;
        let near = self.own.memory.total.scaled(config.upper * ASK_EARLY);
        let short = self.own.memory.used > near || self.own.memory.pressure;
        let may_borrow = config.borrows && self.controller.role() != Role::Lender;
        (short && may_borrow)
            || self.controller.borrowed().iter().any(|lease| lease.leaving)
            || self.controller.requested() > Bytes::ZERO
            || !self.offers.waiting.is_empty()
    }

    /// Handles this input after the answers of the peers, all of which it asks now.
    pub(super) fn with_offers(&mut self, waiting: Waiting) {
        self.offers.waiting.push(waiting);
        self.ask_offers();
    }

    /// Asks all peers for offers; the period's step follows their answers.
    pub(super) fn ask_offers(&mut self) {
        if !std::mem::replace(&mut self.offers.asking, true) {
            self.outputs.push(Output::AskOffers);
        }
    }

    pub(super) fn offered(&mut self, lenders: Vec<Offer>, stored: BTreeMap<LeaseId, Bytes>) {
        self.offers.asking = false;
        self.note_zones(&lenders);
        self.step_period(lenders, stored);
    }

    pub(super) fn step_period(&mut self, lenders: Vec<Offer>, stored: BTreeMap<LeaseId, Bytes>) {
        self.step(Event::Tick { memory: self.own.memory, stored, lenders });
        for waiting in std::mem::take(&mut self.offers.waiting) {
            match waiting {
                Waiting::Hear(from, message, ticket) => self.take_in(from, message, ticket),
                Waiting::BorrowFor(request) => self.step(Event::BorrowFor(request)),
                Waiting::Part(host) => self.step(Event::Part { host }),
                Waiting::Protect(lease, _) => self.protect(lease),
                Waiting::Abandon(lease, _) => self.step(Event::Abandon { lease }),
                Waiting::Rotate(lease, _) => self.rotate(lease),
                Waiting::Borrow(bytes) => {
                    let group = self.controller.facts().config.group.clone();
                    self.step(Event::Borrow { bytes, group });
                }
            }
        }
    }
}
