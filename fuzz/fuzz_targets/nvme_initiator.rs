//! A fuzz target that runs the NVMe/TCP initiator against a real target, with a man in the middle.
#![no_main]
#![allow(clippy::unwrap_used, reason = "a panic reports a finding")]

#[path = "../../crates/transport/tests/transport/common/mod.rs"]
mod common;
#[path = "../../crates/nvme/tests/nvme/nvme_target/harness.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod harness;
#[path = "../../crates/nvme/tests/nvme/nvme_target/host.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod host;
#[path = "nvme/middle.rs"]
mod middle;
#[path = "nvme/script.rs"]
#[allow(dead_code, reason = "broken hosts use all of it")]
mod script;
#[path = "../../crates/store/tests/store/common/mod.rs"]
mod stores;

use std::cell::RefCell;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_fuzz::{secret, secrets};
use aquifer_nvme::auth::Secrets;
use aquifer_nvme::initiator::{Connection, Failure, NvmeError, Operation, Target};
use aquifer_nvme::proto::pdu::{Shape, digests};
use aquifer_nvme::target::Limits;
use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_transport::Address;
use aquifer_transport::initiating::Pipelined as _;
use arbitrary::{Arbitrary, Unstructured};
use common::pattern;
use harness::Served;
use host::HOST;
use libfuzzer_sys::fuzz_target;
use middle::{Done, FOREIGN_BYTE, Mischief, carry};

/// The initiator's timeout. It must never pass: the middle closes a deceived connection first.
const INITIATOR_TIMEOUT: Duration = Duration::from_secs(10);
const LEASE_CAPACITY: Bytes = Bytes::mib(2);
/// Bytes at the start that the rounds only read; they write the rest.
const READ_ONLY_BYTES: usize = 1 << 20;
/// One in this many inputs with authentication gets it, as it takes a hundred times as long as the
/// rest.
const INPUTS_PER_PROOF: u32 = 64;
/// The most operations of one batch: more than can be in flight.
const MAX_BATCH: usize = 70;

/// The mischief on both queues, and the initiator's operations.
#[derive(Arbitrary, Debug)]
struct Input<'a> {
    header_digest: bool,
    data_digest: bool,
    proof: Proof,
    admin: Mischief<'a>,
    io: Mischief<'a>,
    /// Whether a read whose answer is always late comes first, and the batch.
    rounds: Vec<(bool, Vec<Asked>)>,
}

/// The sides that authenticate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proof {
    Nobody,
    /// The initiator could, but the target does not demand it.
    NotAsked,
    Host,
    Both,
}

impl<'a> Arbitrary<'a> for Proof {
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        Ok(match u.arbitrary::<u8>()? {
            0..208 => Self::Nobody,
            208..224 => Self::NotAsked,
            224..240 => Self::Host,
            240.. => Self::Both,
        })
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Asked {
    Read { start: u8, pages: Pages },
    Write { start: u8, pages: Pages },
    Trim { start: u8, pages: Pages },
    WriteZeroes { start: u8, pages: Pages },
    Flush,
}

/// A number of pages, rarely large.
#[derive(Clone, Copy, Debug)]
struct Pages(usize);

impl<'a> Arbitrary<'a> for Pages {
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let number: u8 = u.arbitrary()?;
        Ok(Self(usize::from(number) % if number < 240 { 4 } else { 33 }))
    }
}

impl Asked {
    /// Returns the first byte and the number of bytes.
    fn range(self) -> (usize, usize) {
        match self {
            Self::Read { start, pages } => (usize::from(start) * PAGE_SIZE, pages.0 * PAGE_SIZE),
            Self::Write { start, pages }
            | Self::Trim { start, pages }
            | Self::WriteZeroes { start, pages } => {
                (READ_ONLY_BYTES + usize::from(start) * PAGE_SIZE, pages.0 * PAGE_SIZE)
            }
            Self::Flush => (0, 0),
        }
    }
}

/// The unexpected bytes that completed reads have returned.
#[derive(Default)]
struct Returned {
    /// Bytes of invented data.
    foreign: bool,
    /// Bytes that neither the target nor the middle sent as such.
    strange: bool,
}

/// A target, and the address of the middle before it.
struct World {
    served: Served,
    listener: UnixListener,
    address: Address,
    content: Vec<u8>,
    /// The number of inputs with authentication.
    proving: AtomicU32,
}

impl World {
    fn new() -> Self {
        let served = Served::with(LEASE_CAPACITY, LEASE_CAPACITY, Limits::default());
        let path = served.dir.path().join("middle");
        let content = pattern(READ_ONLY_BYTES, 1);
        served.lease.write(0, &content).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        Self { served, listener, address: Address::Unix(path), content, proving: AtomicU32::new(0) }
    }

    fn run(&self, input: &Input<'_>) {
        let secrets = match input.proof {
            Proof::Nobody => None,
            Proof::NotAsked | Proof::Host => Some(Secrets { host: secret(), controller: None }),
            Proof::Both => Some(secrets()),
        };
        let wants = matches!(input.proof, Proof::Host | Proof::Both);
        let asks =
            wants && self.proving.fetch_add(1, Ordering::Relaxed).is_multiple_of(INPUTS_PER_PROOF);
        *self.served.registry.secrets.lock().unwrap() = secrets.clone().filter(|_| asks);
        let mut target =
            Target::new(self.address.clone(), self.served.subsystem.clone(), HOST.parse().unwrap());
        (target.header_digest, target.data_digest) = (input.header_digest, input.data_digest);
        target.secrets = secrets;
        let header = if input.header_digest { digests::HEADER } else { 0 };
        let shape = Shape::new(header | if input.data_digest { digests::DATA } else { 0 }, 0);
        let (stop, stopped) = UnixStream::pair().unwrap();
        let (returned, [admin, io]) = thread::scope(|scope| {
            let mischiefs = [&input.admin, &input.io];
            let serve = |stream| self.served.target.serve(stream, &self.address);
            let middle =
                scope.spawn(move || carry(&self.listener, &stopped, shape, mischiefs, serve));
            let returned = self.ask(target, &input.rounds);
            drop(stop);
            (returned, middle.join().unwrap())
        });
        if admin == Done::default() {
            let proven = input.header_digest && input.data_digest;
            assert!(
                !returned.strange || io.twisted && !proven,
                "a read returned bytes that the target never sent"
            );
            assert!(
                !returned.foreign || io.said || io.twisted && !proven,
                "a read returned foreign bytes"
            );
        } else {
            // A deceived initiator may have written to other blocks.
            self.served.lease.write(0, &self.content).unwrap();
        }
        assert_eq!(self.served.queues(), 0, "all queues must have ended");
    }

    /// Connects and runs all rounds.
    fn ask(&self, target: Target, rounds: &[(bool, Vec<Asked>)]) -> Returned {
        let begin = Instant::now();
        let mut returned = Returned::default();
        let Ok(mut connection) = Connection::connect(Arc::new(target), INITIATOR_TIMEOUT) else {
            let elapsed = begin.elapsed();
            assert!(elapsed < INITIATOR_TIMEOUT, "the initiator waits for an impossible answer");
            return returned;
        };
        let mut broken = false;
        let mut judge = |done: Result<(), NvmeError>| {
            let Err(error) = done else {
                assert!(!broken, "a broken connection completed a request");
                return;
            };
            assert_eq!(matches!(error.failure, Failure::Broken), broken, "{error}");
            broken |= error.ends_connection();
        };
        for (is_late, round) in rounds {
            if *is_late {
                let read = connection.read_page_soon(0, &mut [0; PAGE_SIZE], Duration::ZERO);
                judge(read.map(|is_here| assert!(!is_here, "nobody waited for the answer")));
            }
            judge(self.ask_together(&mut connection, round, &mut returned));
        }
        drop(connection);
        let elapsed = begin.elapsed();
        assert!(elapsed < INITIATOR_TIMEOUT, "the initiator waits for an impossible answer");
        returned
    }

    fn ask_together(
        &self,
        connection: &mut Connection,
        asked: &[Asked],
        returned: &mut Returned,
    ) -> Result<(), NvmeError> {
        let asked = &asked[..asked.len().min(MAX_BATCH)];
        let mut buffers: Vec<_> = asked.iter().map(|asked| vec![0; asked.range().1]).collect();
        let operation = |(asked, buffer): (&Asked, _)| {
            let (offset, length) = asked.range();
            let (offset, length, into): (_, _, &mut Vec<u8>) =
                (offset as u64, length as u32, buffer);
            match asked {
                Asked::Read { .. } => Operation::Read { offset, into },
                Asked::Write { .. } => Operation::Write { offset, from: into },
                Asked::Trim { .. } => Operation::Trim { offset, length },
                Asked::WriteZeroes { .. } => Operation::WriteZeroes { offset, length },
                Asked::Flush => Operation::Flush,
            }
        };
        let mut operations: Vec<_> = asked.iter().zip(&mut buffers).map(operation).collect();
        connection.run(&mut operations)?;
        drop(operations);
        for (asked, buffer) in asked.iter().zip(&buffers) {
            if let Asked::Read { .. } = asked {
                let content = self.content.get(asked.range().0..).unwrap_or_default();
                for (there, _) in buffer.iter().zip(content).filter(|(there, right)| there != right)
                {
                    returned.foreign |= *there == FOREIGN_BYTE;
                    returned.strange |= *there != FOREIGN_BYTE;
                }
            }
        }
        Ok(())
    }
}

thread_local!(static WORLD: RefCell<Option<World>> = const { RefCell::new(None) });

fuzz_target!(|input: Input| {
    WORLD.with_borrow_mut(|world| world.get_or_insert_with(World::new).run(&input));
});
