//! Time limit of an initiator's operation.

use std::io::{self, IoSlice};
use std::time::{Duration, Instant};

use crate::channel::Channel;

/// Reason why an operation cannot go on.
#[derive(Debug)]
pub enum Interrupted {
    /// The connection broke.
    Lost(io::Error),
    /// The peer did not finish within this time.
    Silent(Duration),
}

/// End of the time for an operation; progress does not extend it.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    at: Instant,
    io_timeout: Duration,
}

impl Deadline {
    /// Returns the end of an operation that begins now.
    pub fn after(io_timeout: Duration) -> Self {
        Self { at: Instant::now() + io_timeout, io_timeout }
    }

    /// Returns the time that is left.
    pub fn left(self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// Checks that time is left.
    ///
    /// # Errors
    /// [`Interrupted::Silent`] otherwise.
    pub fn check(self) -> Result<(), Interrupted> {
        if self.left().is_zero() { Err(Interrupted::Silent(self.io_timeout)) } else { Ok(()) }
    }

    /// Receives at least one byte.
    ///
    /// # Errors
    /// [`Interrupted`]; the end of the stream is [`Interrupted::Lost`].
    pub fn recv(self, channel: &mut dyn Channel, into: &mut [u8]) -> Result<usize, Interrupted> {
        channel.set_deadline(Some(self.at));
        match channel.recv(into).map_err(|error| self.interrupted(error))? {
            0 => {
                let closed =
                    io::Error::new(io::ErrorKind::UnexpectedEof, "the other end closed it");
                Err(Interrupted::Lost(closed))
            }
            received => Ok(received),
        }
    }

    /// Sends all slices.
    ///
    /// # Errors
    /// [`Interrupted`].
    pub fn send(
        self,
        channel: &mut dyn Channel,
        slices: &mut [IoSlice<'_>],
    ) -> Result<(), Interrupted> {
        channel.set_deadline(Some(self.at));
        channel.send_all(slices).map_err(|error| self.interrupted(error))
    }

    fn interrupted(self, error: io::Error) -> Interrupted {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                Interrupted::Silent(self.io_timeout)
            }
            _ => Interrupted::Lost(error),
        }
    }
}
