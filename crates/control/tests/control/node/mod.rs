//! Tests of the node: one host's decisions around the controller, driven by sequences of inputs.

mod arrivals;
mod caches;
mod claims;
mod copies;
mod drain;
mod keys;
mod leave;
mod ledger;
mod messages;
mod moves;
mod orders;
mod period;
mod random;
mod reclaim;
mod regions;
mod swap_copies;

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_control::node::{
    Answer, EventKind, Input, KeySettings, Node, Output, Readings, Said, Settings, Ticket, Work,
};
use aquifer_control::{Action, Config, Controller, Event, Memory, Message, Offer, Restored};
use aquifer_page::{Bytes, LeaseId, VolumeId};

use crate::host::{TOTAL, ack, name, req};

/// A node named `me` with a clock, and the outputs of its last input. Its peers are `b` and `c`.
struct Shell {
    node: Node,
    now: Duration,
    outputs: Vec<Output>,
    tickets: u64,
}

const LEASE: LeaseId = LeaseId(1);

impl Shell {
    fn new() -> Self {
        Self::of(Restored::default())
    }

    fn of(found: Restored) -> Self {
        Self::with(found, crate::host::config())
    }

    fn with(found: Restored, config: Config) -> Self {
        Self::that_moves(found, config, Some(Duration::from_secs(300)))
    }

    /// Makes a node whose VMs move after this much overload.
    fn that_moves(found: Restored, config: Config, move_after: Option<Duration>) -> Self {
        Self::that_rotates(found, config, move_after, KeySettings::default())
    }

    /// Makes a node that also replaces keys.
    fn that_rotates(
        found: Restored,
        config: Config,
        move_after: Option<Duration>,
        keys: KeySettings,
    ) -> Self {
        let config = Config { grace: Duration::from_secs(80), ..config };
        let controller = Controller::restore(name("me"), config, 1000, Duration::ZERO, found);
        let peers = ["b", "c"].map(name).into();
        let period = Duration::from_secs(1);
        let source = "host".to_owned();
        let settings = Settings { period, source, peers, move_after, keys };
        let node = Node::new(controller, settings);
        Self { node, now: Duration::from_secs(1), outputs: Vec::new(), tickets: 0 }
    }

    fn input(&mut self, input: Input) -> &mut Self {
        self.outputs = self.node.handle(self.now, input);
        self
    }

    fn after(&mut self, seconds: u64) -> &mut Self {
        self.now += Duration::from_secs(seconds);
        self
    }

    /// Lets a period end a second later: M_u in percent of M_t.
    fn period(&mut self, used: u64) -> &mut Self {
        self.after(1).read(Readings { memory: memory(used), ..Readings::default() })
    }

    fn read(&mut self, readings: Readings) -> &mut Self {
        self.input(Input::Period(readings))
    }

    /// Answers the question for offers: peers with their spare memory in GiB.
    fn offers(&mut self, lenders: &[(&str, u64)]) -> &mut Self {
        let offer = |(host, gib): &(&str, u64)| Offer::new(name(host), Bytes::gib(*gib));
        let lenders = lenders.iter().map(offer).collect();
        self.input(Input::Offers { lenders, stored: BTreeMap::new() })
    }

    fn ticket(&mut self) -> Ticket {
        self.tickets += 1;
        Ticket(self.tickets)
    }

    fn hear(&mut self, from: &str, message: Message) -> &mut Self {
        let ticket = self.ticket();
        self.input(Input::Heard { from: name(from), message, ticket })
    }

    fn borrow(&mut self, gib: u64) -> &mut Self {
        let ticket = self.ticket();
        self.input(Input::Borrow { bytes: Bytes::gib(gib), priority: Some(7), ticket })
    }

    /// Asks for 1 GiB for the region `items`, with volume 5.
    fn borrow_for(&mut self) -> &mut Self {
        let ticket = self.ticket();
        self.input(Input::BorrowFor { request: crate::host::for_region(5, Bytes::gib(1)), ticket })
    }

    fn give_back(&mut self, volume: Option<VolumeId>) -> &mut Self {
        let ticket = self.ticket();
        self.input(Input::Return { volume, ticket })
    }

    fn drain(&mut self, on: bool) -> &mut Self {
        self.input(Input::Drain { on, stored: Bytes::mib(64), vms: false })
    }

    fn leave(&mut self) -> &mut Self {
        let ticket = self.ticket();
        self.input(Input::Leave { ticket })
    }

    fn done(&mut self, work: Work, event: Event) -> &mut Self {
        self.input(Input::Done { work, event: Some(event) })
    }

    fn freed(&mut self, lease: LeaseId) -> &mut Self {
        self.done(Work::Lease(lease), Event::LeaseFreed { lease })
    }

    fn said(&mut self, to: &str, message: Message, end: Said) -> &mut Self {
        self.input(Input::Said { to: name(to), message, end })
    }

    /// Lends 1 GiB to `borrower`, which holds it. Returns the lease.
    fn lend(&mut self, borrower: &str, request: u128) -> LeaseId {
        self.period(20).hear(borrower, req(request, Bytes::gib(1)));
        let lease = match self.begun()[..] {
            [Action::OpenLease(ref lent)] => lent.lease,
            ref other => panic!("one lease to open was expected, not {other:?}"),
        };
        let uris = vec!["here".to_owned()];
        self.done(Work::Lease(lease), Event::LeaseOpened { lease, uris });
        let (_, message) = self.sent().pop().expect("one ack");
        self.said(borrower, message, Said::Taken(None));
        lease
    }

    /// Borrows 1 GiB from `b` as [`LEASE`] by the operator's order. Returns the volume.
    fn swap(&mut self) -> VolumeId {
        self.period(20).borrow(1);
        let volume = self.offers(&[("b", 4)]).granted();
        self.done(Work::Volume(volume), Event::Activated { volume });
        volume
    }

    /// Lets `b` grant the request just sent as [`LEASE`]. Returns the volume that the node makes.
    fn granted(&mut self) -> VolumeId {
        let (to, request) = self.sent().pop().expect("one request");
        let Message::MemBorReq { request: id, bytes, .. } = request else {
            panic!("a mem_bor_req was expected, not {request:?}");
        };
        self.said(&to, request, Said::Taken(None)).hear("b", ack(id, LEASE.0, bytes));
        match &self.begun()[..] {
            [Action::Activate(live)] => live.volume,
            other => panic!("one volume to activate was expected, not {other:?}"),
        }
    }

    fn begun(&self) -> Vec<Action> {
        let begun = self.outputs.iter().filter_map(|output| match output {
            Output::Begin(_, action) => Some(action.clone()),
            _ => None,
        });
        begun.collect()
    }

    /// Returns the messages just sent.
    fn sent(&self) -> Vec<(String, Message)> {
        let sent = self.begun().into_iter().filter_map(|action| match action {
            Action::Send { to, message } => Some((to.to_string(), message)),
            _ => None,
        });
        sent.collect()
    }

    fn answers(&self) -> Vec<(u64, Answer)> {
        let answers = self.outputs.iter().filter_map(|output| match output {
            Output::Answer(ticket, answer) => Some((ticket.0, answer.clone())),
            _ => None,
        });
        answers.collect()
    }

    /// Returns the only answer, which must be to the latest request.
    fn answer(&self) -> Answer {
        match &self.answers()[..] {
            [(ticket, answer)] if *ticket == self.tickets => answer.clone(),
            other => panic!("one answer to {} was expected, not {other:?}", self.tickets),
        }
    }

    /// Returns the words of the only answer, which must be a failure of the latest order.
    fn failure(&self) -> String {
        match self.answer() {
            Answer::Failed(error) => error.error,
            other => panic!("a failure was expected, not {other:?}"),
        }
    }

    /// Returns what keeps this host in its cluster for the moment, by the only answer.
    fn tie(&self) -> String {
        match self.answer() {
            Answer::Tied(problem) => problem.error,
            other => panic!("the host should stay for a moment, not {other:?}"),
        }
    }

    fn notices(&self) -> Vec<(EventKind, String)> {
        let notices = self.outputs.iter().filter_map(|output| match output {
            Output::Notice(notice) => Some((notice.kind, notice.what.clone())),
            _ => None,
        });
        notices.collect()
    }

    fn asks_offers(&self) -> bool {
        self.outputs.contains(&Output::AskOffers)
    }
}

fn memory(used: u64) -> Memory {
    Memory { total: TOTAL, used: Bytes(TOTAL.0 * used / 100), ..Memory::default() }
}
