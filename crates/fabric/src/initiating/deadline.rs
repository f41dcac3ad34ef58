use std::io;
use std::time::{Duration, Instant};

use crate::channel::Channel;

/// Why nothing more comes.
#[derive(Debug)]
pub(crate) enum Interrupted {
    /// The connection broke.
    Lost(io::Error),
    /// The other end said nothing for so long.
    Silent(Duration),
}

/// How long a round of operations may take: to the deadline, and `patience` beyond it for whatever is under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    at: Instant,
    patience: Duration,
}

impl Deadline {
    pub(crate) fn after(patience: Duration) -> Self {
        Self { at: Instant::now() + patience, patience }
    }

    /// How long it still is, at least a moment: no time at all would mean for ever to a socket.
    pub(crate) fn left(self) -> Duration {
        self.at.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    /// Whether there is time left.
    pub(crate) fn check(self) -> Result<(), Interrupted> {
        if Instant::now() > self.at { Err(Interrupted::Silent(self.patience)) } else { Ok(()) }
    }

    /// Receives with the time-out that the socket is set to. Bytes that trickle in do not put the deadline off.
    pub(crate) fn recv(self, channel: &mut dyn Channel, into: &mut [u8]) -> Result<usize, Interrupted> {
        match channel.recv(into) {
            Ok(0) => Err(Interrupted::Lost(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the other end closed it",
            ))),
            Ok(_) if Instant::now() > self.at => Err(Interrupted::Silent(self.patience)),
            Ok(received) => Ok(received),
            Err(error) => Err(self.interrupted(error)),
        }
    }

    /// What an error of the channel means.
    pub(crate) fn interrupted(self, error: io::Error) -> Interrupted {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Interrupted::Silent(self.patience),
            _ => Interrupted::Lost(error),
        }
    }
}
