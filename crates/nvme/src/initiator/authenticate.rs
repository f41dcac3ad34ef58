//! The host's end of DH-HMAC-CHAP (Base, section 8.13.5 "DH-HMAC-CHAP Protocol").

use ring::rand::{SecureRandom, SystemRandom};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::execute::{Executor, succeeded};
use super::{Failure, Target};
use crate::auth::{Exchange, Group, Hash, Response, Secrets, Side};
use crate::proto::Command;
use crate::proto::auth::{
    self as proto, Challenge, DH_HMAC_CHAP, Negotiate, Protocol, Reply, Start, Success, failure,
    message,
};
use crate::proto::command::{FABRICS, Sgl};
use crate::proto::fabrics::{AUTHENTICATION_PROTOCOL, kind};

/// Bytes received for a message: enough for any that the controller sends.
const ROOM: usize = 4096;

/// The groups offered, in order of preference: sufficient strength at the lowest cost first, the
/// null group last.
const GROUPS: [Group; 6] = [
    Group::Ffdhe2048,
    Group::Ffdhe3072,
    Group::Ffdhe4096,
    Group::Ffdhe6144,
    Group::Ffdhe8192,
    Group::Null,
];

/// Proves this host's name; with a secret of the controller, also demands the controller's proof.
pub(super) fn run(
    executor: &mut Executor<'_>,
    target: &Target,
    secrets: &Secrets,
) -> Result<(), Failure> {
    let random: [u8; 2 + 4 + 64] = random()?;
    let (numbers, challenge) = random.split_at(6);
    let transaction = u16::from_le_bytes([numbers[0], numbers[1]]);
    send(executor, &negotiation(transaction))?;
    let message = receive(executor, message::CHALLENGE, transaction)?;
    let (asked, rest) =
        Challenge::read_from_prefix(&message).map_err(|_| malformed("challenge"))?;
    let known = Hash::with_id(asked.hash).zip(Group::with_id(asked.group));
    let Some((hash, group)) = known else { return Err(malformed("challenge")) };
    let (length, exponential) = (hash.length(), usize::from(asked.exponential.get()));
    if usize::from(asked.hash_length) != length
        || exponential != group.length()
        || rest.len() < length + exponential
    {
        return Err(malformed("challenge"));
    }
    let (theirs, rest) = rest.split_at(length);
    let exchange = Exchange::begin(group);
    let key = match &exchange {
        Some(exchange) => {
            Some(exchange.key(&rest[..exponential]).ok_or_else(|| malformed("challenge"))?)
        }
        None if group == Group::Null => None,
        None => {
            return Err(Failure::Authentication("the kernel gives no random numbers".to_owned()));
        }
    };
    let mut response = Response {
        side: Side::Host,
        hash,
        secret: &secrets.host,
        challenge: theirs,
        key: key.as_deref(),
        sequence: asked.sequence.get(),
        transaction,
        secure_channel: 0,
        host: &target.host,
        subsystem: &target.subsystem,
    };
    let ours = &challenge[..length];
    let mut reply = Reply::new_zeroed();
    reply.start = Start::new(message::REPLY, transaction);
    reply.hash_length = length as u8;
    reply.exponential = (exponential as u16).into();
    let nothing = [0; 64];
    let mut asking = &nothing[..length];
    if secrets.controller.is_some() {
        reply.challenged = 1;
        // 0 would mean that there is no challenge.
        reply.sequence =
            (u32::from_le_bytes([numbers[2], numbers[3], numbers[4], numbers[5]]) | 1).into();
        asking = ours;
    }
    let exponential = exchange.as_ref().map(Exchange::exponential).unwrap_or_default();
    send(executor, &[reply.as_bytes(), &response.value(), asking, &exponential].concat())?;
    let message = receive(executor, message::SUCCESS1, transaction)?;
    let Some(secret) = &secrets.controller else { return Ok(()) };
    let (success, proof) = Success::read_from_prefix(&message).map_err(|_| malformed("success"))?;
    (response.side, response.secret) = (Side::Controller, secret);
    (response.challenge, response.sequence) = (ours, reply.sequence.get());
    let proof = proof.get(..length).ok_or_else(|| malformed("success"))?;
    if success.responded == 0 || !response.is(proof) {
        // If this message is lost, the end of the connection tells the controller the same.
        let failed = proto::Failure::new(message::FAILURE2, transaction, failure::FAILED);
        let _ = send(executor, failed.as_bytes());
        let why = "the controller cannot prove its name: its secret is wrong";
        return Err(Failure::Authentication(why.to_owned()));
    }
    let mut success = Success::new_zeroed();
    success.start = Start::new(message::SUCCESS2, transaction);
    send(executor, success.as_bytes())
}

fn negotiation(transaction: u16) -> Vec<u8> {
    let mut negotiate = Negotiate::new_zeroed();
    negotiate.start = Start::new(message::NEGOTIATE, transaction);
    negotiate.protocols = 1;
    let mut protocol = Protocol::new_zeroed();
    protocol.id = DH_HMAC_CHAP;
    (protocol.hash_count, protocol.group_count) = (Hash::ALL.len() as u8, GROUPS.len() as u8);
    for (place, hash) in protocol.hashes.iter_mut().zip(Hash::ALL) {
        *place = hash.id();
    }
    for (place, group) in protocol.groups.iter_mut().zip(GROUPS) {
        *place = group.id();
    }
    [negotiate.as_bytes(), protocol.as_bytes()].concat()
}

/// Sends a message (Base, section 6.2 "Authentication Send command").
fn send(executor: &mut Executor<'_>, message: &[u8]) -> Result<(), Failure> {
    let length = message.len() as u32;
    let command =
        Command::new(FABRICS, 0, kind::AUTHENTICATION_SEND.into(), Sgl::in_capsule(length));
    let command = command.with(10, AUTHENTICATION_PROTOCOL).with(11, length);
    let (completion, _) = executor.execute(command, message, &mut [])?;
    succeeded(completion.status())
}

/// Fetches the next message (Base, section 6.1 "Authentication Receive command"), which must be of
/// the kind `wanted`.
fn receive(
    executor: &mut Executor<'_>,
    wanted: [u8; 2],
    transaction: u16,
) -> Result<Vec<u8>, Failure> {
    let sgl = Sgl::transport(ROOM as u32);
    let command = Command::new(FABRICS, 0, kind::AUTHENTICATION_RECEIVE.into(), sgl);
    let command = command.with(10, AUTHENTICATION_PROTOCOL).with(11, ROOM as u32);
    let mut message = vec![0; ROOM];
    let (completion, received) = executor.execute(command, &[], &mut message)?;
    succeeded(completion.status())?;
    message.truncate(received);
    // No message is shorter than this.
    let (head, _) = proto::Failure::read_from_prefix(&message).map_err(|_| malformed("message"))?;
    if head.start.message == message::FAILURE1 {
        return Err(Failure::Authentication(explain(head.explanation)));
    }
    if head.start.message != wanted || head.start.transaction.get() != transaction {
        return Err(malformed("message"));
    }
    Ok(message)
}

fn explain(explanation: u8) -> String {
    match explanation {
        failure::FAILED => "the target rejects this host's secret".to_owned(),
        failure::NO_PROTOCOL | failure::NO_HASH | failure::NO_GROUP => {
            "the target requires another protocol, hash or group".to_owned()
        }
        failure::NO_SECURE_CHANNEL => "the target requires a secure channel (TLS)".to_owned(),
        other => format!("the target reports failure {other:#x}"),
    }
}

fn malformed(what: &str) -> Failure {
    Failure::Protocol(format!("the {what} of its authentication is malformed"))
}

fn random<const COUNT: usize>() -> Result<[u8; COUNT], Failure> {
    let mut bytes = [0; COUNT];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| Failure::Authentication("the kernel gives no random numbers".to_owned()))?;
    Ok(bytes)
}
