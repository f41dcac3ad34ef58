use std::io;

use zerocopy::FromBytes;

use super::session::SessionError;
use crate::channel::Channel;
use crate::nbd::proto::{REQUEST_MAGIC, Request};

/// What one receive can take: 32 writes of a page each, twice over.
const INBOX: usize = 256 << 10;
/// The longest write that is waited for whole; longer ones are stored piece by piece as they arrive.
pub(super) const WHOLE_WRITE: usize = INBOX / 2;

/// What has arrived and is not used yet.
pub(super) struct Inbox {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self { buffer: vec![0; INBOX].into_boxed_slice(), start: 0, end: 0 }
    }

    /// The bytes there are.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Uses up the first `count` bytes.
    pub(super) fn consume(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end);
    }

    /// The next request, if all of its header has arrived.
    pub(super) fn request(&self) -> Result<Option<Request>, SessionError> {
        let Ok((request, _)) = Request::read_from_prefix(self.bytes()) else { return Ok(None) };
        if request.magic.get() != REQUEST_MAGIC {
            return Err(SessionError::Protocol("a request without its magic number"));
        }
        Ok(Some(request))
    }

    /// Waits for more bytes. What is there stays, and must be less than [`WHOLE_WRITE`] and a header; `false` is the end.
    pub(super) fn fill(&mut self, channel: &mut dyn Channel) -> io::Result<bool> {
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
