//! One controller under test, and methods to drive it.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_control::{
    Action, Config, Controller, Event, LentLease, LiveVolume, Memory, Message, Offer, Owner,
    Reason, RegionRequest, RequestId, Role, Step,
};
use aquifer_page::{Bytes, Group, HostName, LeaseId, VolumeId};

pub const TOTAL: Bytes = Bytes::gib(10);

/// One controller named `me` with a clock, and its last step.
pub struct Host {
    pub controller: Controller,
    pub now: Duration,
    pub step: Step,
    pub stored: BTreeMap<LeaseId, Bytes>,
}

pub fn name(text: &str) -> HostName {
    text.parse().expect("a name")
}

pub fn config() -> Config {
    Config { request: Bytes::gib(1), max_borrowed: Bytes::gib(3), ..Config::default() }
}

impl Host {
    pub fn new(config: Config) -> Self {
        Self::of(Controller::new(name("me"), config, 1000))
    }

    pub fn of(controller: Controller) -> Self {
        let now = Duration::from_secs(1);
        Self { controller, now, step: Step::default(), stored: BTreeMap::new() }
    }

    pub fn event(&mut self, event: Event) -> &mut Self {
        self.step = self.controller.step(self.now, event);
        self
    }

    /// Ticks a second later: M_u in percent of M_t, and peers with their spare memory in GiB.
    pub fn tick(&mut self, used: u64, lenders: &[(&str, u64)]) -> &mut Self {
        self.read(used, Bytes::ZERO, lenders)
    }

    pub fn read(&mut self, used: u64, swap_used: Bytes, lenders: &[(&str, u64)]) -> &mut Self {
        self.now += Duration::from_secs(1);
        let memory =
            Memory { total: TOTAL, used: Bytes(TOTAL.0 * used / 100), swap_used, pressure: false };
        let lenders =
            lenders.iter().map(|(host, gib)| Offer::new(name(host), Bytes::gib(*gib))).collect();
        let stored = self.stored.clone();
        self.event(Event::Tick { memory, stored, lenders })
    }

    pub fn receive(&mut self, from: &str, message: Message) -> &mut Self {
        self.event(Event::Received { from: name(from), message })
    }

    pub fn role(&self) -> Role {
        self.controller.role()
    }

    pub fn sent(&self) -> Vec<(&str, &Message)> {
        let sent = self.step.actions.iter().filter_map(|action| match action {
            Action::Send { to, message } => Some((to.as_str(), message)),
            _ => None,
        });
        sent.collect()
    }

    pub fn request_sent(&self) -> (String, RequestId, Bytes) {
        match self.sent()[..] {
            [(to, Message::MemBorReq { request, bytes, .. })] => (to.to_owned(), *request, *bytes),
            ref other => panic!("one mem_bor_req was expected, not {other:?}"),
        }
    }

    pub fn rejection_sent(&self) -> (Bytes, Reason) {
        match self.sent()[..] {
            [(_, Message::MemBorRej { spare, reason, .. })] => (*spare, *reason),
            ref other => panic!("one mem_bor_rej was expected, not {other:?}"),
        }
    }

    pub fn opened(&self) -> LentLease {
        match &self.step.actions[..] {
            [Action::OpenLease(lease)] => lease.clone(),
            other => panic!("one lease to open was expected, not {other:?}"),
        }
    }

    pub fn activates(&self) -> LiveVolume {
        match &self.step.actions[..] {
            [Action::Activate(volume)] => volume.clone(),
            other => panic!("one volume to activate was expected, not {other:?}"),
        }
    }

    pub fn does_nothing(&self) {
        assert_eq!(self.step, Step::default());
    }

    /// Borrows 1 GiB from `b` as lease 1. Returns the volume.
    pub fn borrow(&mut self) -> VolumeId {
        let (_, request, bytes) = self.tick(85, &[("b", 4)]).request_sent();
        let volume = self.receive("b", ack(request, 1, bytes)).activates().volume;
        self.event(Event::Activated { volume });
        assert_eq!(self.role(), Role::Borrower);
        volume
    }

    /// Lends to `borrower`, and returns the lease.
    pub fn lend(&mut self, borrower: &str, request: u128, bytes: Bytes) -> LeaseId {
        let lease = self.receive(borrower, req(request, bytes)).opened().lease;
        self.event(Event::LeaseOpened { lease, uris: vec!["here".to_owned()] });
        lease
    }
}

pub fn req(request: u128, bytes: Bytes) -> Message {
    Message::MemBorReq {
        request: RequestId(request),
        bytes,
        owner: Owner::Swap,
        group: Group::default(),
        goes_first: false,
    }
}

/// Returns the request of the region `items` for memory.
pub fn for_region(volume: u128, bytes: Bytes) -> RegionRequest {
    let (region, volume) = ("items".parse().expect("a name"), VolumeId(volume));
    RegionRequest { region, volume, bytes, least: bytes, group: Group::default() }
}

/// Returns a borrower's request for the region `items`.
pub fn region_req(request: u128, bytes: Bytes) -> Message {
    let owner = Owner::Region("items".parse().expect("a name"));
    let (request, group) = (RequestId(request), Group::default());
    Message::MemBorReq { request, bytes, owner, group, goes_first: false }
}

/// Returns a borrower's request for second copies of the region `items` that go first.
pub fn copies_req(request: u128, bytes: Bytes) -> Message {
    match region_req(request, bytes) {
        Message::MemBorReq { request, bytes, owner, group, .. } => {
            Message::MemBorReq { request, bytes, owner, group, goes_first: true }
        }
        other => other,
    }
}

pub fn ack(request: RequestId, lease: u128, bytes: Bytes) -> Message {
    Message::MemBorAck {
        request,
        lease: LeaseId(lease),
        bytes,
        uris: vec!["there".to_owned()],
        generation: 0,
    }
}

pub fn rej(request: RequestId, spare: Bytes, reason: Reason) -> Message {
    Message::MemBorRej { request, spare, reason }
}

pub fn bor_fin(lease: LeaseId) -> Message {
    Message::MemBorFin { lease, generation: 0 }
}

pub fn len_fin(lease: u128) -> Message {
    Message::MemLenFin { lease: LeaseId(lease), generation: 0 }
}
