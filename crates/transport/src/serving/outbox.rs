//! Send buffer of a server's connection.

use std::io::{self, IoSlice};

use zerocopy::{Immutable, IntoBytes};

use crate::channel::Channel;

/// Bytes in an [`Outbox`]: one send carries the replies to 32 reads of a page each, twice over.
pub const OUTBOX: usize = 256 << 10;

/// Replies that are not yet sent.
#[derive(Debug)]
pub struct Outbox {
    buffer: Box<[u8]>,
    length: usize,
}

impl Default for Outbox {
    fn default() -> Self {
        Self { buffer: vec![0; OUTBOX].into_boxed_slice(), length: 0 }
    }
}

impl Outbox {
    /// Makes room for `count` bytes; if they do not fit, sends the bytes already there.
    ///
    /// # Errors
    /// The channel's error.
    pub fn reserve(&mut self, count: usize, channel: &mut dyn Channel) -> io::Result<()> {
        if self.buffer.len() - self.length < count { self.flush(channel) } else { Ok(()) }
    }

    /// Sends all bytes and waits for the client if necessary.
    ///
    /// # Errors
    /// The channel's error.
    pub fn flush(&mut self, channel: &mut dyn Channel) -> io::Result<()> {
        if self.length == 0 {
            return Ok(());
        }
        let length = std::mem::take(&mut self.length);
        channel.send_all(&mut [IoSlice::new(&self.buffer[..length])])
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[..self.length]
    }

    /// Drops all bytes, which the caller has sent by other means.
    pub fn clear(&mut self) {
        self.length = 0;
    }

    /// Adds a structure of the protocol. The caller has reserved the room.
    pub fn push(&mut self, part: &(impl IntoBytes + Immutable)) {
        self.space(size_of_val(part)).copy_from_slice(part.as_bytes());
    }

    /// Adds bytes. The caller has reserved the room.
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        self.space(bytes.len()).copy_from_slice(bytes);
    }

    /// Adds `count` bytes for the caller to fill. The caller has reserved the room.
    pub fn space(&mut self, count: usize) -> &mut [u8] {
        let start = self.length;
        self.length += count;
        &mut self.buffer[start..self.length]
    }

    /// Removes the bytes beyond the first `length`.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }
}
