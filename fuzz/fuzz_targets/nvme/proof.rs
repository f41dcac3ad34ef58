//! Authentication by a host (DH-HMAC-CHAP, NVMe Base 2.0 section 8.13.5), honest or broken.

use aquifer_fuzz::secret;
use aquifer_nvme::auth::{Exchange, Group, Hash, Response, Side};
use aquifer_nvme::proto::auth::{
    Challenge, DH_HMAC_CHAP, NAMES, Negotiate, Protocol, Reply, Start, message,
};
use aquifer_nvme::proto::command::{FABRICS, Sgl, admin};
use aquifer_nvme::proto::fabrics::{AUTHENTICATION_PROTOCOL, kind};
use aquifer_nvme::proto::{Command, Nqn};
use arbitrary::Arbitrary;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::host::HOST;
use crate::queue::{Answer, Queue};

/// The longest message that the host receives, in bytes.
const MAX_MESSAGE_BYTES: u32 = 4096;

/// One step of an authentication.
#[derive(Arbitrary, Debug)]
pub enum Step<'a> {
    Negotiate { hash: u8, group: u8, others: u8, secure_channel: u8 },
    Receive { length: Option<u16> },
    Reply { challenge: Option<u8>, spoilt: Option<Spoilt> },
    Success,
    Failure,
    Message(&'a [u8]),
    Command { opcode: u8, kind: u8, dwords: [u32; 6] },
}

/// A defect of a reply.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Spoilt {
    at: u16,
    bits: u8,
    cut: u8,
}

/// Takes the steps in order, until the target closes the connection.
pub fn run(steps: &[Step<'_>], queue: &mut Queue<'_>, subsystem: &Nqn) {
    let mut challenge = Vec::new();
    for step in steps {
        let answer = match *step {
            Step::Negotiate { hash, group, others, secure_channel } => {
                send(queue, &negotiation(hash, group, others, secure_channel))
            }
            Step::Receive { length } => receive(queue, length.map_or(MAX_MESSAGE_BYTES, u32::from)),
            Step::Reply { challenge: ours, spoilt } => {
                let mut bytes = reply(&challenge, ours, subsystem);
                if let Some(Spoilt { at, bits, cut }) = spoilt {
                    let length = bytes.len();
                    bytes[usize::from(at) % length] ^= bits;
                    bytes.truncate(length - usize::from(cut).min(length));
                }
                send(queue, &bytes)
            }
            Step::Success => send(queue, &[&message::SUCCESS2[..], &[0; 14]].concat()),
            Step::Failure => send(queue, &[&message::FAILURE2[..], &[0; 6]].concat()),
            Step::Message(bytes) => send(queue, bytes),
            // The target completes it late or never, so the host must not wait for it.
            Step::Command { opcode: admin::ASYNC_EVENT_REQUEST, .. } => continue,
            Step::Command { opcode, kind, dwords } => {
                let data = Sgl::transport(MAX_MESSAGE_BYTES);
                let command = Command::new(opcode, 0, kind.into(), data);
                queue.execute(crate::admin::with_all(command, dwords), &[])
            }
        };
        match answer {
            None => return,
            Some(Answer { data, .. }) if data.starts_with(&message::CHALLENGE) => challenge = data,
            Some(_) => {}
        }
    }
}

/// Authenticates by the rules; with `mutual`, the target must authenticate as well.
pub fn honest(mutual: bool, hash: u8, group: u8, queue: &mut Queue<'_>, subsystem: &Nqn) {
    let steps = [
        Step::Negotiate { hash: 1 + hash % 3, group, others: 0, secure_channel: 0 },
        Step::Receive { length: None },
        Step::Reply { challenge: mutual.then_some(9), spoilt: None },
        Step::Receive { length: None },
        Step::Success,
    ];
    run(&steps[..if mutual { 5 } else { 4 }], queue, subsystem);
}

fn send(queue: &mut Queue<'_>, message: &[u8]) -> Option<Answer> {
    let length = message.len() as u32;
    let command =
        Command::new(FABRICS, 0, kind::AUTHENTICATION_SEND.into(), Sgl::in_capsule(length));
    queue.execute(command.with(10, AUTHENTICATION_PROTOCOL).with(11, length), message)
}

fn receive(queue: &mut Queue<'_>, length: u32) -> Option<Answer> {
    let command =
        Command::new(FABRICS, 0, kind::AUTHENTICATION_RECEIVE.into(), Sgl::transport(length));
    queue.execute(command.with(10, AUTHENTICATION_PROTOCOL).with(11, length), &[])
}

fn negotiation(hash: u8, group: u8, others: u8, secure_channel: u8) -> Vec<u8> {
    let mut negotiate = Negotiate::new_zeroed();
    negotiate.start.message = message::NEGOTIATE;
    negotiate.secure_channel = secure_channel;
    negotiate.protocols = 1;
    let mut protocol = Protocol::new_zeroed();
    protocol.id = DH_HMAC_CHAP;
    (protocol.hash_count, protocol.group_count) =
        (others.wrapping_add(1), 1 + others % NAMES as u8);
    // Rarely a group that costs time, and then the smallest: they differ in nothing else. Some ids
    // do not exist.
    let group = match group {
        0..232 => Group::Null.id(),
        232..240 => Group::Ffdhe2048.id(),
        240.. => group - 234,
    };
    (protocol.hashes[0], protocol.groups[0]) = (hash % 8, group);
    [negotiate.as_bytes(), protocol.as_bytes()].concat()
}

/// Returns the reply to a challenge, or to a challenge of zeroes if it is malformed.
fn reply(challenge: &[u8], ours: Option<u8>, subsystem: &Nqn) -> Vec<u8> {
    let (head, rest) =
        Challenge::read_from_prefix(challenge).unwrap_or((Challenge::new_zeroed(), &[]));
    let hash = Hash::with_id(head.hash).unwrap_or(Hash::Sha256);
    let group = Group::with_id(head.group).unwrap_or(Group::Null);
    let (asked, rest) = rest.split_at(hash.length().min(rest.len()));
    let theirs = &rest[..usize::from(head.exponential.get()).min(rest.len())];
    let exchange = Exchange::begin(group);
    let exponential = exchange.as_ref().map(Exchange::exponential).unwrap_or_default();
    let key = exchange.and_then(|exchange| exchange.key(theirs));
    let response = Response {
        side: Side::Host,
        hash,
        secret: &secret(),
        challenge: asked,
        key: key.as_deref(),
        sequence: head.sequence.get(),
        transaction: head.start.transaction.get(),
        secure_channel: 0,
        host: &HOST.parse().expect("HOST is a valid NQN"),
        subsystem,
    };
    let mut reply = Reply::new_zeroed();
    reply.start = Start::new(message::REPLY, head.start.transaction.get());
    reply.hash_length = hash.length() as u8;
    reply.challenged = ours.is_some().into();
    reply.exponential = (exponential.len() as u16).into();
    let ours = vec![ours.unwrap_or(0); hash.length()];
    [reply.as_bytes(), &response.value(), &ours, &exponential].concat()
}
