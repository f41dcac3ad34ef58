//! How long an operation of an initiator may take.

use std::io::{self, IoSlice};
use std::time::{Duration, Instant};

use crate::channel::Channel;

/// Why nothing more comes.
#[derive(Debug)]
pub(crate) enum Interrupted {
    /// The connection broke.
    Lost(io::Error),
    /// The other end was not done within so long.
    Silent(Duration),
}

/// When an operation must be done, whatever it moves until then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    at: Instant,
    patience: Duration,
}

impl Deadline {
    pub(crate) fn after(patience: Duration) -> Self {
        Self { at: Instant::now() + patience, patience }
    }

    /// How long it still is.
    pub(crate) fn left(self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// Whether there is time left.
    pub(crate) fn check(self) -> Result<(), Interrupted> {
        if self.left().is_zero() { Err(Interrupted::Silent(self.patience)) } else { Ok(()) }
    }

    /// Receives some bytes.
    pub(crate) fn recv(
        self,
        channel: &mut dyn Channel,
        into: &mut [u8],
    ) -> Result<usize, Interrupted> {
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

    /// Sends all bytes.
    pub(crate) fn send(
        self,
        channel: &mut dyn Channel,
        slices: &mut [IoSlice<'_>],
    ) -> Result<(), Interrupted> {
        channel.set_deadline(Some(self.at));
        channel.send_all(slices).map_err(|error| self.interrupted(error))
    }

    /// What an error of the channel means.
    fn interrupted(self, error: io::Error) -> Interrupted {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                Interrupted::Silent(self.patience)
            }
            _ => Interrupted::Lost(error),
        }
    }
}
