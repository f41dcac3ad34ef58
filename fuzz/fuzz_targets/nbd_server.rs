//! A fuzz target that runs broken clients against the NBD server.
#![no_main]
#![allow(clippy::unwrap_used, reason = "a panic reports a finding")]

#[path = "../../crates/transport/tests/transport/common/mod.rs"]
mod common;
#[path = "../../crates/nbd/tests/nbd/exports.rs"]
mod exports;
#[path = "../../crates/nbd/tests/nbd/nbd_server/harness.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod harness;
#[path = "../../crates/store/tests/store/common/mod.rs"]
mod stores;

use std::cell::RefCell;
use std::sync::Arc;

use aquifer_fuzz::{Delivery, GUARDED_BYTES, Number, Twist, Twisted, Worker};
use aquifer_nbd::proto::{BASE_ALLOCATION, OPTION_MAGIC, command, option};
use aquifer_nbd::server::{self, Exports, Limits};
use aquifer_page::Bytes;
use aquifer_store::Lease;
use arbitrary::{Arbitrary, Unstructured};
use common::pattern;
use harness::{Client, Served, info_payload, meta_payload, request};
use libfuzzer_sys::fuzz_target;

const LEASE_CAPACITY: Bytes = Bytes::mib(2);
const LEASE_QUOTA: Bytes = Bytes::mib(1);
/// The number of inputs after which a new client of the listening server checks it.
const INPUTS_PER_NEWCOMER: u64 = 256;

/// The messages of a client.
#[derive(Debug)]
enum Input<'a> {
    Raw { start: Start, bytes: &'a [u8] },
    Dialogue(Dialogue<'a>),
}

/// The valid messages before raw bytes.
#[derive(Arbitrary, Debug)]
enum Start {
    Nothing,
    Greeting,
    Simple,
    Structured,
}

impl<'a> Arbitrary<'a> for Input<'a> {
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let start = match u.arbitrary::<u8>()? {
            0 => Start::Nothing,
            1 => Start::Greeting,
            2 => Start::Simple,
            3 => Start::Structured,
            _ => return Ok(Self::Dialogue(u.arbitrary()?)),
        };
        Ok(Self::Raw { start, bytes: u.bytes(u.len())? })
    }
}

#[derive(Arbitrary, Debug)]
struct Dialogue<'a> {
    flags: Option<u32>,
    structured: bool,
    allocation: bool,
    options: Vec<Opt<'a>>,
    requests: Vec<Request>,
    twists: Vec<(u8, Twist)>,
    delivery: Delivery,
}

#[derive(Arbitrary, Debug)]
enum Opt<'a> {
    ExportName(Name<'a>),
    Abort,
    List,
    StartTls,
    Info(Name<'a>, Vec<u16>),
    Go(Name<'a>, Vec<u16>),
    StructuredReply,
    ListContexts(Name<'a>, Vec<Query<'a>>),
    SetContext(Name<'a>, Vec<Query<'a>>),
    Any { option: u8, payload: &'a [u8] },
    Long { option: u8, length: Number },
}

#[derive(Arbitrary, Debug)]
enum Name<'a> {
    Default,
    Guarded,
    Forbidden,
    Any(&'a str),
    Long(u16),
}

#[derive(Arbitrary, Debug)]
enum Query<'a> {
    Allocation,
    Base,
    Any(&'a str),
}

#[derive(Arbitrary, Debug)]
struct Request {
    command: Command,
    flags: u8,
    cookie: u8,
    offset: Number,
    length: Number,
    fill: u8,
}

#[derive(Arbitrary, Debug)]
enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    Cache,
    WriteZeroes,
    BlockStatus,
    Any(u16),
}

impl Name<'_> {
    fn text(&self) -> String {
        match self {
            Self::Default => String::new(),
            Self::Guarded => "guarded".to_owned(),
            Self::Forbidden => "forbidden".to_owned(),
            Self::Any(name) => (*name).to_owned(),
            Self::Long(length) => "x".repeat((*length).into()),
        }
    }
}

impl Query<'_> {
    fn text(&self) -> &str {
        match self {
            Self::Allocation => BASE_ALLOCATION,
            Self::Base => "base:",
            Self::Any(query) => query,
        }
    }
}

fn an_option(option: u32, length: u32, payload: &[u8]) -> Vec<u8> {
    [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &length.to_be_bytes(), payload]
        .concat()
}

fn whole_option(option: u32, payload: &[u8]) -> Vec<u8> {
    an_option(option, payload.len() as u32, payload)
}

fn contexts(name: &Name<'_>, queries: &[Query<'_>]) -> Vec<u8> {
    meta_payload(&name.text(), &queries.iter().map(Query::text).collect::<Vec<_>>())
}

fn informed(name: &Name<'_>, kinds: &[u16]) -> Vec<u8> {
    let mut payload = info_payload(&name.text());
    payload.truncate(payload.len() - 2);
    payload.extend((kinds.len() as u16).to_be_bytes());
    payload.extend(kinds.iter().flat_map(|kind| kind.to_be_bytes()));
    payload
}

impl Opt<'_> {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::ExportName(name) => whole_option(option::EXPORT_NAME, name.text().as_bytes()),
            Self::Abort => whole_option(option::ABORT, &[]),
            Self::List => whole_option(option::LIST, &[]),
            Self::StartTls => whole_option(option::STARTTLS, &[]),
            Self::Info(name, kinds) => whole_option(option::INFO, &informed(name, kinds)),
            Self::Go(name, kinds) => whole_option(option::GO, &informed(name, kinds)),
            Self::StructuredReply => whole_option(option::STRUCTURED_REPLY, &[]),
            Self::ListContexts(name, queries) => {
                whole_option(option::LIST_META_CONTEXT, &contexts(name, queries))
            }
            Self::SetContext(name, queries) => {
                whole_option(option::SET_META_CONTEXT, &contexts(name, queries))
            }
            Self::Any { option, payload } => whole_option((*option).into(), payload),
            Self::Long { option, length } => {
                let length = length.bytes() as u32;
                an_option((*option).into(), length, &vec![0; length.min(2 << 20) as usize])
            }
        }
    }

    /// Returns whether the option ends the option phase.
    fn ends_the_handshake(&self) -> bool {
        matches!(self, Self::Go(Name::Default, _) | Self::ExportName(Name::Default) | Self::Abort)
    }
}

impl Request {
    fn bytes(&self) -> Vec<u8> {
        let number = match self.command {
            Command::Read => command::READ,
            Command::Write => command::WRITE,
            Command::Disconnect => command::DISC,
            Command::Flush => command::FLUSH,
            Command::Trim => command::TRIM,
            Command::Cache => command::CACHE,
            Command::WriteZeroes => command::WRITE_ZEROES,
            Command::BlockStatus => command::BLOCK_STATUS,
            Command::Any(number) => number,
        };
        let length = self.length.bytes() as u32;
        // Mostly flags that are valid with the command.
        let flags = match (number, self.flags) {
            (_, 224..) => self.flags,
            (command::READ, flags) => flags & 0b101,
            (command::BLOCK_STATUS, flags) => flags & 0b1001,
            (command::WRITE_ZEROES, flags) => flags & 0b10011,
            (_, flags) => flags & 0b1,
        };
        let mut bytes =
            request(number, flags.into(), self.cookie.into(), self.offset.bytes(), length);
        if number == command::WRITE {
            bytes.resize(bytes.len() + length.min(LEASE_CAPACITY.0 as u32) as usize, self.fill);
        }
        bytes
    }
}

impl Input<'_> {
    fn messages(&self) -> Twisted {
        let mut messages = Twisted::default();
        let greet =
            |messages: &mut Twisted, flags: u32| messages.push(flags.to_be_bytes().to_vec());
        let structured = |messages: &mut Twisted, allocation: bool| {
            messages.push(Opt::StructuredReply.bytes());
            if allocation {
                messages.push(Opt::SetContext(Name::Default, vec![Query::Allocation]).bytes());
            }
        };
        let go = |messages: &mut Twisted| messages.push(Opt::Go(Name::Default, vec![]).bytes());
        match self {
            Self::Raw { start, bytes } => {
                if !matches!(start, Start::Nothing) {
                    greet(&mut messages, 3);
                }
                if matches!(start, Start::Structured) {
                    structured(&mut messages, true);
                }
                if matches!(start, Start::Simple | Start::Structured) {
                    go(&mut messages);
                }
                messages.push(bytes.to_vec());
            }
            Self::Dialogue(dialogue) => {
                greet(&mut messages, dialogue.flags.unwrap_or(3));
                if dialogue.structured {
                    structured(&mut messages, dialogue.allocation);
                }
                dialogue.options.iter().for_each(|option| messages.push(option.bytes()));
                if !dialogue.options.iter().any(Opt::ends_the_handshake) {
                    go(&mut messages);
                }
                dialogue.requests.iter().for_each(|request| messages.push(request.bytes()));
                messages.twist(&dialogue.twists);
            }
        }
        messages
    }

    fn delivery(&self) -> Delivery {
        match self {
            Self::Raw { .. } => Delivery::default(),
            Self::Dialogue(dialogue) => dialogue.delivery,
        }
    }
}

/// A server, with a bystander and another lease that no attack may disturb.
struct World {
    served: Served,
    worker: Worker,
    bystander: Client,
    other: Arc<Lease>,
    content: Vec<u8>,
    rounds: u64,
}

impl World {
    fn new() -> Self {
        let served = Served::with(LEASE_CAPACITY, LEASE_QUOTA, Limits::default());
        let content = pattern(GUARDED_BYTES, 1);
        served.add("guarded", Bytes(GUARDED_BYTES as u64));
        let mut bystander = Client::greeted(&served.socket());
        bystander.go("guarded");
        bystander.write(0, &content);
        let other = served.add("other", Bytes(GUARDED_BYTES as u64));
        other.write(0, &content).unwrap();
        // From here on no attacker can open them.
        served.registry.leases.lock().unwrap().retain(|name, _| name.is_empty());
        let exports: Arc<dyn Exports> = served.registry.clone();
        let worker =
            Worker::start(move |stream| server::serve(stream, exports.clone(), Limits::default()));
        Self { served, worker, bystander, other, content, rounds: 0 }
    }

    fn attack(&mut self, input: &Input<'_>) {
        let mut peer = self.worker.connect();
        assert!(peer.take(18).is_some(), "the server must greet every client");
        input.messages().send(&mut peer, input.delivery());
        if !input.delivery().abrupt {
            peer.finish();
        }
    }

    fn check(&mut self) {
        self.rounds += 1;
        let at = self.rounds as usize * 512 % GUARDED_BYTES;
        self.content[at..at + 512].copy_from_slice(&pattern(512, self.rounds));
        self.bystander.write(at as u64, &self.content[at..at + 512]);
        assert!(
            self.bystander.read(0, GUARDED_BYTES as u32) == self.content,
            "the bystander's bytes have changed"
        );
        let mut there = vec![0; GUARDED_BYTES];
        self.other.read(0, &mut there).unwrap();
        assert!(there == pattern(GUARDED_BYTES, 1), "the bytes of another lease have changed");
        let lease = &self.served.lease;
        assert!(lease.stored() <= LEASE_QUOTA, "{} in a lease of {LEASE_QUOTA}", lease.stored());
        if lease.stored() > Bytes::ZERO {
            lease.discard(0, LEASE_CAPACITY.0).unwrap();
        }
        assert_eq!(self.served.connections(), 1, "only the bystander may be connected");
        if self.rounds.is_multiple_of(INPUTS_PER_NEWCOMER) {
            self.served.assert_serves();
            common::wait_until("the newcomer has disconnected", || self.served.connections() == 1);
        }
        self.served.registry.peers.lock().unwrap().clear();
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
