//! Receive buffer of an initiator.

use std::io;

use zerocopy::FromBytes;

use super::{Deadline, Interrupted};
use crate::channel::Channel;

/// Bytes in the buffer: a dozen pages and their headers arrive in one receive. `read` bypasses the
/// buffer while at least half of this is missing.
const STAGING: usize = 64 << 10;

/// Bytes that have arrived and are not yet used. Small items arrive many at a time, large ones are
/// not copied.
#[derive(Debug)]
pub struct Input {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Default for Input {
    fn default() -> Self {
        Self { buffer: vec![0; STAGING].into_boxed_slice(), start: 0, end: 0 }
    }
}

impl Input {
    /// Returns whether the buffer holds no bytes. Bytes that it holds between two rounds answer no
    /// request.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Waits until some bytes are here. Returns false at the deadline.
    ///
    /// # Errors
    /// [`Interrupted::Lost`].
    pub fn wait(
        &mut self,
        channel: &mut dyn Channel,
        deadline: Deadline,
    ) -> Result<bool, Interrupted> {
        if !self.is_empty() {
            return Ok(true);
        }
        match self.fill(channel, deadline) {
            Ok(()) => Ok(true),
            Err(Interrupted::Silent(_)) => Ok(false),
            Err(lost) => Err(lost),
        }
    }

    /// Waits for the next fixed-size item without removing it.
    ///
    /// # Errors
    /// [`Interrupted`].
    pub fn peek<T: FromBytes>(
        &mut self,
        channel: &mut dyn Channel,
        deadline: Deadline,
    ) -> Result<T, Interrupted> {
        while self.end - self.start < size_of::<T>() {
            self.fill(channel, deadline)?;
        }
        let (value, _) = T::read_from_prefix(&self.buffer[self.start..self.end])
            .map_err(|_| Interrupted::Lost(io::ErrorKind::InvalidData.into()))?;
        Ok(value)
    }

    /// Waits for the next fixed-size item and removes it.
    ///
    /// # Errors
    /// [`Interrupted`].
    pub fn take<T: FromBytes>(
        &mut self,
        channel: &mut dyn Channel,
        deadline: Deadline,
    ) -> Result<T, Interrupted> {
        let value = self.peek(channel, deadline)?;
        self.start += size_of::<T>();
        Ok(value)
    }

    /// Waits until `into` is full.
    ///
    /// # Errors
    /// [`Interrupted`].
    pub fn read(
        &mut self,
        channel: &mut dyn Channel,
        deadline: Deadline,
        mut into: &mut [u8],
    ) -> Result<(), Interrupted> {
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
    ///
    /// # Errors
    /// [`Interrupted`].
    pub fn skip(
        &mut self,
        channel: &mut dyn Channel,
        deadline: Deadline,
        count: usize,
    ) -> Result<(), Interrupted> {
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

    fn fill(&mut self, channel: &mut dyn Channel, deadline: Deadline) -> Result<(), Interrupted> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        self.end += deadline.recv(channel, &mut self.buffer[self.end..])?;
        Ok(())
    }
}
