//! A fuzz target that runs the NBD client against broken servers.
#![no_main]
#![allow(clippy::unwrap_used, reason = "a panic reports a finding")]

#[path = "nbd/handshake.rs"]
mod handshake;
#[path = "nbd/reply.rs"]
mod reply;

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aquifer_fuzz::{Delivery, Number, Twist, Twisted};
use aquifer_nbd::client::{Connection, Failure, Operation, Run, Target};
use aquifer_page::PAGE_SIZE;
use aquifer_transport::Address;
use aquifer_transport::channel::Channel;
use aquifer_transport::initiating::Pipelined as _;
use arbitrary::Arbitrary;
use handshake::Handshake;
use libfuzzer_sys::fuzz_target;
use reply::{Asked, MAX_IO_BYTES, Reply};

/// The client's timeout. It must never pass: all bytes of the server are ready when the client
/// reads.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);
/// The cookies of one round of requests.
const COOKIES_PER_ROUND: u64 = 64;
/// The most requests of one batch: more than can be in flight.
const MAX_BATCH: usize = 100;
/// More runs than any reply to these inputs can have.
const MAX_RUNS: usize = 1 << 20;

/// A broken server's bytes and the client's requests.
#[derive(Arbitrary, Debug)]
struct Input<'a> {
    delivery: Delivery,
    handshake: Handshake<'a>,
    rounds: Vec<Round<'a>>,
}

/// A batch of requests and the server's replies to it.
#[derive(Arbitrary, Debug)]
struct Round<'a> {
    /// The replies to a read of a page before the batch, which come only after it was sent.
    late: Option<Vec<Reply<'a>>>,
    operations: Vec<Asked>,
    replies: Vec<Reply<'a>>,
    twists: Vec<(u8, Twist)>,
}

/// Runs the requests, and checks the number of runs that they return.
fn ask(connection: &mut Connection, asked: &[Asked]) -> Result<(), Failure> {
    let asked = &asked[..asked.len().min(MAX_BATCH)];
    let ranges: Vec<_> = asked.iter().map(|asked| asked.range()).collect();
    let mut buffers: Vec<_> =
        ranges.iter().map(|range| vec![0; range.1.min(MAX_IO_BYTES) as usize]).collect();
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
    assert!(
        runs.iter().all(|runs| runs.len() < MAX_RUNS),
        "a reply holds more runs than a server can send"
    );
    result
}

/// A channel with the server's bytes; a read past them fails or finds the connection closed.
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

    fn set_deadline(&self, _deadline: Option<Instant>) {}

    fn pause(&self, _: std::time::Duration) -> io::Result<()> {
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
    let Ok(mut connection) = Connection::over(Box::new(said.clone()), target, CLIENT_TIMEOUT)
    else {
        return;
    };
    let structured = input.handshake.is_structured();
    let mut broken = false;
    let mut judge = |done: Result<(), Failure>| {
        let Err(failure) = done else {
            assert!(!broken, "a broken connection completed a request");
            return;
        };
        assert_eq!(matches!(failure, Failure::Broken), broken, "{failure}");
        broken |= matches!(
            failure,
            Failure::Protocol(_) | Failure::Lost(_) | Failure::Silent(_) | Failure::ShuttingDown(_)
        );
    };
    let mut cookies = 0;
    for round in &input.rounds {
        let mut messages = Twisted::default();
        if let Some(late) = &round.late {
            let soon = Duration::from_millis(1);
            let done = connection.read_page_soon(0, &mut [0; PAGE_SIZE], soon);
            judge(done.map(drop).map_err(|error| error.failure));
            let read = [Asked::Read { offset: Number::Pages(0), length: Number::Pages(1) }];
            late.iter().for_each(|reply| reply.put(cookies, &read, structured, &mut messages));
            cookies += COOKIES_PER_ROUND;
        }
        round
            .replies
            .iter()
            .for_each(|reply| reply.put(cookies, &round.operations, structured, &mut messages));
        messages.twist(&round.twists);
        said.say(&messages.bytes());
        judge(ask(&mut connection, &round.operations));
        cookies += COOKIES_PER_ROUND;
    }
    assert!(begin.elapsed() < CLIENT_TIMEOUT, "the client waits for an answer that cannot come");
});
