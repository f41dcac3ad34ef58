//! A benchmark of random page reads over 64 MiB:
//! `page_reads bare|nbd|nvme HOST:PORT DEPTH SECONDS [NQN]`.
//!
//! Each round sends `DEPTH` reads together and waits for all replies. For NBD and NVMe the program
//! first writes each page with its own content, and checks the pages of the last round. It prints
//! pages per second and the median duration of a round in microseconds.

use std::error::Error;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{array, env};

use aquifer_nbd::client as nbd;
use aquifer_nvme::initiator as nvme;
use aquifer_nvme::proto::Nqn;
use aquifer_page::PAGE_SIZE;
use aquifer_transport::Address;
use aquifer_transport::channel::{Channel, Socket};
use nbd::Operation;

const PAGES: u64 = 64 << 8;
const MOST: usize = 64;
const REQUEST: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(10);
const HOST: &str = "nqn.2014-08.org.example:page-reads";

/// The server of the pages.
enum Source {
    /// `ping_pong`, with a buffer for the pages of a round.
    Bare(Socket, Box<[u8]>),
    Nbd(nbd::Connection),
    Nvme(nvme::Connection),
}

impl Source {
    fn run(&mut self, operations: &mut [Operation<'_>]) -> Result<(), Box<dyn Error>> {
        match self {
            Self::Bare(socket, room) => {
                ping(socket, &mut room[..operations.len() * PAGE_SIZE], operations)
            }
            Self::Nbd(connection) => Ok(connection.run(operations)?),
            Self::Nvme(connection) => Ok(connection.run(operations)?),
        }
    }
}

/// Requests all pages and receives them in order, without a header to parse.
fn ping(
    socket: &mut Socket,
    into: &mut [u8],
    operations: &[Operation<'_>],
) -> Result<(), Box<dyn Error>> {
    let mut requests = [0; MOST * REQUEST];
    for (request, operation) in requests.chunks_mut(REQUEST).zip(operations) {
        if let Operation::Read { offset, .. } = operation {
            request[..2].copy_from_slice(&((*offset / PAGE_SIZE as u64) as u16).to_le_bytes());
        }
    }
    socket.send_all(&mut [IoSlice::new(&requests[..operations.len() * REQUEST])])?;
    let mut there = 0;
    while there < into.len() {
        match socket.recv(&mut into[there..])? {
            0 => return Err("the other end is gone".into()),
            received => there += received,
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<_> = env::args().skip(1).collect();
    let [kind, address, depth, seconds, rest @ ..] = &args[..] else {
        return Err("usage: page_reads bare|nbd|nvme HOST:PORT DEPTH SECONDS [NQN]".into());
    };
    let address: Address = address.parse()?;
    let depth: usize = depth.parse::<usize>()?.clamp(1, MOST);
    let mut source = match (kind.as_str(), rest) {
        ("bare", []) => {
            let room = vec![0; MOST * PAGE_SIZE].into_boxed_slice();
            Source::Bare(Socket::connect(&address, TIMEOUT)?, room)
        }
        ("nbd", []) => {
            let target = nbd::Target { address, export: String::new(), tls: None };
            Source::Nbd(nbd::Connection::connect(Arc::new(target), TIMEOUT)?)
        }
        ("nvme", [nqn]) => {
            let target = nvme::Target::new(address, nqn.parse::<Nqn>()?, HOST.parse()?);
            Source::Nvme(nvme::Connection::connect(Arc::new(target), TIMEOUT)?)
        }
        _ => return Err("bare, nbd or nvme, and for nvme the subsystem's name".into()),
    };
    let is_bare = matches!(source, Source::Bare(..));
    for page in (0..PAGES).filter(|_| !is_bare) {
        let data = content(page);
        source.run(&mut [Operation::Write { offset: page * PAGE_SIZE as u64, from: &data }])?;
    }
    let (rate, median) =
        measure(&mut source, depth, Duration::from_secs_f64(seconds.parse()?), is_bare)?;
    println!("{rate:.0} {median:.2}");
    Ok(())
}

/// Returns the pages per second and the median duration of a round in microseconds.
fn measure(
    source: &mut Source,
    depth: usize,
    time: Duration,
    is_bare: bool,
) -> Result<(f64, f64), Box<dyn Error>> {
    let mut buffers = vec![[0; PAGE_SIZE]; depth];
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut rounds = Vec::with_capacity(1 << 22);
    let mut pages = [0; MOST];
    let started = Instant::now();
    while started.elapsed() < time {
        for page in &mut pages {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            *page = random % PAGES;
        }
        let mut places = pages.iter().zip(&mut buffers);
        let mut operations: [_; MOST] = array::from_fn(|_| match places.next() {
            Some((page, into)) => Operation::Read { offset: page * PAGE_SIZE as u64, into },
            None => Operation::Flush,
        });
        let began = Instant::now();
        source.run(&mut operations[..depth])?;
        rounds.push(began.elapsed());
    }
    let rate = (rounds.len() * depth) as f64 / started.elapsed().as_secs_f64();
    for (page, buffer) in pages.iter().zip(&buffers).filter(|_| !is_bare) {
        assert!(*buffer == content(*page), "page {page} is not what was written");
    }
    rounds.sort_unstable();
    Ok((rate, rounds[rounds.len() / 2].as_secs_f64() * 1e6))
}

fn content(page: u64) -> [u8; PAGE_SIZE] {
    let mut bytes = [0; PAGE_SIZE];
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(page * 512 + at as u64 + 1).to_le_bytes());
    }
    bytes
}
