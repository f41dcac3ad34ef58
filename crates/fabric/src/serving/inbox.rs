use std::io;

use crate::channel::Channel;

/// Bytes in an [`Inbox`]. What one receive can take: 32 writes of a page each, twice over.
pub(crate) const INBOX: usize = 256 << 10;

/// What has arrived and is not used yet.
pub(crate) struct Inbox {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(crate) fn new() -> Self {
        Self { buffer: vec![0; INBOX].into_boxed_slice(), start: 0, end: 0 }
    }

    /// The bytes there are.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Uses up the first `count` bytes.
    pub(crate) fn consume(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end);
    }

    /// Waits for more bytes. What is there stays, and must be less than [`INBOX`]; `false` is the end.
    pub(crate) fn fill(&mut self, channel: &mut dyn Channel) -> io::Result<bool> {
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
