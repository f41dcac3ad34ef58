//! A client of memcached's text protocol, with values that can be checked.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_page::Bytes;

/// The length of the shortest value in bytes; others are up to `SPREAD` bytes longer.
const SHORTEST: u64 = 600;
const SPREAD: u64 = 1000;

/// The values of a demo; the content of each follows from its number.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) values: u64,
}

/// The result of reading all values back.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) values: u64,
    pub(super) right: u64,
    pub(super) missing: u64,
    pub(super) took: Duration,
}

/// Computes the next output of SplitMix64.
fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

impl Load {
    /// Returns as many values as fill most of a memcached of this size.
    ///
    /// The rest is for memcached itself, which drops values rather than grow.
    pub(super) fn filling(size: Bytes) -> Self {
        let room = size.saturating_sub(Bytes::mib(24));
        Self { values: room.0 / 10 * 7 / (SHORTEST + SPREAD / 2 + 64) }
    }

    fn value(&self, number: u64, into: &mut Vec<u8>) {
        into.clear();
        let length = (SHORTEST + mix(number) % SPREAD) as usize;
        let words = (0..length.div_ceil(8) as u64).map(|word| mix(number << 16 | word));
        into.extend(words.flat_map(u64::to_le_bytes));
        into.truncate(length);
    }

    /// Returns each value's number once, in random order: a linear congruential generator over the
    /// next power of two.
    fn shuffled(&self) -> impl Iterator<Item = u64> {
        let modulus = self.values.next_power_of_two();
        let mut at = 0_u64;
        (0..modulus).filter_map(move |_| {
            at = at.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f)
                % modulus;
            (at < self.values).then_some(at)
        })
    }
}

/// A connection to memcached.
#[derive(Debug)]
pub(super) struct Client {
    reader: BufReader<UnixStream>,
    chance: u64,
}

impl Client {
    /// Connects as soon as memcached listens.
    pub(super) fn connect(socket: &Path, timeout: Duration) -> Result<Self> {
        let deadline = Instant::now() + timeout;
        loop {
            match UnixStream::connect(socket) {
                Ok(stream) => return Ok(Self { reader: BufReader::new(stream), chance: 1 }),
                Err(error) if Instant::now() > deadline => {
                    return Err(Failure::new("waiting for memcached", error));
                }
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Stores all values, and waits for the acknowledgement of each.
    pub(super) fn write(&mut self, load: &Load, interrupted: &AtomicBool) -> Result<()> {
        let (mut value, mut request) = (Vec::new(), Vec::new());
        for number in 0..load.values {
            go_on(interrupted)?;
            load.value(number, &mut value);
            request.clear();
            request.extend_from_slice(format!("set {number} 0 0 {}\r\n", value.len()).as_bytes());
            request.extend_from_slice(&value);
            request.extend_from_slice(b"\r\n");
            let answer = self.reader.get_mut().write_all(&request).and_then(|()| self.line());
            match answer.or_fail(|| "writing to memcached")?.as_str() {
                "STORED" => {}
                other => {
                    return Err(Failure::new(
                        format!("writing value {number}"),
                        format!("memcached says '{other}'"),
                    ));
                }
            }
        }
        Ok(())
    }

    /// Reads all values and compares every byte.
    pub(super) fn read(&mut self, load: &Load, interrupted: &AtomicBool) -> Result<Read> {
        let (mut should, mut is) = (Vec::new(), Vec::new());
        let (mut right, mut missing) = (0, 0);
        let began = Instant::now();
        for number in load.shuffled() {
            go_on(interrupted)?;
            load.value(number, &mut should);
            let found = self.get(number, &mut is).or_fail(|| "reading from memcached")?;
            right += u64::from(found && is == should);
            missing += u64::from(!found);
        }
        Ok(Read { values: load.values, right, missing, took: began.elapsed() })
    }

    /// Reads one random value, and does not compare it.
    pub(super) fn read_one(&mut self, load: &Load, interrupted: &AtomicBool) -> Result<()> {
        go_on(interrupted)?;
        self.chance = mix(self.chance);
        let mut is = Vec::new();
        self.get(self.chance % load.values, &mut is)
            .or_fail(|| "reading from memcached")
            .map(|_| ())
    }

    fn get(&mut self, number: u64, into: &mut Vec<u8>) -> io::Result<bool> {
        self.reader.get_mut().write_all(format!("get {number}\r\n").as_bytes())?;
        let header = self.line()?;
        let Some(length) =
            header.strip_prefix("VALUE ").and_then(|rest| rest.rsplit(' ').next()?.parse().ok())
        else {
            return Ok(false);
        };
        into.resize(length, 0);
        self.reader.read_exact(into)?;
        let end = [self.line()?, self.line()?];
        Ok(end == ["", "END"])
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "memcached has closed the connection",
            ));
        }
        Ok(line.trim_end().to_owned())
    }
}

fn go_on(interrupted: &AtomicBool) -> Result<()> {
    if interrupted.load(Ordering::Relaxed) {
        return Err(Failure::new("showing a region", "interrupted"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_value_is_read_once() {
        let load = Load { values: 1000 };
        let order: Vec<_> = load.shuffled().collect();
        assert_eq!(order.len(), 1000);
        assert_eq!(order.iter().collect::<HashSet<_>>().len(), 1000);
        assert!(order.windows(2).filter(|pair| pair[0] < pair[1]).count() < 600, "by chance");
    }

    #[test]
    fn values_differ() {
        let load = Load { values: 100 };
        let (mut one, mut other) = (Vec::new(), Vec::new());
        let all: HashSet<_> = (0..100)
            .map(|number| {
                load.value(number, &mut one);
                load.value(number, &mut other);
                assert_eq!(one, other);
                one.clone()
            })
            .collect();
        assert_eq!(all.len(), 100);
    }
}
