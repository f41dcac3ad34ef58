use arbitrary::Arbitrary;

use crate::{MOST, Peer};

/// What happens to a message on its way.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Twist {
    /// A byte changes.
    Flip { at: u16, bits: u8 },
    /// A byte near the start is another.
    Set { at: u8, to: u8 },
    /// The rest is lost.
    Cut(u16),
    /// There is more than there should be.
    Grow(u16, u8),
    /// It comes twice.
    Again,
    /// It does not come.
    Lost,
    /// It comes after the next.
    Late,
}

/// Messages, and what happens to some of them.
#[derive(Default)]
pub struct Twisted {
    messages: Vec<Vec<u8>>,
    length: usize,
}

/// How messages come.
#[derive(Arbitrary, Clone, Copy, Debug, Default)]
pub struct Delivery {
    /// In how small pieces the first bytes come; 0 is all at once.
    piece: u8,
    /// The peer vanishes without reading what it was told.
    pub abrupt: bool,
}

impl Delivery {
    /// The most bytes that come at once.
    pub fn piece(self) -> usize {
        if self.piece == 0 { usize::MAX } else { self.piece.into() }
    }
}

impl Twisted {
    /// Adds a message, unless there is too much already.
    pub fn push(&mut self, message: Vec<u8>) {
        if self.length + message.len() <= MOST {
            self.length += message.len();
            self.messages.push(message);
        }
    }

    /// Does what is to be done to the messages of these numbers.
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
                Twist::Again if length < MOST => message.extend_from_within(..),
                Twist::Again => {}
                Twist::Lost => message.clear(),
                Twist::Late if number + 1 < count => self.messages.swap(number, number + 1),
                Twist::Late => {}
            }
        }
    }

    /// All messages one after the other.
    pub fn bytes(&self) -> Vec<u8> {
        self.messages.concat()
    }

    /// Sends them.
    pub fn send(&self, peer: &mut Peer<'_>, delivery: Delivery) {
        const PIECES: usize = 64;
        let bytes = self.bytes();
        let piece = usize::from(delivery.piece);
        let (slow, fast) = bytes.split_at(bytes.len().min(PIECES * piece));
        slow.chunks(piece.max(1)).for_each(|piece| peer.send(piece));
        peer.send(fast);
    }
}
