//! The demo's side of a guest's first process: it asks the process to hold memory.

use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use aquifer_cli::failure::{Failure, OrFail, Result};
use aquifer_page::Bytes;

use super::guest::HOLDS;
use super::wait::Wait;

/// How long the guest may take to boot, or to fill and check its memory.
pub(super) const TIMEOUT: Duration = Duration::from_secs(180);

/// A part of the memory that the guest's process holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    /// Its number.
    pub(super) number: u64,
    /// The seed of its content.
    pub(super) seed: u64,
}

/// A reply of the guest's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holds {
    pub(super) part: Part,
    /// Bytes that it holds of that part.
    pub(super) held: Bytes,
    /// MiB with wrong content, of all parts.
    pub(super) wrong: u64,
    /// Errors in the log of its kernel.
    pub(super) errors: u64,
}

/// A connection to the guest's process, over the guest's serial port.
#[derive(Debug)]
pub(super) struct User<'a> {
    port: BufReader<UnixStream>,
    pub(super) wait: Wait<'a>,
}

impl<'a> User<'a> {
    /// Connects to the serial port of a booting guest; output before the connection is lost.
    pub(super) fn meet(serial: &Path, wait: Wait<'a>) -> Result<Self> {
        let what = || "starting the guest";
        let port = wait.until(what(), TIMEOUT, || Ok(UnixStream::connect(serial).ok()))?;
        // Reads must not block, so that `wait` can end them.
        port.set_nonblocking(true).or_fail(what)?;
        Ok(Self { port: BufReader::new(port), wait })
    }

    /// Waits for the first reply, which says that the guest listens.
    pub(super) fn is_there(&mut self) -> Result<Holds> {
        self.listen(Part::default(), Bytes::ZERO)
    }

    /// Lets the guest hold so much of a part, and check every byte of all parts.
    pub(super) fn hold(&mut self, part: Part, size: Bytes) -> Result<Holds> {
        self.tell(part, size)?;
        self.listen(part, size)
    }

    /// Sends the request to hold so much of a part.
    pub(super) fn tell(&mut self, Part { number, seed }: Part, size: Bytes) -> Result<()> {
        writeln!(self.port.get_mut(), "{number} {seed} {}", size.0 >> 20).or_fail(|| what(size))
    }

    /// Waits for the reply to that request.
    pub(super) fn listen(&mut self, part: Part, size: Bytes) -> Result<Holds> {
        let mut line = String::new();
        self.wait.until(&what(size), TIMEOUT, || {
            loop {
                match self.port.read_line(&mut line) {
                    Ok(0) => return Err(Failure::new(what(size), "it has ended")),
                    Ok(_) => {
                        let is = |holds: &Holds| {
                            holds.part == part && holds.held.0 >> 20 == size.0 >> 20
                        };
                        let holds = parse(&line).filter(is);
                        line.clear();
                        if holds.is_some() {
                            return Ok(holds);
                        }
                    }
                    // The rest of the line follows later.
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                    Err(error) => return Err(Failure::new(what(size), error)),
                }
            }
        })
    }
}

fn what(size: Bytes) -> String {
    format!("having the guest use {size}")
}

fn parse(line: &str) -> Option<Holds> {
    let (_, words) = line.trim().split_once(HOLDS)?;
    let mut numbers = words.split_whitespace().map(str::parse::<u64>);
    let mut next = || numbers.next()?.ok();
    let part = Part { number: next()?, seed: next()? };
    Some(Holds { part, held: Bytes::mib(next()?), wrong: next()?, errors: next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guests_answer_is_understood_after_kernel_messages() {
        let holds = parse("[    1.0] x holds 1 7 96 0 2\r\n").unwrap();
        let part = Part { number: 1, seed: 7 };
        assert_eq!(holds, Holds { part, held: Bytes::mib(96), wrong: 0, errors: 2 });
        assert_eq!(parse("1 7 96"), None);
        assert_eq!(parse("holds 1 7"), None);
    }
}
