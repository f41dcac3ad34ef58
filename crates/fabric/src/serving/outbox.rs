use std::io::{self, IoSlice};

use zerocopy::{Immutable, IntoBytes};

use crate::channel::Channel;

/// Bytes in an [`Outbox`]. What one send can carry: the replies to 32 reads of a page each, twice over.
pub(crate) const OUTBOX: usize = 256 << 10;

/// Replies that are not sent yet.
pub(crate) struct Outbox {
    buffer: Box<[u8]>,
    length: usize,
}

impl Outbox {
    pub(crate) fn new() -> Self {
        Self { buffer: vec![0; OUTBOX].into_boxed_slice(), length: 0 }
    }

    /// Makes room for `count` bytes, sending what is there if it must.
    pub(crate) fn reserve(&mut self, count: usize, channel: &mut dyn Channel) -> io::Result<()> {
        if self.buffer.len() - self.length < count { self.flush(channel) } else { Ok(()) }
    }

    /// Sends all there is, waiting for the client if it must.
    pub(crate) fn flush(&mut self, channel: &mut dyn Channel) -> io::Result<()> {
        if self.length == 0 {
            return Ok(());
        }
        let length = std::mem::take(&mut self.length);
        channel.send_all(&mut [IoSlice::new(&self.buffer[..length])])
    }

    /// The bytes there are.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buffer[..self.length]
    }

    /// Forgets all there is, which was sent by other means.
    pub(crate) fn clear(&mut self) {
        self.length = 0;
    }

    /// Adds a structure of the protocol. Room was reserved.
    pub(crate) fn push(&mut self, part: &(impl IntoBytes + Immutable)) {
        self.space(size_of_val(part)).copy_from_slice(part.as_bytes());
    }

    /// Adds bytes. Room was reserved.
    pub(crate) fn push_bytes(&mut self, bytes: &[u8]) {
        self.space(bytes.len()).copy_from_slice(bytes);
    }

    /// Adds `count` bytes for the caller to fill. Room was reserved.
    pub(crate) fn space(&mut self, count: usize) -> &mut [u8] {
        let start = self.length;
        self.length += count;
        &mut self.buffer[start..self.length]
    }

    /// Takes back what was added since there were `length` bytes.
    pub(crate) fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }
}
