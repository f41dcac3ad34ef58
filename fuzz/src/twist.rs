//! Changes to messages on their way, and to the pace of their delivery.

use arbitrary::Arbitrary;

use crate::{MAX_SENT_BYTES, Peer};

/// A change to a message on its way.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Twist {
    /// Flips bits of one byte.
    Flip { at: u16, bits: u8 },
    /// Replaces one of the first 256 bytes.
    Set { at: u8, to: u8 },
    /// Drops the rest of the message.
    Cut(u16),
    /// Appends bytes.
    Grow(u16, u8),
    /// Sends the message twice.
    Again,
    /// Drops the message.
    Lost,
    /// Sends the message after the next one.
    Late,
}

/// A sequence of messages, and the changes to it.
#[derive(Default)]
pub struct Twisted {
    messages: Vec<Vec<u8>>,
    length: usize,
}

/// The pace at which messages arrive.
#[derive(Arbitrary, Clone, Copy, Debug, Default)]
pub struct Delivery {
    /// Bytes per piece at the start; 0 sends all at once.
    piece: u8,
    /// Whether the peer vanishes without reading the replies.
    pub abrupt: bool,
}

impl Delivery {
    /// Returns the most bytes that arrive at once.
    pub fn piece(self) -> usize {
        if self.piece == 0 { usize::MAX } else { self.piece.into() }
    }
}

impl Twisted {
    /// Adds a message, unless the total would exceed [`MAX_SENT_BYTES`].
    pub fn push(&mut self, message: Vec<u8>) {
        if self.length + message.len() <= MAX_SENT_BYTES {
            self.length += message.len();
            self.messages.push(message);
        }
    }

    /// Applies the changes to the messages of these numbers.
    pub fn twist(&mut self, twists: &[(u8, Twist)]) {
        for &(number, twist) in twists {
            let number = usize::from(number);
            let count = self.messages.len();
            let Some(message) = self.messages.get_mut(number) else { continue };
            let length = message.len().max(1);
            match twist {
                Twist::Flip { at, bits } => {
                    message
                        .get_mut(usize::from(at) % length)
                        .into_iter()
                        .for_each(|byte| *byte ^= bits);
                }
                Twist::Set { at, to } => {
                    message
                        .get_mut(usize::from(at) % length)
                        .into_iter()
                        .for_each(|byte| *byte = to);
                }
                Twist::Cut(at) => message.truncate(usize::from(at) % length),
                Twist::Grow(by, with) => message.resize(message.len() + usize::from(by), with),
                Twist::Again if length < MAX_SENT_BYTES => message.extend_from_within(..),
                Twist::Again => {}
                Twist::Lost => message.clear(),
                Twist::Late if number + 1 < count => self.messages.swap(number, number + 1),
                Twist::Late => {}
            }
        }
    }

    /// Returns all messages concatenated.
    pub fn bytes(&self) -> Vec<u8> {
        self.messages.concat()
    }

    /// Sends all messages to the peer of a server, at the given pace.
    pub fn send(&self, peer: &mut Peer<'_>, delivery: Delivery) {
        const MAX_PIECES: usize = 64;
        let bytes = self.bytes();
        let piece = usize::from(delivery.piece);
        let (slow, fast) = bytes.split_at(bytes.len().min(MAX_PIECES * piece));
        slow.chunks(piece.max(1)).for_each(|piece| peer.send(piece));
        peer.send(fast);
    }
}
