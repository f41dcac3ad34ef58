//! A fuzz target that runs broken hosts against the NVMe/TCP target.
#![no_main]
#![allow(clippy::unwrap_used, reason = "a panic reports a finding")]

#[path = "nvme/admin.rs"]
mod admin;
#[path = "../../crates/transport/tests/transport/common/mod.rs"]
mod common;
#[path = "../../crates/nvme/tests/nvme/nvme_target/harness.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod harness;
#[path = "../../crates/nvme/tests/nvme/nvme_target/host.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod host;
#[path = "nvme/io.rs"]
mod io;
#[path = "nvme/proof.rs"]
mod proof;
#[path = "nvme/queue.rs"]
mod queue;
#[path = "nvme/script.rs"]
mod script;
#[path = "../../crates/store/tests/store/common/mod.rs"]
mod stores;

use std::cell::RefCell;
use std::sync::Arc;

use aquifer_fuzz::{Delivery, GUARDED_BYTES, Peer, Twist, Worker, secrets};
use aquifer_nvme::proto::Nqn;
use aquifer_nvme::target::Limits;
use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_store::Lease;
use aquifer_transport::Address;
use arbitrary::{Arbitrary, Unstructured};
use common::pattern;
use harness::Served;
use host::Host;
use libfuzzer_sys::fuzz_target;
use queue::{Form, Queue};
use script::{Place, Script};
use zerocopy::IntoBytes;

const LEASE_CAPACITY: Bytes = Bytes::mib(2);
const LEASE_QUOTA: Bytes = Bytes::mib(1);
/// The number of inputs after which a new host of the listening target checks it.
const INPUTS_PER_NEWCOMER: u64 = 256;

/// The behaviour of a host.
#[derive(Debug)]
enum Input<'a> {
    Raw { start: Start, form: Form, bytes: &'a [u8] },
    Crooked(Crooked<'a>),
    Dialogue(Dialogue<'a>),
}

/// The valid PDUs before raw bytes.
#[derive(Debug, PartialEq, Eq)]
enum Start {
    Nothing,
    Request,
    Admin,
    Io,
}

impl<'a> Arbitrary<'a> for Input<'a> {
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let start = match u.arbitrary::<u8>()? {
            0 => Start::Nothing,
            1 => Start::Request,
            2 => Start::Admin,
            3 => Start::Io,
            4..32 => return Ok(Self::Crooked(u.arbitrary()?)),
            _ => return Ok(Self::Dialogue(u.arbitrary()?)),
        };
        Ok(Self::Raw { start, form: u.arbitrary()?, bytes: u.bytes(u.len())? })
    }
}

/// A host that breaks the rules from its first PDU on.
#[derive(Arbitrary, Debug)]
struct Crooked<'a> {
    form: Form,
    queue: u8,
    controller: u16,
    dwords: Option<[u32; 6]>,
    place: Place,
    subsystem: Option<&'a [u8]>,
    host: Option<&'a [u8]>,
    steps: Vec<admin::Step<'a>>,
    twists: Vec<(u8, Twist)>,
    delivery: Delivery,
}

/// A host that connects its queues by the rules.
#[derive(Arbitrary, Debug)]
struct Dialogue<'a> {
    form: Form,
    discovery: bool,
    proof: Proof<'a>,
    before: Vec<admin::Step<'a>>,
    io: Option<Io<'a>>,
    happening: Happening,
    after: Vec<admin::Step<'a>>,
    twists: Vec<(u8, Twist)>,
    delivery: Delivery,
    /// Whether the admin queue ends before the I/O queue.
    admin_first: bool,
}

#[derive(Arbitrary, Debug)]
struct Io<'a> {
    form: Form,
    queue: u8,
    steps: Vec<io::Step<'a>>,
    twists: Vec<(u8, Twist)>,
    delivery: Delivery,
}

#[derive(Arbitrary, Debug)]
enum Proof<'a> {
    NotNeeded,
    Unneeded,
    Honest { mutual: bool, hash: u8, group: u8 },
    Steps(Vec<proof::Step<'a>>),
}

impl Proof<'_> {
    /// Authenticates if the target demands it.
    fn run(&self, queue: &mut Queue<'_>, subsystem: &Nqn) {
        match *self {
            Self::NotNeeded | Self::Unneeded => {}
            Self::Honest { mutual, hash, group } => {
                proof::honest(mutual, hash, group, queue, subsystem)
            }
            Self::Steps(ref steps) => proof::run(steps, queue, subsystem),
        }
    }
}

/// A concurrent action of the target's owner.
#[derive(Arbitrary, Debug)]
enum Happening {
    Nothing,
    Resize(u8),
    SubsystemsChange,
}

/// A target, with a bystander and another lease that no attack may disturb.
struct World {
    served: Arc<Served>,
    worker: Worker,
    io_worker: Worker,
    _admin: Host,
    bystander: Host,
    other: Arc<Lease>,
    content: Vec<u8>,
    rounds: u64,
}

impl World {
    fn new() -> Self {
        let served = Arc::new(Served::with(LEASE_CAPACITY, LEASE_QUOTA, Limits::default()));
        let content = pattern(GUARDED_BYTES, 1);
        let guarded = served.add(Bytes(GUARDED_BYTES as u64));
        let mut admin = Host::connect(&served.socket(), 0);
        let controller = admin.connect_admin(&guarded, 0);
        admin.enable();
        let mut bystander = Host::connect(&served.socket(), 0);
        bystander.connect_io(&guarded, controller, 1);
        bystander.write(0, &content);
        let other = served
            .store
            .create(stores::record(Bytes(GUARDED_BYTES as u64), Bytes(GUARDED_BYTES as u64)))
            .unwrap();
        other.write(0, &content).unwrap();
        // From here on no attacker can reach it.
        served.registry.namespaces.lock().unwrap().remove(&guarded);
        let worker = || {
            let served = Arc::clone(&served);
            let announced = Address::Tcp { host: "192.0.2.1".to_owned(), port: 4420 };
            Worker::start(move |stream| served.target.serve(stream, &announced))
        };
        let (worker, io_worker) = (worker(), worker());
        Self { served, worker, io_worker, _admin: admin, bystander, other, content, rounds: 0 }
    }

    fn attack(&self, input: &Input<'_>) {
        match input {
            Input::Raw { start, form, bytes } => self.raw(start, *form, bytes),
            Input::Crooked(crooked) => self.crooked(crooked),
            Input::Dialogue(dialogue) => self.dialogue(dialogue),
        }
    }

    fn raw(&self, start: &Start, form: Form, bytes: &[u8]) {
        let subsystem = &self.served.subsystem;
        if matches!(start, Start::Nothing | Start::Request) {
            let mut peer = self.worker.connect();
            if *start == Start::Request {
                peer.send(&form.ic_req());
            }
            peer.send(bytes);
            return peer.finish();
        }
        let Ok(mut admin) = Queue::connect(&self.worker, form, subsystem, 0, 0) else { return };
        admin.enable();
        let mut target = admin;
        let mut beside = None;
        if *start == Start::Io {
            let Ok(io) = Queue::connect(&self.io_worker, form, subsystem, 1, target.controller)
            else {
                return;
            };
            beside = Some(std::mem::replace(&mut target, io));
        }
        target.peer.send(bytes);
        target.peer.finish();
        drop(beside);
    }

    fn crooked(&self, crooked: &Crooked<'_>) {
        let mut script = Script::new(crooked.form.shape());
        script.messages.push(crooked.form.ic_req());
        let subsystem = &self.served.subsystem;
        let (mut command, mut data) =
            queue::connect(crooked.queue.into(), crooked.controller, subsystem, false);
        if let Some(dwords) = crooked.dwords {
            command = admin::with_all(command, dwords);
        }
        command.sgl = crooked.place.sgl(data.as_bytes().len());
        for (field, bytes) in
            [(&mut data.subsystem, crooked.subsystem), (&mut data.host, crooked.host)]
        {
            let bytes = bytes.unwrap_or_default();
            field.iter_mut().zip(bytes).for_each(|(there, byte)| *there = *byte);
        }
        script.command(&command, crooked.place, data.as_bytes());
        crooked.steps.iter().for_each(|step| step.put(&mut script));
        script.messages.twist(&crooked.twists);
        let mut peer = self.worker.connect();
        script.messages.send(&mut peer, crooked.delivery);
        end(peer, crooked.delivery);
    }

    fn dialogue(&self, dialogue: &Dialogue<'_>) {
        let needed = matches!(dialogue.proof, Proof::Honest { .. } | Proof::Steps(_));
        *self.served.registry.secrets.lock().unwrap() = needed.then(secrets);
        let subsystem =
            if dialogue.discovery { Nqn::discovery() } else { self.served.subsystem.clone() };
        let Ok(mut admin) = Queue::connect(&self.worker, dialogue.form, &subsystem, 0, 0) else {
            panic!("the target refused a host that obeys the protocol");
        };
        match &dialogue.proof {
            Proof::Unneeded => proof::honest(false, 0, 0, &mut admin, &subsystem),
            proof => proof.run(&mut admin, &subsystem),
        }
        admin.enable();
        let mut before = Script::new(dialogue.form.shape());
        dialogue.before.iter().for_each(|step| step.put(&mut before));
        before.messages.twist(&dialogue.twists);
        before.messages.send(&mut admin.peer, dialogue.delivery);
        let io = dialogue
            .io
            .as_ref()
            .and_then(|io| self.io(io, &dialogue.proof, &subsystem, admin.controller));
        self.happen(&dialogue.happening);
        let mut after = Script::new(dialogue.form.shape());
        dialogue.after.iter().for_each(|step| step.put(&mut after));
        after.messages.send(&mut admin.peer, dialogue.delivery);
        let (mut first, mut second) = (io, Some((admin.peer, dialogue.delivery)));
        if dialogue.admin_first {
            std::mem::swap(&mut first, &mut second);
        }
        [first, second].into_iter().flatten().for_each(|(peer, delivery)| end(peer, delivery));
    }

    fn io(
        &self,
        io: &Io<'_>,
        proof: &Proof<'_>,
        subsystem: &Nqn,
        controller: u16,
    ) -> Option<(Peer<'_>, Delivery)> {
        let number = 1 + u16::from(io.queue % 65);
        let mut queue =
            Queue::connect(&self.io_worker, io.form, subsystem, number, controller).ok()?;
        proof.run(&mut queue, subsystem);
        let mut script = Script::new(io.form.shape());
        io.steps.iter().for_each(|step| step.put(&mut script));
        script.messages.twist(&io.twists);
        script.messages.send(&mut queue.peer, io.delivery);
        Some((queue.peer, io.delivery))
    }

    fn happen(&self, happening: &Happening) {
        match happening {
            Happening::Nothing => {}
            Happening::Resize(pages) => {
                let size = Bytes((u64::from(*pages) + 1) * PAGE_SIZE as u64);
                self.served.namespace.resize(size).unwrap();
            }
            Happening::SubsystemsChange => self.served.target.subsystems_changed(),
        }
    }

    fn check(&mut self) {
        self.rounds += 1;
        let at = self.rounds as usize * PAGE_SIZE % GUARDED_BYTES;
        let page = pattern(PAGE_SIZE, self.rounds);
        self.content[at..at + PAGE_SIZE].copy_from_slice(&page);
        self.bystander.write((at / PAGE_SIZE) as u64, &page);
        let there = self.bystander.read(0, (GUARDED_BYTES / PAGE_SIZE) as u32);
        assert!(there == self.content, "the bystander's bytes have changed");
        let mut there = vec![0; GUARDED_BYTES];
        self.other.read(0, &mut there).unwrap();
        assert!(there == pattern(GUARDED_BYTES, 1), "the bytes of another lease have changed");
        let (lease, namespace) = (&self.served.lease, &self.served.namespace);
        assert!(lease.stored() <= LEASE_QUOTA, "{} in a lease of {LEASE_QUOTA}", lease.stored());
        if lease.stored() > Bytes::ZERO {
            lease.discard(0, LEASE_CAPACITY.0).unwrap();
        }
        if namespace.size() != LEASE_CAPACITY {
            namespace.resize(LEASE_CAPACITY).unwrap();
        }
        *self.served.registry.secrets.lock().unwrap() = None;
        assert_eq!(self.served.queues(), 2, "only the bystander may have queues");
        if self.rounds.is_multiple_of(INPUTS_PER_NEWCOMER) {
            self.served.assert_serves();
            common::wait_until("the newcomer has disconnected", || self.served.queues() == 2);
        }
    }
}

/// Ends a connection: after all replies, or abruptly.
fn end(peer: Peer<'_>, delivery: Delivery) {
    if !delivery.abrupt {
        peer.finish();
    }
}

thread_local!(static WORLD: RefCell<Option<World>> = const { RefCell::new(None) });

fuzz_target!(|input: Input| {
    WORLD.with_borrow_mut(|world| {
        let world = world.get_or_insert_with(World::new);
        world.attack(&input);
        world.check();
    });
});
