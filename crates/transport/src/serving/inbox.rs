//! Receive buffer of a server's connection.

use std::io;

use crate::channel::Channel;

/// Bytes in an [`Inbox`]: one receive takes 32 writes of a page each, twice over.
pub const INBOX: usize = 256 << 10;

/// Bytes that have arrived and are not yet used.
#[derive(Debug)]
pub struct Inbox {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Default for Inbox {
    fn default() -> Self {
        Self { buffer: vec![0; INBOX].into_boxed_slice(), start: 0, end: 0 }
    }
}

impl Inbox {
    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Drops the first `count` bytes.
    pub fn consume(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end);
    }

    /// Waits for more bytes; returns `false` at the end of the stream. The bytes already there
    /// stay, and must be fewer than [`INBOX`].
    ///
    /// # Errors
    /// The channel's error.
    pub fn fill(&mut self, channel: &mut dyn Channel) -> io::Result<bool> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let received = channel.recv(&mut self.buffer[self.end..])?;
        self.end += received;
        Ok(received > 0)
    }
}
