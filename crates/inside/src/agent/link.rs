use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, read, write};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::message::{Decoder, LONGEST, Line, encode};

/// More than this is not kept for who does not read.
const KEPT: usize = 4 * LONGEST;

/// Lines in both directions over a stream that does not block.
#[derive(Debug)]
pub(super) struct Link<In> {
    stream: OwnedFd,
    decoder: Decoder<In>,
    out: VecDeque<u8>,
    buffer: Box<[u8; 4096]>,
}

/// Whether more may come by a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    More,
    /// Whoever is at the other end has gone, or was never there.
    End,
}

impl<In> AsFd for Link<In> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl<In: DeserializeOwned> Link<In> {
    /// Over `stream`, which must not block.
    pub(super) fn new(stream: OwnedFd) -> Self {
        Self { stream, decoder: Decoder::new(), out: VecDeque::new(), buffer: Box::new([0; 4096]) }
    }

    /// Hands over every line that is there.
    ///
    /// # Errors
    /// If the stream is good for nothing any more.
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

    /// Sends a message, or keeps it until it can be sent.
    ///
    /// # Errors
    /// If too much is kept already, or it is too long, or the stream is good for nothing any more.
    pub(super) fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        let line = encode(message)?;
        if self.out.len() + line.len() > KEPT {
            return Err(io::Error::other("it does not read what it is told"));
        }
        self.out.extend(line);
        self.flush()
    }

    /// Sends what makes whoever is at the other end forget what came before.
    ///
    /// # Errors
    /// If the stream is good for nothing any more.
    pub(super) fn begin(&mut self) -> io::Result<()> {
        self.out.push_back(b'\n');
        self.flush()
    }

    /// Sends what is kept, as far as that goes without waiting.
    ///
    /// # Errors
    /// If the stream is good for nothing any more.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while !self.out.is_empty() {
            match write(&self.stream, self.out.as_slices().0) {
                // The kernel may be out of memory for the moment.
                Ok(0) | Err(Errno::AGAIN | Errno::NOMEM) => return Ok(()),
                Ok(len) => drop(self.out.drain(..len)),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Whether something is kept still.
    pub(super) fn is_behind(&self) -> bool {
        !self.out.is_empty()
    }

    /// Forgets what was received and what is kept: another one comes to the other end.
    pub(super) fn forget(&mut self) {
        self.decoder = Decoder::new();
        self.out.clear();
    }
}
