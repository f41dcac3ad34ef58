//! Fixed newstyle negotiation by the client, from the greeting to the answer to `OPT_GO`.

use std::io::IoSlice;
use std::time::Duration;

use aquifer_page::Incarnation;
use aquifer_page::visitor::Visitor;
use aquifer_transport::channel::{Channel, Socket};
use aquifer_transport::initiating::{Deadline, Failure as _};
use aquifer_transport::tls;
use zerocopy::{FromBytes, IntoBytes};

use super::{Agreement, Failure, Target};
use crate::proto::{
    BASE_ALLOCATION, Greeting, InfoBlockSize, InfoExport, Introduction, MAGIC, MAX_PAYLOAD,
    MAX_STRING, OPTION_MAGIC, OPTION_REPLY_MAGIC, OptionHeader, OptionReply, export_flag,
    handshake, info, introduction, option, reply,
};

/// The longest reply to an option that the client accepts, in bytes.
const MAX_REPLY: u32 = 64 << 10;

pub(super) fn connect(
    target: &Target,
    visitor: Option<&Visitor>,
    io_timeout: Duration,
) -> Result<(Box<dyn Channel>, Agreement), Failure> {
    let deadline = Deadline::after(io_timeout);
    if target.export.len() > MAX_STRING {
        return Err(Failure::Refused(format!("an export's name is at most {MAX_STRING} bytes")));
    }
    let mut socket = Socket::connect(&target.address, io_timeout).map_err(Failure::Connect)?;
    // Abortive until `Drop` closes the connection in order: once the client gives up or is killed,
    // nothing that it sent may still arrive.
    socket.set_abortive(true).map_err(Failure::Connect)?;
    greet(&mut Wire { channel: &mut socket, deadline })?;
    let mut channel: Box<dyn Channel> = match &target.tls {
        None => Box::new(socket),
        Some((config, host)) => {
            start_tls(&mut Wire { channel: &mut socket, deadline })?;
            Box::new(tls::connect(socket, config.clone(), host, deadline.left())?)
        }
    };
    let mut wire = Wire { channel: &mut *channel, deadline };
    let agreement = agree(&mut wire, &target.export, visitor).inspect_err(|failure| {
        if matches!(failure, Failure::Refused(_) | Failure::Claimed(_)) {
            wire.leave();
        }
    })?;
    Ok((channel, agreement))
}

/// Performs the handshake over a connected channel, without TLS.
pub(super) fn over(
    channel: &mut dyn Channel,
    export: &str,
    io_timeout: Duration,
) -> Result<Agreement, Failure> {
    let mut wire = Wire { channel, deadline: Deadline::after(io_timeout) };
    greet(&mut wire)?;
    agree(&mut wire, export, None)
}

/// Negotiates the modes and the export; structured replies come first, because block status needs
/// them (NBD, "Metadata querying").
fn agree(
    wire: &mut Wire<'_>,
    export: &str,
    visitor: Option<&Visitor>,
) -> Result<Agreement, Failure> {
    let incarnation = visitor.map_or(Ok(None), |visitor| introduce(wire, export, visitor))?;
    let structured = wire.ask_whether(option::STRUCTURED_REPLY, &[])?;
    let allocation = if structured { choose_allocation(wire, export)? } else { None };
    let agreement = Agreement {
        size: 0,
        flags: 0,
        max_payload: MAX_PAYLOAD,
        structured,
        allocation,
        incarnation,
        epoch: visitor.map_or(0, |visitor| visitor.epoch),
    };
    go(wire, export, agreement)
}

/// A channel with the deadline of the handshake.
struct Wire<'a> {
    channel: &'a mut dyn Channel,
    deadline: Deadline,
}

/// A reply to an option: its type and its payload.
type Answer = (u32, Vec<u8>);

impl Wire<'_> {
    fn send(&mut self, parts: &[&[u8]]) -> Result<(), Failure> {
        let mut slices: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
        Ok(self.deadline.send(self.channel, &mut slices)?)
    }

    /// Fills `into` and reads no further: the bytes that follow may belong to TLS.
    fn receive(&mut self, into: &mut [u8]) -> Result<(), Failure> {
        let mut at = 0;
        while at < into.len() {
            at += self.deadline.recv(self.channel, &mut into[at..])?;
        }
        Ok(())
    }

    /// Sends an option. The caller sends no further one before the final reply (NBD, "Fixed
    /// newstyle negotiation").
    fn ask(&mut self, option: u32, payload: &[u8]) -> Result<(), Failure> {
        let length = u32::try_from(payload.len())
            .map_err(|_| Failure::protocol("an option that is too long"))?;
        let header = OptionHeader {
            magic: OPTION_MAGIC.into(),
            option: option.into(),
            length: length.into(),
        };
        self.send(&[header.as_bytes(), payload])
    }

    /// Ends the session by ABORT, as a client must that leaves the option phase (NBD, "Termination
    /// of the session during option haggling").
    fn leave(&mut self) {
        // Without ABORT the server still sees the connection close.
        if self.ask(option::ABORT, &[]).is_ok() {
            let _ = self.channel.set_abortive(false);
        }
    }

    fn answer(&mut self, option: u32) -> Result<Answer, Failure> {
        let mut head = [0; size_of::<OptionReply>()];
        self.receive(&mut head)?;
        let head =
            OptionReply::read_from_bytes(&head).map_err(|_| malformed("an option's reply"))?;
        if head.magic.get() != OPTION_REPLY_MAGIC
            || head.option.get() != option
            || head.length.get() > MAX_REPLY
        {
            return Err(malformed("an option's reply"));
        }
        let mut payload = vec![0; head.length.get() as usize];
        self.receive(&mut payload)?;
        Ok((head.reply.get(), payload))
    }

    /// Negotiates an option that the server may lack; returns whether the server accepts it.
    ///
    /// `ERR_TLS_REQD` ends the session, as no option succeeds without TLS then (NBD, "Client-side
    /// requirements").
    fn ask_whether(&mut self, option: u32, payload: &[u8]) -> Result<bool, Failure> {
        self.ask(option, payload)?;
        match self.answer(option)? {
            (reply::ACK, _) => Ok(true),
            (reply::ERR_TLS_REQD, text) => Err(refused(reply::ERR_TLS_REQD, &text)),
            (kind, _) if kind & reply::ERROR_BIT != 0 => Ok(false),
            _ => Err(malformed("the answer to an option")),
        }
    }
}

/// Answers the greeting, and ignores flags in it that it does not know (NBD, "Newstyle
/// negotiation"). It sets no flag that the server did not offer (NBD, "Client flags").
fn greet(wire: &mut Wire<'_>) -> Result<(), Failure> {
    let mut greeting = [0; size_of::<Greeting>()];
    wire.receive(&mut greeting)?;
    let greeting = Greeting::read_from_bytes(&greeting).map_err(|_| malformed("the greeting"))?;
    if greeting.magic.get() != MAGIC {
        return Err(Failure::protocol("it does not greet as an NBD server"));
    }
    if greeting.option_magic.get() != OPTION_MAGIC
        || greeting.flags.get() & handshake::FIXED_NEWSTYLE == 0
    {
        return Err(Failure::protocol("it is too old: it lacks fixed newstyle negotiation"));
    }
    let mut flags = handshake::C_FIXED_NEWSTYLE;
    if greeting.flags.get() & handshake::NO_ZEROES != 0 {
        flags |= handshake::C_NO_ZEROES;
    }
    wire.send(&[&flags.to_be_bytes()])
}

/// Starts TLS before any other option; without it the session ends (NBD, "Client-side requirements"
/// and "Protocol downgrade attacks"). The option carries no data (NBD, "NBD_OPT_STARTTLS").
fn start_tls(wire: &mut Wire<'_>) -> Result<(), Failure> {
    wire.ask(option::STARTTLS, &[])?;
    match wire.answer(option::STARTTLS)? {
        (reply::ACK, payload) if payload.is_empty() => Ok(()),
        (kind, text) if kind & reply::ERROR_BIT != 0 => match refused(kind, &text) {
            Failure::Refused(why) => Err(Failure::Refused(format!("it does not start TLS: {why}"))),
            other => Err(other),
        },
        _ => Err(malformed("the answer to STARTTLS")),
    }
}

/// Introduces this client. Returns the incarnation of the pages if the server knows the option.
fn introduce(
    wire: &mut Wire<'_>,
    export: &str,
    visitor: &Visitor,
) -> Result<Option<Incarnation>, Failure> {
    let mut flags = 0;
    flags |= if visitor.keeps { introduction::KEEPS } else { 0 };
    flags |= if visitor.ends_older { introduction::ENDS_OLDER } else { 0 };
    flags |= if visitor.takes_over { introduction::TAKES_OVER } else { 0 };
    let introduction = Introduction {
        owner: visitor.owner.0.into(),
        client: visitor.client.0.into(),
        generation: visitor.generation.into(),
        epoch: visitor.epoch.into(),
        flags: flags.into(),
    };
    let mut payload = text(export);
    payload.extend(introduction.as_bytes());
    payload.extend(text(&visitor.name));
    wire.ask(option::INTRODUCE, &payload)?;
    let mut incarnation = None;
    loop {
        match wire.answer(option::INTRODUCE)? {
            (reply::ACK, _) => return Ok(incarnation),
            (reply::INCARNATION, payload) => {
                let id = payload.as_slice().try_into();
                let id = id.map_err(|_| malformed("the incarnation of its pages"))?;
                incarnation = Some(Incarnation(u128::from_be_bytes(id)));
            }
            (reply::ERR_POLICY, text) => return Err(Failure::Claimed(said(&text))),
            (kind @ (reply::ERR_SHUTDOWN | reply::ERR_TLS_REQD | reply::ERR_UNKNOWN), text) => {
                return Err(refused(kind, &text));
            }
            // A server of another make, or a disk: neither has an incarnation.
            (kind, _) if kind & reply::ERROR_BIT != 0 => return Ok(None),
            _ => return Err(malformed("the answer to an introduction")),
        }
    }
}

/// Selects `base:allocation`. Returns the context's id if the server reports holes.
///
/// After an error the contexts before it do not count (NBD, "NBD_OPT_SET_META_CONTEXT").
fn choose_allocation(wire: &mut Wire<'_>, export: &str) -> Result<Option<u32>, Failure> {
    let mut payload = text(export);
    payload.extend(1u32.to_be_bytes());
    payload.extend(text(BASE_ALLOCATION));
    wire.ask(option::SET_META_CONTEXT, &payload)?;
    let mut id = None;
    loop {
        match wire.answer(option::SET_META_CONTEXT)? {
            (reply::ACK, _) => return Ok(id),
            (reply::META_CONTEXT, payload) => {
                let (found, name) =
                    payload.split_first_chunk().ok_or_else(|| malformed("a metadata context"))?;
                if name == BASE_ALLOCATION.as_bytes() {
                    id = Some(u32::from_be_bytes(*found));
                }
            }
            (kind, _) if kind & reply::ERROR_BIT != 0 => return Ok(None),
            _ => return Err(malformed("the answer to SET_META_CONTEXT")),
        }
    }
}

/// Chooses the export; the reply must contain `INFO_EXPORT` (NBD, "NBD_OPT_INFO and NBD_OPT_GO").
fn go(wire: &mut Wire<'_>, export: &str, mut agreement: Agreement) -> Result<Agreement, Failure> {
    let mut payload = text(export);
    payload.extend(1u16.to_be_bytes());
    payload.extend(info::BLOCK_SIZE.to_be_bytes());
    wire.ask(option::GO, &payload)?;
    let mut known = false;
    loop {
        match wire.answer(option::GO)? {
            (reply::ACK, _) if known => return Ok(agreement),
            (reply::INFO, payload) => known |= note(&payload, &mut agreement)?,
            (kind, text) if kind & reply::ERROR_BIT != 0 => return Err(refused(kind, &text)),
            _ => return Err(malformed("the answer to GO")),
        }
    }
}

/// Applies one piece of information; returns whether it was the mandatory `INFO_EXPORT`.
///
/// A client ignores kinds that it does not know (NBD, "Option reply types").
fn note(payload: &[u8], agreement: &mut Agreement) -> Result<bool, Failure> {
    let kind = payload.first_chunk().map(|kind| u16::from_be_bytes(*kind));
    match kind.ok_or_else(|| malformed("information about the export"))? {
        info::EXPORT => {
            let export =
                InfoExport::read_from_bytes(payload).map_err(|_| malformed("the export's size"))?;
            agreement.size = export.size.get();
            agreement.flags = export.flags.get();
            if agreement.flags & export_flag::HAS_FLAGS == 0 {
                agreement.flags = 0;
            }
            Ok(true)
        }
        info::BLOCK_SIZE => {
            let sizes = InfoBlockSize::read_from_bytes(payload)
                .map_err(|_| malformed("the block sizes"))?;
            let maximum = sizes.maximum.get();
            if maximum < 4096 || sizes.minimum.get() > 4096 {
                return Err(Failure::protocol("it does not accept requests of one page"));
            }
            agreement.max_payload = maximum.min(MAX_PAYLOAD);
            Ok(false)
        }
        _ => Ok(false),
    }
}

/// Encodes a string as options carry it: a 32-bit length, then the bytes.
fn text(text: &str) -> Vec<u8> {
    // No caller passes more than `MAX_STRING` bytes.
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

fn malformed(what: &str) -> Failure {
    Failure::Protocol(format!("{what} is malformed"))
}

fn refused(kind: u32, text: &[u8]) -> Failure {
    let meaning = match kind {
        reply::ERR_UNSUP => "it does not support the option",
        reply::ERR_POLICY => "its policy forbids it",
        reply::ERR_TLS_REQD => "it demands TLS: give this host's certificate",
        reply::ERR_UNKNOWN => "there is no such export, or not for this host",
        reply::ERR_SHUTDOWN => "it is shutting down",
        _ => "it rejects the option",
    };
    let said = said(text);
    Failure::Refused(if said.is_empty() {
        meaning.to_owned()
    } else {
        format!("{meaning} ({said})")
    })
}

/// Returns the server's text for the log: no control characters, at most 300 characters.
fn said(text: &[u8]) -> String {
    String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).take(300).collect()
}
