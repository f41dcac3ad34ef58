//! Broken servers of the NBD client.
#![no_main]
#![allow(clippy::unwrap_used, reason = "what fails here is found")]

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aquifer_fabric::Address;
use aquifer_fabric::channel::Channel;
use aquifer_fabric::nbd::client::{Connection, Failure, Operation, Run, Target};
use aquifer_fabric::nbd::proto::{
    BASE_ALLOCATION, ChunkError, ChunkHeader, Greeting, Hole, InfoBlockSize, InfoExport, MAGIC, OPTION_MAGIC,
    OPTION_REPLY_MAGIC, OptionReply, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, SimpleReply, StatusRun,
    chunk, info, option, reply,
};
use aquifer_fuzz::{Delivery, Number, Twist, Twisted};
use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use zerocopy::IntoBytes;
use zerocopy::byteorder::big_endian::U64;

/// How long the client waits. It never should: what the server has to say is there when it is asked.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest read or write.
const LONGEST: u64 = 64 << 10;
/// The id of the context that tells of holes.
const CONTEXT: u32 = 7;
/// Cookies of one round of requests.
const ROUND: u64 = 64;
/// The most requests that are made together: more than can be in flight.
const TOGETHER: usize = 100;
/// The most runs that one answer of the inputs here can have.
const MOST_RUNS: usize = 1 << 20;

/// What a server says, and what it is asked.
#[derive(Debug)]
struct Input<'a> {
    delivery: Delivery,
    handshake: Handshake<'a>,
    rounds: Vec<Round<'a>>,
}

#[derive(Debug)]
enum Handshake<'a> {
    Raw(&'a [u8]),
    Good(Good),
    Answers { good: Good, answers: Vec<Answer<'a>>, twists: Vec<(u8, Twist)> },
}

/// A server that can be used.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Good {
    structured: bool,
    holes: bool,
    size: Option<Number>,
    flags: u16,
    maximum: Option<Number>,
}

/// One answer to an option.
#[derive(Arbitrary, Debug)]
struct Answer<'a> {
    option: u8,
    kind: Kind,
    payload: &'a [u8],
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Kind {
    Ack,
    Server,
    Info,
    Context,
    Error(u8),
    Any(u32),
}

/// Requests that are made together, and the answers that come to them.
#[derive(Arbitrary, Debug)]
struct Round<'a> {
    operations: Vec<Asked>,
    replies: Vec<Reply<'a>>,
    twists: Vec<(u8, Twist)>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Asked {
    Read { offset: Number, length: Number },
    Write { offset: Number, length: Number },
    Trim { offset: Number, length: Number },
    WriteZeroes { offset: Number, length: Number },
    Flush,
    BlockStatus { offset: Number, length: Number },
}

#[derive(Arbitrary, Debug)]
enum Reply<'a> {
    Simple {
        to: u8,
        error: u8,
        data: Number,
    },
    None {
        to: u8,
        done: bool,
    },
    Data {
        to: u8,
        done: bool,
        offset: Number,
        length: Number,
    },
    Hole {
        to: u8,
        done: bool,
        offset: Number,
        length: Number,
    },
    Status {
        to: u8,
        done: bool,
        context: Option<u8>,
        runs: Vec<(Number, u8)>,
        times: u8,
    },
    Error {
        to: u8,
        done: bool,
        kind: u8,
        error: u8,
        said: Option<u16>,
        text: &'a [u8],
    },
    Chunk {
        to: u64,
        flags: u16,
        kind: u16,
        length: Option<Number>,
        payload: &'a [u8],
    },
    /// What would be right.
    Right {
        chunks: u8,
    },
    Bytes(&'a [u8]),
}

impl<'a> Arbitrary<'a> for Input<'a> {
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let delivery = u.arbitrary()?;
        let handshake = match u.arbitrary::<u8>()? {
            0 => Handshake::Raw(u.bytes(u.len())?),
            1..64 => {
                Handshake::Answers { good: u.arbitrary()?, answers: u.arbitrary()?, twists: u.arbitrary()? }
            }
            _ => Handshake::Good(u.arbitrary()?),
        };
        Ok(Self { delivery, handshake, rounds: u.arbitrary()? })
    }
}

fn answer(option: u32, reply: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).into();
    let (magic, option, reply) = (OPTION_REPLY_MAGIC.into(), option.into(), reply.into());
    [OptionReply { magic, option, reply, length }.as_bytes(), payload].concat()
}

impl Good {
    fn put(self, messages: &mut Twisted) {
        let greeting = Greeting { magic: MAGIC.into(), option_magic: OPTION_MAGIC.into(), flags: 3.into() };
        messages.push(greeting.as_bytes().to_vec());
        let no = reply::ERR_UNSUP;
        let structured = if self.structured { reply::ACK } else { no };
        messages.push(answer(option::STRUCTURED_REPLY, structured, &[]));
        if self.structured {
            if self.holes {
                let context = [&CONTEXT.to_be_bytes(), BASE_ALLOCATION.as_bytes()].concat();
                messages.push(answer(option::SET_META_CONTEXT, reply::META_CONTEXT, &context));
            }
            messages.push(answer(option::SET_META_CONTEXT, if self.holes { reply::ACK } else { no }, &[]));
        }
        let size = self.size.map_or(1 << 20, Number::bytes).into();
        let export = InfoExport { kind: info::EXPORT.into(), size, flags: self.flags.into() };
        messages.push(answer(option::GO, reply::INFO, export.as_bytes()));
        if let Some(maximum) = self.maximum {
            let sizes = InfoBlockSize {
                kind: info::BLOCK_SIZE.into(),
                minimum: 1.into(),
                preferred: 4096.into(),
                maximum: (maximum.bytes() as u32).into(),
            };
            messages.push(answer(option::GO, reply::INFO, sizes.as_bytes()));
        }
        messages.push(answer(option::GO, reply::ACK, &[]));
    }
}

impl Handshake<'_> {
    fn bytes(&self) -> Vec<u8> {
        let mut messages = Twisted::default();
        match self {
            Self::Raw(bytes) => messages.push(bytes.to_vec()),
            Self::Good(good) => good.put(&mut messages),
            Self::Answers { good, answers, twists } => {
                good.put(&mut messages);
                for Answer { option, kind, payload } in answers {
                    let kind = match *kind {
                        Kind::Ack => reply::ACK,
                        Kind::Server => reply::SERVER,
                        Kind::Info => reply::INFO,
                        Kind::Context => reply::META_CONTEXT,
                        Kind::Error(number) => reply::ERROR_BIT | u32::from(number),
                        Kind::Any(kind) => kind,
                    };
                    messages.push(answer((*option).into(), kind, payload));
                }
                messages.twist(twists);
            }
        }
        messages.bytes()
    }
}

fn a_chunk(cookie: u64, flags: u16, kind: u16, length: usize, payload: &[&[u8]]) -> Vec<u8> {
    let (magic, flags, kind) = (STRUCTURED_REPLY_MAGIC.into(), flags.into(), kind.into());
    let header = ChunkHeader { magic, flags, kind, cookie: cookie.into(), length: (length as u32).into() };
    [header.as_bytes(), &payload.concat()].concat()
}

fn simple(cookie: u64, error: u32, data: usize) -> Vec<u8> {
    let (magic, error) = (SIMPLE_REPLY_MAGIC.into(), error.into());
    let header = SimpleReply { magic, error, cookie: cookie.into() };
    [header.as_bytes(), &vec![7; data]].concat()
}

impl Reply<'_> {
    fn put(&self, cookies: u64, operations: &[Asked], structured: bool, messages: &mut Twisted) {
        let cookie = |to: u8| cookies + u64::from(to);
        let whole = |cookie, flags, kind, payload: &[&[u8]]| {
            a_chunk(cookie, flags, kind, payload.iter().map(|part| part.len()).sum(), payload)
        };
        let message = match *self {
            Self::Simple { to, error, data } => {
                simple(cookie(to), error.into(), data.bytes().min(LONGEST) as usize)
            }
            Self::None { to, done } => whole(cookie(to), done.into(), chunk::NONE, &[]),
            Self::Data { to, done, offset, length } => {
                let (at, data) = (U64::new(offset.bytes()), vec![9; length.bytes().min(LONGEST) as usize]);
                whole(cookie(to), done.into(), chunk::OFFSET_DATA, &[at.as_bytes(), &data])
            }
            Self::Hole { to, done, offset, length } => {
                let hole = Hole { offset: offset.bytes().into(), length: (length.bytes() as u32).into() };
                whole(cookie(to), done.into(), chunk::OFFSET_HOLE, &[hole.as_bytes()])
            }
            Self::Status { to, done, context, ref runs, times } => {
                let context = context.map_or(CONTEXT, u32::from).to_be_bytes();
                let run = |&(length, status): &(Number, u8)| StatusRun {
                    length: (length.bytes() as u32).into(),
                    status: u32::from(status).into(),
                };
                let runs: Vec<_> = runs.iter().map(run).collect();
                let reply = whole(cookie(to), done.into(), chunk::BLOCK_STATUS, &[&context, runs.as_bytes()]);
                (0..times).for_each(|_| messages.push(reply.clone()));
                reply
            }
            Self::Error { to, done, kind, error, said, text } => {
                let head = ChunkError {
                    error: u32::from(error).into(),
                    text_length: said.unwrap_or(text.len() as u16).into(),
                };
                let kind = chunk::ERROR_BIT | u16::from(kind);
                whole(cookie(to), done.into(), kind, &[head.as_bytes(), text])
            }
            Self::Chunk { to, flags, kind, length, payload } => {
                let length = length.map_or(payload.len(), |length| length.bytes() as usize);
                a_chunk(cookies.wrapping_add(to), flags, kind, length, &[payload])
            }
            Self::Right { chunks } => {
                let all = (cookies..).zip(operations);
                all.for_each(|(cookie, asked)| asked.reply_rightly(cookie, chunks, structured, messages));
                return;
            }
            Self::Bytes(bytes) => bytes.to_vec(),
        };
        messages.push(message);
    }
}

impl Asked {
    fn range(self) -> (u64, u64) {
        match self {
            Self::Read { offset, length } | Self::Write { offset, length } => {
                (offset.bytes(), length.bytes().min(LONGEST))
            }
            Self::Trim { offset, length }
            | Self::WriteZeroes { offset, length }
            | Self::BlockStatus { offset, length } => (offset.bytes(), u64::from(length.bytes() as u32)),
            Self::Flush => (0, 0),
        }
    }

    fn reply_rightly(self, cookie: u64, chunks: u8, structured: bool, messages: &mut Twisted) {
        let (offset, length) = self.range();
        let done = chunk::DONE;
        match self {
            _ if length == 0 && !matches!(self, Self::Flush) => {}
            Self::Read { .. } if structured => {
                let piece = length.div_ceil(u64::from(chunks) + 1).max(1);
                for at in (0..length).step_by(piece as usize) {
                    let data = vec![5; piece.min(length - at) as usize];
                    let payload: &[&[u8]] = &[&(offset.wrapping_add(at)).to_be_bytes(), &data];
                    messages.push(a_chunk(cookie, 0, chunk::OFFSET_DATA, 8 + data.len(), payload));
                }
                messages.push(a_chunk(cookie, done, chunk::NONE, 0, &[]));
            }
            Self::Read { .. } => messages.push(simple(cookie, 0, length as usize)),
            Self::BlockStatus { .. } => {
                let run = StatusRun { length: (length as u32).into(), status: 3.into() };
                let payload: &[&[u8]] = &[&CONTEXT.to_be_bytes(), run.as_bytes()];
                messages.push(a_chunk(cookie, done, chunk::BLOCK_STATUS, 12, payload));
            }
            _ => messages.push(simple(cookie, 0, 0)),
        }
    }
}

/// Asks, and looks at what came of it.
fn ask(connection: &mut Connection, asked: &[Asked]) -> Result<(), Failure> {
    let asked = &asked[..asked.len().min(TOGETHER)];
    let ranges: Vec<_> = asked.iter().map(|asked| asked.range()).collect();
    let mut buffers: Vec<_> = ranges.iter().map(|range| vec![0; range.1.min(LONGEST) as usize]).collect();
    let mut runs: Vec<Vec<Run>> = vec![Vec::new(); asked.len()];
    let mut operations = Vec::new();
    for (((asked, (offset, length)), buffer), runs) in
        asked.iter().zip(ranges).zip(&mut buffers).zip(&mut runs)
    {
        let length = length as u32;
        operations.push(match asked {
            Asked::Read { .. } => Operation::Read { offset, into: buffer },
            Asked::Write { .. } => Operation::Write { offset, from: buffer },
            Asked::Trim { .. } => Operation::Trim { offset, length },
            Asked::WriteZeroes { .. } => Operation::WriteZeroes { offset, length },
            Asked::Flush => Operation::Flush,
            Asked::BlockStatus { .. } => Operation::BlockStatus { offset, length, runs },
        });
    }
    let result = connection.run(&mut operations).map_err(|error| error.failure);
    drop(operations);
    assert!(runs.iter().all(|runs| runs.len() < MOST_RUNS), "more runs than a server can tell at once");
    result
}

/// What a server has said. Who asks for more finds that patience is over, or that the server is gone.
#[derive(Clone)]
struct Said(Arc<Mutex<(VecDeque<u8>, Delivery)>>);

impl Said {
    fn say(&self, bytes: &[u8]) {
        self.0.lock().unwrap().0.extend(bytes);
    }
}

impl Channel for Said {
    fn recv(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let (said, delivery) = &mut *self.0.lock().unwrap();
        if said.is_empty() && !delivery.abrupt {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let most = buf.len().min(delivery.piece());
        said.read(&mut buf[..most])
    }

    fn send_all(&mut self, _bufs: &mut [IoSlice<'_>]) -> io::Result<()> {
        Ok(())
    }

    fn set_timeouts(&self, _recv: Option<Duration>, _send: Option<Duration>) -> io::Result<()> {
        Ok(())
    }

    fn shutdown(&self) -> io::Result<()> {
        Ok(())
    }
}

fuzz_target!(|input: Input| {
    let said = Said(Arc::new(Mutex::new((VecDeque::new(), input.delivery))));
    let address = Address::Unix(PathBuf::from("fuzz"));
    let target = Arc::new(Target { address, export: "export".to_owned(), tls: None });
    said.say(&input.handshake.bytes());
    let begin = Instant::now();
    let Ok(mut connection) = Connection::over(Box::new(said.clone()), target, PATIENCE) else { return };
    let structured = match input.handshake {
        Handshake::Good(good) | Handshake::Answers { good, .. } => good.structured,
        Handshake::Raw(_) => false,
    };
    let mut broken = false;
    for (number, round) in (0..).zip(&input.rounds) {
        let mut messages = Twisted::default();
        let cookies = number * ROUND;
        round
            .replies
            .iter()
            .for_each(|reply| reply.put(cookies, &round.operations, structured, &mut messages));
        messages.twist(&round.twists);
        said.say(&messages.bytes());
        let Err(failure) = ask(&mut connection, &round.operations) else {
            assert!(!broken, "a broken connection is of use again");
            continue;
        };
        assert_eq!(matches!(failure, Failure::Broken), broken, "{failure}");
        broken |= matches!(
            failure,
            Failure::Protocol(_) | Failure::Lost(_) | Failure::Silent(_) | Failure::ShuttingDown(_)
        );
    }
    assert!(begin.elapsed() < PATIENCE, "it waits for what cannot come");
});
