//! Load test of a namespace: `nvme_check URI HOST_NQN SECONDS [digests] [SECRETS_FILE]`.
//!
//! The test keeps many commands in flight on each of four queues and checks every byte. The test
//! overwrites the namespace. With a count such as `100x` as SECONDS, the test only connects that
//! often, and checks that no descriptor or thread is left.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use aquifer_nvme::NvmeUri;
use aquifer_nvme::initiator::{Connection, NvmeError, Operation, Session, Target};

const WORKERS: u64 = 4;
const TIMEOUT: Duration = Duration::from_secs(20);
/// Unit of writes and of the expected content, in bytes.
const PIECE: usize = 4096;
/// Length of a long write in pieces: too long for any capsule.
const LONG: u64 = 40;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let (Some(uri), Some(host), Some(seconds)) = (args.next(), args.next(), args.next()) else {
        return Err("usage: nvme_check URI HOST_NQN SECONDS|TIMESx [digests] [SECRETS_FILE]".into());
    };
    let uri: NvmeUri = uri.parse()?;
    let mut target = Target::new(uri.address, uri.subsystem, host.parse()?);
    for more in args {
        if more == "digests" {
            (target.header_digest, target.data_digest) = (true, true);
        } else {
            target.secrets = Some(fs::read_to_string(more)?.parse()?);
        }
    }
    if let Some(times) = seconds.strip_suffix('x') {
        return connect_often(&Arc::new(target), times.parse()?);
    }
    let session = Session::new(Arc::new(target));
    let time = Duration::from_secs_f64(seconds.parse()?);
    let passed = thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|number| {
                scope.spawn({
                    let session = &session;
                    move || work(session, number, time)
                })
            })
            .collect();
        let passed = workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|_| Err("a worker failed".into())));
        passed.collect::<Result<Vec<u64>, _>>()
    });
    let passed = passed.map_err(|error| -> Box<dyn Error> { error })?;
    println!("checked {} pieces, all are as they were written", passed.iter().sum::<u64>());
    Ok(())
}

/// Connects `times` times in sequence, and reads once over each connection.
fn connect_often(target: &Arc<Target>, times: u32) -> Result<(), Box<dyn Error>> {
    let before = kept()?;
    for _ in 0..times {
        Connection::connect(Arc::clone(target), TIMEOUT)?.read(0, &mut [0; PIECE])?;
    }
    // The keep-alive threads end by themselves.
    let deadline = Instant::now() + TIMEOUT;
    while kept()? != before {
        if Instant::now() > deadline {
            return Err(
                format!("descriptors and threads: first {before:?}, then {:?}", kept()?).into()
            );
        }
        thread::sleep(Duration::from_millis(10));
    }
    println!("connected {times} times, nothing is left of it");
    Ok(())
}

/// Returns the number of file descriptors and of threads of this process.
fn kept() -> io::Result<[usize; 2]> {
    Ok([fs::read_dir("/proc/self/fd")?.count(), fs::read_dir("/proc/self/task")?.count()])
}

/// State of a worker; `written` is the seed of each of its pieces, 0 for zeroes.
struct Worker {
    connection: Connection,
    base: u64,
    written: Vec<u64>,
    random: u64,
    passed: u64,
}

fn work(
    session: &Session,
    number: u64,
    time: Duration,
) -> Result<u64, Box<dyn Error + Send + Sync>> {
    let mut connection = session.connect(TIMEOUT)?;
    let pieces = connection.size().0 / PIECE as u64 / WORKERS;
    let base = number * pieces * PIECE as u64;
    let length = u32::try_from(pieces * PIECE as u64)?;
    zero(&mut connection, base, length)?;
    let written = vec![0; pieces as usize];
    let mut worker = Worker { connection, base, written, random: number + 1, passed: 0 };
    let started = Instant::now();
    let mut turns = 0;
    while started.elapsed() < time || turns < 20 {
        worker.write_many()?;
        worker.write_long()?;
        worker.take_away()?;
        worker.check(64)?;
        turns += 1;
        if turns % 10 == 0 {
            worker.connection.flush()?;
            worker.connection = session.connect(TIMEOUT)?;
        }
    }
    worker.check(pieces)?;
    Ok(worker.passed)
}

impl Worker {
    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    fn at(&self, piece: u64) -> u64 {
        self.base + piece * PIECE as u64
    }

    fn pieces(&self) -> u64 {
        self.written.len() as u64
    }

    /// Writes 100 different pieces at once.
    fn write_many(&mut self) -> Result<(), NvmeError> {
        let first = self.below(self.pieces());
        let seed = self.below(u64::MAX - 1) + 1;
        let places: Vec<u64> = (0..100).map(|step| (first + step * 7) % self.pieces()).collect();
        let data: Vec<_> = places.iter().map(|piece| content(*piece, seed)).collect();
        let mut operations: Vec<_> = places
            .iter()
            .zip(&data)
            .map(|(piece, from)| Operation::Write { offset: self.at(*piece), from })
            .collect();
        self.connection.run(&mut operations)?;
        places.iter().for_each(|piece| self.written[*piece as usize] = seed);
        Ok(())
    }

    fn write_long(&mut self) -> Result<(), NvmeError> {
        let first = self.below(self.pieces() - LONG);
        let seed = self.below(u64::MAX - 1) + 1;
        let data: Vec<u8> = (first..first + LONG).flat_map(|piece| content(piece, seed)).collect();
        self.connection.write(self.at(first), &data)?;
        self.written[first as usize..][..LONG as usize].fill(seed);
        Ok(())
    }

    /// Trims a range, where the controller can, and then writes zeroes to it.
    fn take_away(&mut self) -> Result<(), NvmeError> {
        let first = self.below(self.pieces() - LONG);
        let (offset, length) = (self.at(first), LONG as u32 * PIECE as u32);
        if self.connection.can_trim() {
            // Trim is advice: the target may be unable to follow it.
            self.connection
                .trim(offset, length)
                .or_else(|error| if error.ends_connection() { Err(error) } else { Ok(()) })?;
        }
        zero(&mut self.connection, offset, length)?;
        self.written[first as usize..][..LONG as usize].fill(0);
        Ok(())
    }

    /// Reads `count` pieces from a random place on, both as one batch and as one long read.
    fn check(&mut self, count: u64) -> Result<(), Box<dyn Error + Send + Sync>> {
        let first = self.below(self.pieces() - count + 1);
        let mut data = vec![0xee; count as usize * PIECE];
        let mut operations: Vec<_> = data
            .chunks_mut(PIECE)
            .zip(first..)
            .map(|(into, piece)| Operation::Read { offset: self.base + piece * PIECE as u64, into })
            .collect();
        self.connection.run(&mut operations)?;
        let mut again = vec![0xee; data.len()];
        self.connection.read(self.at(first), &mut again)?;
        for (piece, (one, two)) in (first..).zip(data.chunks(PIECE).zip(again.chunks(PIECE))) {
            let wanted = content(piece, self.written[piece as usize]);
            if one != wanted || two != wanted {
                return Err(format!(
                    "piece {piece} from {:#x} on is not as it was written",
                    self.base
                )
                .into());
            }
        }
        self.passed += count;
        Ok(())
    }
}

/// Writes zeroes, as data where Write Zeroes fails: Linux's target offers it even for files on file
/// systems that cannot do it.
fn zero(connection: &mut Connection, offset: u64, length: u32) -> Result<(), NvmeError> {
    match connection.write_zeroes(offset, length) {
        Err(error) if !error.ends_connection() => {
            connection.write(offset, &vec![0; length as usize])
        }
        done => done,
    }
}

fn content(piece: u64, seed: u64) -> [u8; PIECE] {
    let mut bytes = [0; PIECE];
    if seed != 0 {
        for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
            let value = (piece * 512 + at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed;
            word.copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}
