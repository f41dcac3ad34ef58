//! What has arrived and is not used yet.

use std::io;
use std::time::{Duration, Instant};

use zerocopy::FromBytes;

use super::Failure;
use crate::channel::Channel;

/// Enough for a dozen pages in one receive; longer payloads go straight to where they belong.
const STAGING: usize = 64 << 10;

/// A receive buffer. Small things are received many at a time, large ones without a copy.
#[derive(Debug)]
pub(super) struct Input {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

/// How long a round of operations may take: to the deadline, and `patience` beyond it for whatever is under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    at: Instant,
    patience: Duration,
}

impl Deadline {
    pub(super) fn after(patience: Duration) -> Self {
        Self { at: Instant::now() + patience, patience }
    }

    /// Receives with the time-out that the socket is set to. Bytes that trickle in do not put the deadline off.
    pub(super) fn recv(self, channel: &mut dyn Channel, into: &mut [u8]) -> Result<usize, Failure> {
        match channel.recv(into) {
            Ok(0) => Err(Failure::Lost(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed it"))),
            Ok(_) if Instant::now() > self.at => Err(Failure::Silent(self.patience)),
            Ok(received) => Ok(received),
            Err(error) => Err(self.failure(error)),
        }
    }

    /// What an error of the channel means.
    pub(super) fn failure(self, error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Failure::Silent(self.patience),
            _ => Failure::Lost(error),
        }
    }
}

impl Input {
    pub(super) fn new() -> Self {
        Self { buffer: vec![0; STAGING].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Whether something came that nobody asked for.
    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Waits for the next fixed-size piece without taking it.
    pub(super) fn peek<T: FromBytes>(
        &mut self,
        channel: &mut dyn Channel,
        deadline: Deadline,
    ) -> Result<T, Failure> {
        while self.end - self.start < size_of::<T>() {
            self.fill(channel, deadline)?;
        }
        let (value, _) = T::read_from_prefix(&self.buffer[self.start..self.end])
            .map_err(|_| Failure::protocol("a piece that is too short"))?;
        Ok(value)
    }

    /// Waits for the next fixed-size piece and takes it.
    pub(super) fn take<T: FromBytes>(
        &mut self,
        channel: &mut dyn Channel,
        deadline: Deadline,
    ) -> Result<T, Failure> {
        let value = self.peek(channel, deadline)?;
        self.start += size_of::<T>();
        Ok(value)
    }

    /// Waits for all of `into`.
    pub(super) fn read(
        &mut self,
        channel: &mut dyn Channel,
        deadline: Deadline,
        mut into: &mut [u8],
    ) -> Result<(), Failure> {
        loop {
            let count = into.len().min(self.end - self.start);
            let (now, later) = into.split_at_mut(count);
            now.copy_from_slice(&self.buffer[self.start..self.start + count]);
            self.start += count;
            into = later;
            if into.is_empty() {
                return Ok(());
            }
            if into.len() >= STAGING / 2 {
                let received = deadline.recv(channel, into)?;
                into = &mut into[received..];
            } else {
                self.fill(channel, deadline)?;
            }
        }
    }

    /// Waits for `count` bytes and drops them.
    pub(super) fn skip(
        &mut self,
        channel: &mut dyn Channel,
        deadline: Deadline,
        count: usize,
    ) -> Result<(), Failure> {
        let mut left = count;
        loop {
            let some = left.min(self.end - self.start);
            self.start += some;
            left -= some;
            if left == 0 {
                return Ok(());
            }
            self.fill(channel, deadline)?;
        }
    }

    fn fill(&mut self, channel: &mut dyn Channel, deadline: Deadline) -> Result<(), Failure> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        self.end += deadline.recv(channel, &mut self.buffer[self.end..])?;
        Ok(())
    }
}
