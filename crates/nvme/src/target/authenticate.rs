//! The controller's end of DH-HMAC-CHAP: a queue is usable only after its host has proved its name.

use std::time::Instant;

use aquifer_transport::serving::Origin;
use ring::rand::{SecureRandom, SystemRandom};
use zerocopy::{FromBytes, IntoBytes};

use super::controller::Controller;
use super::data::{Source, sink, source};
use super::link::Link;
use super::parse::{Payload, Pdu};
use super::{Broken, Core, Fatal};
use crate::auth::{Exchange, Group, Hash, Response, Secrets, Side};
use crate::proto::auth::{
    Challenge, DH_HMAC_CHAP, Failure, NAMES, Negotiate, Protocol, Reply, Start, Success, failure,
    message,
};
use crate::proto::command::FABRICS;
use crate::proto::fabrics::{AUTHENTICATION_PROTOCOL, kind};
use crate::proto::{Command, NvmeStatus};

/// The longest message of either end, in bytes: ample for exponentials of 8192 bits.
const MAX_MESSAGE: u32 = 8192;

/// One authentication in progress.
struct Authentication<'a> {
    core: &'a Core,
    controller: &'a Controller,
    secrets: &'a Secrets,
    transaction: u16,
    secure_channel: u8,
    state: State,
    /// The host has failed too often recently: this end refuses it before any costly step.
    is_barred: bool,
    /// Whether an end at this point counts as a failure of the host.
    counts: bool,
}

/// The next step of the protocol.
enum State {
    /// The host sends its negotiation.
    Negotiation,
    /// The host fetches the challenge.
    Challenge(OpenChallenge),
    /// The host sends its proof.
    Reply(OpenChallenge),
    /// The host fetches `message`, the last one from this end, and then `then` follows.
    Last { message: Vec<u8>, then: Then },
    /// The host confirms the controller's proof.
    Success2,
    /// The host has authenticated.
    Done,
    /// No further message is valid.
    Failed,
}

/// The step after the last message from this end.
#[derive(Clone, Copy)]
enum Then {
    Success,
    HostsWord,
    Failure,
}

/// A challenge that its host has yet to answer, with its parameters.
struct OpenChallenge {
    hash: Hash,
    group: Group,
    challenge: Vec<u8>,
    sequence: u32,
    exchange: Option<Exchange>,
}

/// Authenticates the host before the connection's deadline. Returns false if the host closes the
/// connection.
pub(super) fn run(
    link: &mut Link,
    core: &Core,
    controller: &Controller,
    origin: &Origin,
    secrets: &Secrets,
) -> Result<bool, Broken> {
    let host = core.limits.connections.host(origin.ip);
    let is_barred = host.is_some_and(|host| core.failures().must_pause(host, Instant::now()));
    let mut authentication = Authentication {
        core,
        controller,
        secrets,
        transaction: 0,
        secure_channel: 0,
        state: State::Negotiation,
        is_barred,
        counts: false,
    };
    let result = authentication.talk(link);
    if let Some(host) = host {
        match result {
            Ok(true) => core.failures().succeeded(host),
            _ if authentication.counts && !is_barred => {
                core.failures().failed(host, Instant::now())
            }
            _ => {}
        }
    }
    result
}

impl Authentication<'_> {
    fn talk(&mut self, link: &mut Link) -> Result<bool, Broken> {
        loop {
            let (command, payload) = match link.wait_next()? {
                None => return Ok(false),
                Some(Pdu::Command(command, payload)) => (command, payload),
                Some(_) => return Err(Fatal::sequence("a PDU other than a command").into()),
            };
            self.execute(link, &command, payload)?;
            if matches!(self.state, State::Done) {
                link.flush()?;
                return Ok(true);
            }
        }
    }

    fn execute(
        &mut self,
        link: &mut Link,
        command: &Command,
        payload: Payload,
    ) -> Result<(), Broken> {
        let id = command.id.get();
        let status = match (command.opcode, command.fabrics_type()) {
            (FABRICS, kind::AUTHENTICATION_SEND) => match incoming(command, payload) {
                Ok(payload) => {
                    let message = link.data(payload).to_vec();
                    let given_up = message.starts_with(&message::FAILURE2);
                    if let Some(explanation) = self.take(&message) {
                        self.fail(explanation);
                    }
                    link.complete(id, NvmeStatus::SUCCESS, 0)?;
                    if given_up {
                        link.flush()?;
                        return Err(Broken::Unauthenticated);
                    }
                    return Ok(());
                }
                Err(status) => status,
            },
            (FABRICS, kind::AUTHENTICATION_RECEIVE) => match outgoing(command) {
                Ok(length) => return self.give(link, id, length),
                Err(status) => status,
            },
            _ => NvmeStatus::AUTHENTICATION_REQUIRED.final_(),
        };
        Ok(link.complete(id, status, 0)?)
    }

    /// Handles a message from the host. Returns the failure's explanation if the message is wrong.
    fn take(&mut self, bytes: &[u8]) -> Option<u8> {
        let head = bytes.first_chunk::<2>().copied().unwrap_or_default();
        match std::mem::replace(&mut self.state, State::Failed) {
            State::Negotiation if head == message::NEGOTIATE => self.negotiate(bytes).err(),
            State::Reply(open) if head == message::REPLY => self.check(&open, bytes).err(),
            State::Success2 if head == message::SUCCESS2 => {
                self.state = State::Done;
                None
            }
            _ => Some(failure::MESSAGE),
        }
    }

    /// Prepares the failure message that the host fetches next.
    fn fail(&mut self, explanation: u8) {
        tracing::warn!(
            "{} failed to authenticate: explanation {explanation:#x}",
            self.controller.host
        );
        let failure = Failure::new(message::FAILURE1, self.transaction, explanation);
        self.counts = true;
        self.state = State::Last { message: failure.as_bytes().to_vec(), then: Then::Failure };
    }

    fn negotiate(&mut self, bytes: &[u8]) -> Result<(), u8> {
        let (negotiate, rest) = Negotiate::read_from_prefix(bytes).map_err(|_| failure::PAYLOAD)?;
        self.transaction = negotiate.start.transaction.get();
        self.secure_channel = negotiate.secure_channel;
        if self.is_barred {
            return Err(failure::FAILED);
        }
        if negotiate.secure_channel != 0 {
            return Err(failure::NO_SECURE_CHANNEL);
        }
        let length = usize::from(negotiate.protocols) * size_of::<Protocol>();
        let protocols = rest.get(..length).ok_or(failure::PAYLOAD)?;
        let mut protocols = protocols
            .chunks(size_of::<Protocol>())
            .filter_map(|one| Protocol::read_from_bytes(one).ok());
        let protocol = protocols.find(|one| one.id == DH_HMAC_CHAP).ok_or(failure::NO_PROTOCOL)?;
        let names =
            |names: &[u8; NAMES], count: u8| names[..usize::from(count).min(NAMES)].to_vec();
        let hashes = names(&protocol.hashes, protocol.hash_count);
        let groups = names(&protocol.groups, protocol.group_count);
        // The host's first known hash; the smallest group other than null, which hides the secret
        // from an eavesdropper.
        let hash = hashes.into_iter().find_map(Hash::with_id).ok_or(failure::NO_HASH)?;
        let groups = groups.into_iter().filter_map(Group::with_id);
        let groups = groups.filter(|group| *group <= self.core.limits.largest_group);
        let group = groups.min_by_key(|group| match group {
            Group::Null => usize::MAX,
            group => group.length(),
        });
        let group = group.ok_or(failure::NO_GROUP)?;
        let mut random = [0; 64 + size_of::<u32>()];
        SystemRandom::new().fill(&mut random).map_err(|_| failure::FAILED)?;
        let (challenge, sequence) = random.split_at(64);
        // 0 would mean that there is no challenge.
        let sequence = u32::from_le_bytes(sequence.try_into().unwrap_or([1; 4])) | 1;
        let (challenge, exchange) = (challenge[..hash.length()].to_vec(), Exchange::begin(group));
        self.state = State::Challenge(OpenChallenge { hash, group, challenge, sequence, exchange });
        Ok(())
    }

    /// Sends the message that the host fetches.
    fn give(&mut self, link: &mut Link, id: u16, length: usize) -> Result<(), Broken> {
        let (mut bytes, next) = match std::mem::replace(&mut self.state, State::Failed) {
            State::Challenge(open) => (self.challenge(&open)?, State::Reply(open)),
            State::Last { message, then: Then::HostsWord } => (message, State::Success2),
            State::Last { message, then: Then::Success } => (message, State::Done),
            State::Last { mut message, then: Then::Failure } => {
                message.resize(length, 0);
                link.answer_bytes(id, &message)?;
                link.flush()?;
                return Err(Broken::Unauthenticated);
            }
            state => {
                self.state = state;
                return Ok(link.complete(id, NvmeStatus::COMMAND_SEQUENCE.final_(), 0)?);
            }
        };
        if bytes.len() > length {
            return Ok(link.complete(id, NvmeStatus::INVALID_FIELD.final_(), 0)?);
        }
        bytes.resize(length, 0);
        link.answer_bytes(id, &bytes)?;
        self.state = next;
        Ok(())
    }

    /// Runs the costly part of an exchange in one of the few slots for that.
    fn calculate<T>(&mut self, work: impl FnOnce() -> T) -> Result<T, Broken> {
        // A host that waits for a slot until its deadline has not failed.
        self.counts = false;
        let result = self.core.slots.work(self.core.limits.handshake, work).ok_or(Broken::Late)?;
        self.counts = true;
        Ok(result)
    }

    fn challenge(&mut self, open: &OpenChallenge) -> Result<Vec<u8>, Broken> {
        let exponential = match &open.exchange {
            Some(exchange) => self.calculate(|| exchange.exponential())?,
            None => Vec::new(),
        };
        let challenge = Challenge {
            start: Start::new(message::CHALLENGE, self.transaction),
            hash_length: open.hash.length() as u8,
            reserved_7: 0,
            hash: open.hash.id(),
            group: open.group.id(),
            exponential: (exponential.len() as u16).into(),
            sequence: open.sequence.into(),
        };
        Ok([challenge.as_bytes(), &open.challenge, &exponential].concat())
    }

    /// Checks the host's proof, and answers the host's challenge if there is one.
    fn check(&mut self, open: &OpenChallenge, bytes: &[u8]) -> Result<(), u8> {
        let length = open.hash.length();
        let (reply, rest) = Reply::read_from_prefix(bytes).map_err(|_| failure::PAYLOAD)?;
        let exponential = usize::from(reply.exponential.get());
        if reply.start.transaction.get() != self.transaction
            || usize::from(reply.hash_length) != length
        {
            return Err(failure::PAYLOAD);
        }
        if exponential != open.group.length() || rest.len() < 2 * length + exponential {
            return Err(failure::PAYLOAD);
        }
        let (proof, rest) = rest.split_at(length);
        let (challenge, rest) = rest.split_at(length);
        let key = match &open.exchange {
            None => None,
            Some(exchange) => {
                let key = self.calculate(|| exchange.key(&rest[..exponential]));
                Some(key.map_err(|_| failure::FAILED)?.ok_or(failure::PAYLOAD)?)
            }
        };
        let mut response = Response {
            side: Side::Host,
            hash: open.hash,
            secret: &self.secrets.host,
            challenge: &open.challenge,
            key: key.as_deref(),
            sequence: open.sequence,
            transaction: self.transaction,
            secure_channel: self.secure_channel,
            host: &self.controller.host.nqn,
            subsystem: &self.controller.subsystem,
        };
        if !response.is(proof) {
            return Err(failure::FAILED);
        }
        let mut success = Success {
            start: Start::new(message::SUCCESS1, self.transaction),
            hash_length: length as u8,
            reserved_7: 0,
            responded: 0,
            reserved_9: [0; 7],
        };
        let mut message = success.as_bytes().to_vec();
        let mut then = Then::Success;
        if reply.challenged != 0 {
            let Some(secret) = &self.secrets.controller else { return Err(failure::FAILED) };
            // Without this check, a host could present our own proof as its proof to us.
            if challenge == open.challenge {
                return Err(failure::FAILED);
            }
            response.side = Side::Controller;
            response.secret = secret;
            response.challenge = challenge;
            response.sequence = reply.sequence.get();
            success.responded = 1;
            message = [success.as_bytes(), &response.value()].concat();
            then = Then::HostsWord;
        }
        self.state = State::Last { message, then };
        Ok(())
    }
}

/// Returns the place of the message in an Authentication Send, which names the security protocol
/// and the message's length (Base, section 6.2 "Authentication Send command").
fn incoming(command: &Command, payload: Payload) -> Result<Payload, NvmeStatus> {
    let length = command.dword(11);
    if command.dword(10) != AUTHENTICATION_PROTOCOL || length == 0 || length > MAX_MESSAGE {
        return Err(NvmeStatus::INVALID_FIELD.final_());
    }
    match source(command, payload, length as usize)? {
        Source::Here(payload) => Ok(payload),
        Source::There => Err(NvmeStatus::SGL_TYPE_INVALID.final_()),
    }
}

/// Returns the room for a message in an Authentication Receive, in bytes; the command names the
/// security protocol too (Base, section 6.1 "Authentication Receive command").
fn outgoing(command: &Command) -> Result<usize, NvmeStatus> {
    let length = command.dword(11);
    if command.dword(10) != AUTHENTICATION_PROTOCOL || length == 0 || length > MAX_MESSAGE {
        return Err(NvmeStatus::INVALID_FIELD.final_());
    }
    sink(command, length as usize)?;
    Ok(length as usize)
}
