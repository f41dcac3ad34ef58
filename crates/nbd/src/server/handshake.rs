//! Fixed newstyle negotiation by the server, from the greeting to the choice of an export.

use std::io::{self, IoSlice};
use std::time::{Duration, Instant};

use aquifer_page::visitor::{Denied, End, Stay, Visitor};
use aquifer_page::{ClientId, LeaseId, OwnerId};
use aquifer_transport::channel::{Channel, Socket};
use aquifer_transport::tls::{self, TlsError};
use zerocopy::{FromBytes, IntoBytes};

use super::admission::Admission;
use super::{Exports, Peer, Refused, Security, Storage};
use crate::proto::{
    self, Introduction, OptionHeader, export_flag, handshake, info, introduction, option, reply,
};

/// The longest option that the server parses, in bytes; useful options are far shorter.
const MAX_OPTION: usize = 16 << 10;
/// The longest option that the server skips and answers; a longer one ends the connection.
const MAX_SKIPPED: usize = 1 << 20;

/// The result of the handshake.
pub(super) struct Terms {
    pub(super) channel: Box<dyn Channel>,
    pub(super) export: Storage,
    /// The name by which the client chose the export.
    pub(super) name: String,
    /// The server answers reads with structured replies.
    pub(super) structured: bool,
    /// The client may ask for block status.
    pub(super) allocation: bool,
    /// The client's admission to the lease, once it has introduced itself.
    pub(super) stay: Option<Stay>,
    /// The lender's limits on the connection.
    pub(super) admission: Admission,
}

/// The reason why a handshake fails.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("the client took too long")]
    Late,
    #[error("the client violates the protocol: {0}")]
    Protocol(&'static str),
    #[error("the client used EXPORT_NAME, which cannot carry a refusal: {0}")]
    Refused(#[from] Refused),
    #[error("the client did not start TLS")]
    NoTls,
}

impl HandshakeError {
    fn from_io(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::WouldBlock { Self::Late } else { Self::Io(error) }
    }
}

/// The effect of one option.
enum Next {
    Go(Storage, Admission),
    StartTls,
    More,
    End,
}

/// Negotiates with a client within `timeout`; `None` if the client leaves without an export.
///
/// After TLS, it puts the host of the client's certificate into `peer`.
pub(super) fn run(
    socket: Socket,
    security: &Security,
    exports: &dyn Exports,
    peer: &mut Peer,
    timeout: Duration,
    end: &dyn Fn() -> io::Result<End>,
) -> Result<Option<Terms>, HandshakeError> {
    let deadline = Instant::now() + timeout;
    let mut wire = Wire::new(socket, deadline);
    // A server sets no other flag in its greeting (NBD, "Handshake flags").
    let greeting = proto::Greeting {
        magic: proto::MAGIC.into(),
        option_magic: proto::OPTION_MAGIC.into(),
        flags: (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).into(),
    };
    wire.send(&[greeting.as_bytes()])?;
    let mut flags = [0; 4];
    wire.recv(&mut flags)?;
    let flags = u32::from_be_bytes(flags);
    // An unknown flag ends the connection (NBD, "Newstyle negotiation" and "Client flags").
    if flags & !(handshake::C_FIXED_NEWSTYLE | handshake::C_NO_ZEROES) != 0 {
        return Err(HandshakeError::Protocol("unknown handshake flags"));
    }
    let no_zeroes = flags & handshake::C_NO_ZEROES != 0;

    let tls = if matches!(security, Security::Tls(_)) { Tls::Demanded } else { Tls::Absent };
    let next = Haggle::new(&mut wire, exports, peer, no_zeroes, tls, end).run()?;
    match (next, security) {
        (Agreed::Terms(agreed), _) => Ok(Some(agreed.with(wire.channel))),
        (Agreed::StartTls, Security::Tls(config)) => {
            let left = deadline.saturating_duration_since(Instant::now());
            // A failed TLS handshake ends the session (NBD, "FORCEDTLS mode").
            let (stream, host) = tls::accept(wire.channel, config.clone(), left)?;
            peer.host = Some(host);
            // Nothing of the negotiation before TLS counts (NBD, "NBD_OPT_STARTTLS").
            let mut wire = Wire::new(stream, deadline);
            match Haggle::new(&mut wire, exports, peer, no_zeroes, Tls::Active, end).run()? {
                Agreed::Terms(agreed) => Ok(Some(agreed.with(wire.channel))),
                _ => Ok(None),
            }
        }
        _ => Ok(None),
    }
}

/// A channel with a deadline, from which the server reads no byte before it needs it.
struct Wire<C> {
    channel: C,
}

impl<C: Channel> Wire<C> {
    fn new(channel: C, deadline: Instant) -> Self {
        channel.set_deadline(Some(deadline));
        Self { channel }
    }

    fn recv(&mut self, mut buf: &mut [u8]) -> Result<(), HandshakeError> {
        while !buf.is_empty() {
            match self.channel.recv(buf).map_err(HandshakeError::from_io)? {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                received => buf = &mut buf[received..],
            }
        }
        Ok(())
    }

    fn send(&mut self, parts: &[&[u8]]) -> Result<(), HandshakeError> {
        let mut slices: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
        self.channel.send_all(&mut slices).map_err(HandshakeError::from_io)
    }
}

/// The end of the option phase.
enum Agreed {
    Terms(Modes),
    StartTls,
    Nothing,
}

struct Modes {
    export: Storage,
    name: String,
    structured: bool,
    allocation: bool,
    stay: Option<Stay>,
    admission: Admission,
}

impl Modes {
    fn with(self, channel: impl Channel + 'static) -> Terms {
        let Self { export, name, structured, allocation, stay, admission } = self;
        let channel = Box::new(channel);
        Terms { channel, export, name, structured, allocation, stay, admission }
    }
}

/// TLS in a session.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tls {
    /// The server has none.
    Absent,
    /// The client must start it before any other option.
    Demanded,
    /// The session runs under it.
    Active,
}

/// The option phase ("Option haggling" in the specification).
struct Haggle<'a, C> {
    wire: &'a mut Wire<C>,
    exports: &'a dyn Exports,
    peer: &'a Peer,
    no_zeroes: bool,
    tls: Tls,
    structured: bool,
    /// The export for which the client selected `base:allocation`.
    allocation_of: Option<String>,
    chosen: String,
    /// Makes the handle by which other threads end this connection.
    end: &'a dyn Fn() -> io::Result<End>,
    /// The lease to which the client has introduced itself, and its admission.
    stay: Option<(LeaseId, Stay)>,
}

impl<'a, C: Channel> Haggle<'a, C> {
    fn new(
        wire: &'a mut Wire<C>,
        exports: &'a dyn Exports,
        peer: &'a Peer,
        no_zeroes: bool,
        tls: Tls,
        end: &'a dyn Fn() -> io::Result<End>,
    ) -> Self {
        let (structured, allocation_of, chosen, stay) = (false, None, String::new(), None);
        Self { wire, exports, peer, no_zeroes, tls, structured, allocation_of, chosen, end, stay }
    }

    fn run(mut self) -> Result<Agreed, HandshakeError> {
        loop {
            match self.one_option()? {
                Next::More => {}
                Next::End => return Ok(Agreed::Nothing),
                Next::StartTls => return Ok(Agreed::StartTls),
                Next::Go(export, admission) => {
                    self.wire.channel.set_deadline(None);
                    let allocation = self.allocation_of.as_ref() == Some(&self.chosen);
                    let Self { structured, chosen: name, stay, .. } = self;
                    let stay =
                        stay.filter(|(lease, _)| export.id() == Some(*lease)).map(|(_, stay)| stay);
                    return Ok(Agreed::Terms(Modes {
                        export,
                        name,
                        structured,
                        allocation,
                        stay,
                        admission,
                    }));
                }
            }
        }
    }

    /// Answers one option; the length in its header lets the server skip an unknown one (NBD,
    /// "Newstyle negotiation").
    fn one_option(&mut self) -> Result<Next, HandshakeError> {
        let mut header = [0; size_of::<OptionHeader>()];
        self.wire.recv(&mut header)?;
        let header: OptionHeader = zerocopy::transmute!(header);
        if header.magic.get() != proto::OPTION_MAGIC {
            return Err(HandshakeError::Protocol("an option without its magic number"));
        }
        let (option, length) = (header.option.get(), header.length.get() as usize);
        if length > MAX_OPTION {
            self.skip(length)?;
            return match option {
                _ if self.tls == Tls::Demanded => self.before_tls(option, length),
                option::ABORT => self.abort(),
                option::EXPORT_NAME => Err(HandshakeError::Protocol("a long export name")),
                _ => self.error(option, reply::ERR_TOO_BIG, "the option is too long"),
            };
        }
        let mut payload = vec![0; length];
        self.wire.recv(&mut payload)?;
        if self.tls == Tls::Demanded {
            return self.before_tls(option, length);
        }
        match option {
            option::EXPORT_NAME => self.export_name(&payload),
            option::ABORT => self.abort(),
            option::LIST => self.list(&payload),
            option::INFO | option::GO => self.info(option, &payload),
            // The option carries no data (NBD, "NBD_OPT_STRUCTURED_REPLY").
            option::STRUCTURED_REPLY if payload.is_empty() => {
                self.structured = true;
                self.acknowledge(option)
            }
            option::STRUCTURED_REPLY => self.invalid(option),
            // TLS starts once in a session (NBD, "FORCEDTLS mode").
            option::STARTTLS if self.tls == Tls::Active => self.invalid(option),
            option::INTRODUCE => self.introduce(&payload),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(option, &payload)
            }
            // A server without TLS does not know STARTTLS either (NBD, "NOTLS mode").
            _ => self.error(option, reply::ERR_UNSUP, "this server does not support that option"),
        }
    }

    /// Answers an option before TLS, which every export needs (NBD, "FORCEDTLS mode").
    ///
    /// So a client cannot be led into plain text (NBD, "Protocol downgrade attacks"). EXPORT_NAME
    /// ends the session, because its reply cannot carry an error.
    fn before_tls(&mut self, option: u32, length: usize) -> Result<Next, HandshakeError> {
        match option {
            // The option carries no data (NBD, "NBD_OPT_STARTTLS").
            option::STARTTLS if length == 0 => {
                self.acknowledge(option)?;
                Ok(Next::StartTls)
            }
            option::STARTTLS => self.invalid(option),
            option::ABORT => self.abort(),
            option::EXPORT_NAME => Err(HandshakeError::NoTls),
            _ => self.error(option, reply::ERR_TLS_REQD, "start TLS first"),
        }
    }

    /// Acknowledges the option and ignores its data (NBD, "NBD_OPT_ABORT").
    fn abort(&mut self) -> Result<Next, HandshakeError> {
        // The client may close the connection without waiting for the reply.
        let _ = self.acknowledge(option::ABORT);
        Ok(Next::End)
    }

    /// Starts transmission; an export that the client may not use ends the session, because the
    /// reply cannot carry an error (NBD, "NBD_OPT_EXPORT_NAME").
    fn export_name(&mut self, name: &[u8]) -> Result<Next, HandshakeError> {
        let name = text(name).ok_or(HandshakeError::Protocol("a malformed export name"))?;
        let export = self.exports.open(name, self.peer)?;
        let admission = Admission::new(self.exports, &export, self.peer)?;
        let reply = proto::ExportNameReply {
            size: export.size().0.into(),
            flags: self.flags(&export).into(),
        };
        // The zeroes are omitted if both ends agreed to that (NBD, "Handshake flags").
        let zeroes: &[u8] = if self.no_zeroes { &[] } else { &[0; 124] };
        self.wire.send(&[reply.as_bytes(), zeroes])?;
        self.chosen = name.to_owned();
        Ok(Next::Go(export, admission))
    }

    /// Lists the exports, and refuses an option with data (NBD, "NBD_OPT_LIST").
    fn list(&mut self, payload: &[u8]) -> Result<Next, HandshakeError> {
        if !payload.is_empty() {
            return self.invalid(option::LIST);
        }
        for name in self.exports.list(self.peer) {
            let length = (name.len() as u32).to_be_bytes();
            self.reply(option::LIST, reply::SERVER, &[&length, name.as_bytes()])?;
        }
        self.acknowledge(option::LIST)
    }

    /// Describes an export, always with `INFO_EXPORT`, and ignores requests for information that it
    /// does not know (NBD, "NBD_OPT_INFO and NBD_OPT_GO").
    fn info(&mut self, option: u32, payload: &[u8]) -> Result<Next, HandshakeError> {
        let Some((name, requests)) = parse_info(payload) else { return self.invalid(option) };
        let export = match self.exports.open(name, self.peer) {
            Ok(export) => export,
            Err(refused) => return self.refuse(option, &refused),
        };
        let admission = match option {
            option::INFO => Ok(Admission::default()),
            _ => Admission::new(self.exports, &export, self.peer),
        };
        let admission = match admission {
            Ok(admission) => admission,
            Err(refused) => return self.refuse(option, &refused),
        };
        let about = proto::InfoExport {
            kind: info::EXPORT.into(),
            size: export.size().0.into(),
            flags: self.flags(&export).into(),
        };
        self.reply(option, reply::INFO, &[about.as_bytes()])?;
        // A client that asked must keep to these (NBD, "Size constraints").
        let block_size = proto::InfoBlockSize {
            kind: info::BLOCK_SIZE.into(),
            minimum: 1.into(),
            preferred: proto::PREFERRED_BLOCK.into(),
            maximum: proto::MAX_PAYLOAD.into(),
        };
        self.reply(option, reply::INFO, &[block_size.as_bytes()])?;
        if requests.chunks_exact(2).any(|kind| kind == info::NAME.to_be_bytes()) {
            self.reply(option, reply::INFO, &[&info::NAME.to_be_bytes(), name.as_bytes()])?;
        }
        self.acknowledge(option)?;
        if option == option::INFO {
            return Ok(Next::More);
        }
        self.chosen = name.to_owned();
        Ok(Next::Go(export, admission))
    }

    /// Admits the client to the lease, or reports the lease's owner.
    fn introduce(&mut self, payload: &[u8]) -> Result<Next, HandshakeError> {
        let option = option::INTRODUCE;
        self.stay = None;
        let Some((name, visitor)) = parse_introduction(payload) else {
            return self.invalid(option);
        };
        let lease = match self.exports.open(name, self.peer) {
            Ok(Storage::Lease(lease)) => lease,
            // A disk keeps its own pages, so it has no incarnation.
            Ok(Storage::Disk(_)) => {
                return self.error(option, reply::ERR_UNSUP, "a disk has no incarnation");
            }
            Err(refused) => return self.refuse(option, &refused),
        };
        match lease.admit(&visitor, (self.end)()?) {
            Ok(stay) => self.stay = Some((lease.id(), stay)),
            Err(denied) => {
                let (peer, name, lease) = (&self.peer, &visitor.name, lease.id());
                tracing::warn!(%lease, "refused {name} ({peer}): {denied}");
                let kind = match denied {
                    Denied::Claimed(_) => reply::ERR_POLICY,
                    Denied::Late(_) | Denied::Busy(_) | Denied::Unrecorded(_) => {
                        reply::ERR_SHUTDOWN
                    }
                };
                return self.error(option, kind, &denied.to_string());
            }
        }
        self.reply(option, reply::INCARNATION, &[&lease.incarnation().0.to_be_bytes()])?;
        self.acknowledge(option)
    }

    /// Lists or selects metadata contexts, with structured replies only; it ignores queries that
    /// match none (NBD, "Metadata querying").
    fn meta_context(&mut self, option: u32, payload: &[u8]) -> Result<Next, HandshakeError> {
        let set = option == option::SET_META_CONTEXT;
        if set {
            // Even a failed choice replaces an earlier one (NBD, "NBD_OPT_SET_META_CONTEXT").
            self.allocation_of = None;
        }
        if !self.structured {
            return self.error(option, reply::ERR_INVALID, "ask for structured replies first");
        }
        let Some((name, queries)) = parse_meta_context(payload) else {
            return self.invalid(option);
        };
        let export = match self.exports.open(name, self.peer) {
            Ok(export) => export,
            Err(refused) => return self.refuse(option, &refused),
        };
        // A list may ask for all contexts (no query) or for a whole namespace (NBD,
        // "NBD_OPT_LIST_META_CONTEXT").
        let wanted = |query: &str| query == proto::BASE_ALLOCATION || (!set && query == "base:");
        let asked = queries.iter().any(|query| wanted(query)) || (!set && queries.is_empty());
        // Only leases report holes.
        if asked && export.lease().is_some() {
            let id = if set { proto::BASE_ALLOCATION_ID } else { 0 };
            self.reply(
                option,
                reply::META_CONTEXT,
                &[&id.to_be_bytes(), proto::BASE_ALLOCATION.as_bytes()],
            )?;
            if set {
                self.allocation_of = Some(name.to_owned());
            }
        }
        self.acknowledge(option)
    }

    /// Returns the export's flags; `SEND_DF` needs structured replies (NBD, "Transmission flags").
    fn flags(&self, export: &Storage) -> u16 {
        let always = export.flags();
        if self.structured { always | export_flag::SEND_DF } else { always }
    }

    fn acknowledge(&mut self, option: u32) -> Result<Next, HandshakeError> {
        self.reply(option, reply::ACK, &[])
    }

    fn invalid(&mut self, option: u32) -> Result<Next, HandshakeError> {
        self.error(option, reply::ERR_INVALID, "the option is malformed")
    }

    /// Refuses an option and awaits the next: the client ends the session, not the server (NBD,
    /// "Termination of the session during option haggling").
    fn refuse(&mut self, option: u32, refused: &Refused) -> Result<Next, HandshakeError> {
        tracing::info!("{}: {refused}", self.peer);
        let kind = match refused {
            Refused::Unknown(_) => reply::ERR_UNKNOWN,
            Refused::Forbidden(_) => reply::ERR_POLICY,
        };
        self.error(option, kind, &refused.to_string())
    }

    /// Answers with an error and its text for people (NBD, "Option reply types").
    fn error(&mut self, option: u32, kind: u32, why: &str) -> Result<Next, HandshakeError> {
        // A character takes at most four bytes.
        let why: String = why.chars().take(proto::MAX_STRING / 4).collect();
        self.reply(option, kind, &[why.as_bytes()])
    }

    /// Sends a reply, which repeats the option that it answers (NBD, "Fixed newstyle negotiation").
    fn reply(&mut self, option: u32, kind: u32, payload: &[&[u8]]) -> Result<Next, HandshakeError> {
        let length: usize = payload.iter().map(|part| part.len()).sum();
        let header = proto::OptionReply {
            magic: proto::OPTION_REPLY_MAGIC.into(),
            option: option.into(),
            reply: kind.into(),
            length: (length as u32).into(),
        };
        let mut parts = vec![header.as_bytes()];
        parts.extend_from_slice(payload);
        self.wire.send(&parts)?;
        Ok(Next::More)
    }

    fn skip(&mut self, length: usize) -> Result<(), HandshakeError> {
        if length > MAX_SKIPPED {
            return Err(HandshakeError::Protocol("an option that is far too long"));
        }
        let mut waste = [0; 4096];
        let mut left = length;
        while left > 0 {
            let now = left.min(waste.len());
            self.wire.recv(&mut waste[..now])?;
            left -= now;
        }
        Ok(())
    }
}

/// Parses the payload of INFO and GO: the name and the information requests.
fn parse_info(payload: &[u8]) -> Option<(&str, &[u8])> {
    let (name, rest) = counted_text(payload)?;
    let (count, requests) = u16::read_from_prefix(rest).ok()?;
    (requests.len() == 2 * usize::from(u16::from_be(count))).then_some((name, requests))
}

/// Parses the payload of LIST_META_CONTEXT and SET_META_CONTEXT: the export and the queries.
fn parse_meta_context(payload: &[u8]) -> Option<(&str, Vec<&str>)> {
    let (name, rest) = counted_text(payload)?;
    let (count, mut rest) = u32::read_from_prefix(rest).ok()?;
    let mut queries = Vec::new();
    for _ in 0..u32::from_be(count) {
        let (query, after) = counted_text(rest)?;
        queries.push(query);
        rest = after;
    }
    rest.is_empty().then_some((name, queries))
}

/// Parses the payload of INTRODUCE: the export and the visitor.
fn parse_introduction(payload: &[u8]) -> Option<(&str, Visitor)> {
    let (export, rest) = counted_text(payload)?;
    let (introduction, rest) = Introduction::read_from_prefix(rest).ok()?;
    let (name, rest) = counted_text(rest)?;
    let has = |flag| introduction.flags.get() & flag != 0;
    let visitor = Visitor {
        owner: OwnerId(introduction.owner.get()),
        // The name appears in logs and in errors sent to other clients.
        name: name.chars().filter(|c| !c.is_control()).take(200).collect(),
        generation: introduction.generation.get(),
        ends_older: has(introduction::ENDS_OLDER),
        client: ClientId(introduction.client.get()),
        epoch: introduction.epoch.get(),
        keeps: has(introduction::KEEPS),
        takes_over: has(introduction::TAKES_OVER),
    };
    rest.is_empty().then_some((export, visitor))
}

/// Splits off a string with a 32-bit length before it.
fn counted_text(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let (length, rest) = u32::read_from_prefix(bytes).ok()?;
    let (name, rest) = rest.split_at_checked(u32::from_be(length) as usize)?;
    Some((text(name)?, rest))
}

/// Returns the string if the specification allows it: UTF-8, no NUL, at most `MAX_STRING` bytes.
fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes)
        .ok()
        .filter(|text| text.len() <= proto::MAX_STRING && !text.contains('\0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_to_their_last_byte_and_no_further() {
        let good = b"\0\0\0\x02ab\0\x01\0\x03";
        assert_eq!(parse_info(good), Some(("ab", &[0, 3][..])));
        for cut in 0..good.len() {
            assert_eq!(parse_info(&good[..cut]), None, "cut at {cut}");
        }
        assert_eq!(parse_info(b"\0\0\0\x02ab\0\x01\0\x03x"), None);
        assert_eq!(parse_info(b"\xff\xff\xff\xffab\0\0"), None);

        let good = b"\0\0\0\x01x\0\0\0\x02\0\0\0\x01a\0\0\0\0";
        assert_eq!(parse_meta_context(good), Some(("x", vec!["a", ""])));
        for cut in 0..good.len() {
            assert_eq!(parse_meta_context(&good[..cut]), None, "cut at {cut}");
        }
    }

    #[test]
    fn names_with_nul_or_bad_utf8_or_of_great_length_are_malformed() {
        assert_eq!(text(b"a\0b"), None);
        assert_eq!(text(b"\xff"), None);
        assert_eq!(text(&[b'a'; proto::MAX_STRING + 1]), None);
        assert!(text(&[b'a'; proto::MAX_STRING]).is_some());
    }
}
