//! Handshakes of a broken NBD server.

use aquifer_fuzz::{Number, Twist, Twisted};
use aquifer_nbd::proto::{
    BASE_ALLOCATION, Greeting, InfoBlockSize, InfoExport, MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    OptionReply, info, option, reply,
};
use arbitrary::{Arbitrary, Unstructured};
use zerocopy::IntoBytes;

use crate::reply::ALLOCATION_CONTEXT_ID;

#[derive(Debug)]
pub enum Handshake<'a> {
    Raw(&'a [u8]),
    Good(Good),
    Answers { good: Good, answers: Vec<Answer<'a>>, twists: Vec<(u8, Twist)> },
}

/// A handshake after which the client can use the export.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Good {
    structured: bool,
    holes: bool,
    size: Option<Number>,
    flags: u16,
    maximum: Option<Number>,
}

/// One reply to an option.
#[derive(Arbitrary, Debug)]
pub struct Answer<'a> {
    option: u8,
    kind: Kind,
    payload: &'a [u8],
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Kind {
    Ack,
    Server,
    Info,
    Context,
    Error(u8),
    Any(u32),
}

impl<'a> Arbitrary<'a> for Handshake<'a> {
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        Ok(match u.arbitrary::<u8>()? {
            0 => Self::Raw(u.bytes(u.len())?),
            1..64 => Self::Answers {
                good: u.arbitrary()?,
                answers: u.arbitrary()?,
                twists: u.arbitrary()?,
            },
            _ => Self::Good(u.arbitrary()?),
        })
    }
}

fn answer(option: u32, reply: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).into();
    let (magic, option, reply) = (OPTION_REPLY_MAGIC.into(), option.into(), reply.into());
    [OptionReply { magic, option, reply, length }.as_bytes(), payload].concat()
}

impl Good {
    fn put(self, messages: &mut Twisted) {
        let greeting =
            Greeting { magic: MAGIC.into(), option_magic: OPTION_MAGIC.into(), flags: 3.into() };
        messages.push(greeting.as_bytes().to_vec());
        let no = reply::ERR_UNSUP;
        let structured = if self.structured { reply::ACK } else { no };
        messages.push(answer(option::STRUCTURED_REPLY, structured, &[]));
        if self.structured {
            if self.holes {
                let id = ALLOCATION_CONTEXT_ID.to_be_bytes();
                let context = [&id, BASE_ALLOCATION.as_bytes()].concat();
                messages.push(answer(option::SET_META_CONTEXT, reply::META_CONTEXT, &context));
            }
            messages.push(answer(
                option::SET_META_CONTEXT,
                if self.holes { reply::ACK } else { no },
                &[],
            ));
        }
        let size = self.size.map_or(1 << 20, Number::bytes).into();
        let export = InfoExport { kind: info::EXPORT.into(), size, flags: self.flags.into() };
        messages.push(answer(option::GO, reply::INFO, export.as_bytes()));
        if let Some(maximum) = self.maximum {
            let sizes = InfoBlockSize {
                kind: info::BLOCK_SIZE.into(),
                minimum: 1.into(),
                preferred: 4096.into(),
                maximum: (maximum.bytes() as u32).into(),
            };
            messages.push(answer(option::GO, reply::INFO, sizes.as_bytes()));
        }
        messages.push(answer(option::GO, reply::ACK, &[]));
    }
}

impl Handshake<'_> {
    /// Returns whether the server accepts structured replies in its valid part.
    pub fn is_structured(&self) -> bool {
        match self {
            Self::Good(good) | Self::Answers { good, .. } => good.structured,
            Self::Raw(_) => false,
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut messages = Twisted::default();
        match self {
            Self::Raw(bytes) => messages.push(bytes.to_vec()),
            Self::Good(good) => good.put(&mut messages),
            Self::Answers { good, answers, twists } => {
                good.put(&mut messages);
                for Answer { option, kind, payload } in answers {
                    let kind = match *kind {
                        Kind::Ack => reply::ACK,
                        Kind::Server => reply::SERVER,
                        Kind::Info => reply::INFO,
                        Kind::Context => reply::META_CONTEXT,
                        Kind::Error(number) => reply::ERROR_BIT | u32::from(number),
                        Kind::Any(kind) => kind,
                    };
                    messages.push(answer((*option).into(), kind, payload));
                }
                messages.twist(twists);
            }
        }
        messages.bytes()
    }
}
