//! A non-blocking stream of lines, to the host or to an application.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, read, write};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::message::{Decoder, LONGEST, Line, encode};

/// Most bytes kept for a peer that does not read.
const KEPT: usize = 4 * LONGEST;

/// Lines in both directions over a non-blocking stream.
#[derive(Debug)]
pub(super) struct Link<In> {
    stream: OwnedFd,
    decoder: Decoder<In>,
    out: VecDeque<u8>,
    buffer: Box<[u8; 4096]>,
}

/// Whether more can come over a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    More,
    /// The peer has gone, or was never there.
    End,
}

impl<In> AsFd for Link<In> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl<In: DeserializeOwned> Link<In> {
    /// Makes a link over `stream`, which must be non-blocking.
    pub(super) fn new(stream: OwnedFd) -> Self {
        Self { stream, decoder: Decoder::new(), out: VecDeque::new(), buffer: Box::new([0; 4096]) }
    }

    /// Hands every available line to `each`.
    ///
    /// # Errors
    /// If the stream fails.
    pub(super) fn receive(&mut self, mut each: impl FnMut(Line<In>)) -> io::Result<After> {
        loop {
            match read(&self.stream, self.buffer.as_mut_slice()) {
                Ok(0) => return Ok(After::End),
                Ok(len) => self.decoder.take(&self.buffer[..len], &mut each),
                Err(Errno::AGAIN) => return Ok(After::More),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends a message, and keeps the bytes that cannot be sent yet.
    ///
    /// # Errors
    /// If too much is kept already, the message is too long, or the stream fails.
    pub(super) fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        let line = encode(message)?;
        if self.out.len() + line.len() > KEPT {
            return Err(io::Error::other("the peer does not read its messages"));
        }
        self.out.extend(line);
        self.flush()
    }

    /// Sends an empty line, at which the peer starts afresh.
    ///
    /// # Errors
    /// If the stream fails.
    pub(super) fn begin(&mut self) -> io::Result<()> {
        self.out.push_back(b'\n');
        self.flush()
    }

    /// Sends the kept bytes as far as possible without blocking.
    ///
    /// # Errors
    /// If the stream fails.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while !self.out.is_empty() {
            match write(&self.stream, self.out.as_slices().0) {
                // The kernel may be short of memory for the moment.
                Ok(0) | Err(Errno::AGAIN | Errno::NOMEM) => return Ok(()),
                Ok(len) => drop(self.out.drain(..len)),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Returns whether unsent bytes are kept.
    pub(super) fn is_behind(&self) -> bool {
        !self.out.is_empty()
    }

    /// Forgets partial input and unsent output, because another peer comes.
    pub(super) fn forget(&mut self) {
        self.decoder = Decoder::new();
        self.out.clear();
    }
}
