//! A man in the middle between an initiator and a target that changes the target's PDUs.

use std::io::{ErrorKind, Read, Write};
use std::mem::offset_of;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use aquifer_fuzz::{Delivery, MAX_SENT_BYTES, Number, Twist, Twisted};
use aquifer_nvme::proto::pdu::{CapsuleResp, CommonHeader, Data, R2t, Shape, TermReq, kind};
use aquifer_nvme::proto::{Completion, NvmeStatus};
use arbitrary::Arbitrary;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::script::finish;

/// The byte of invented data; the target never sends it.
pub const FOREIGN_BYTE: u8 = 0xEE;
/// The time that a deceived initiator waits in vain before the middle closes its connection.
const DECEIVED_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
/// The number of small pieces before the rest goes out at once.
const MAX_PIECES: usize = 64;
/// The longest invented data, in bytes.
const MAX_INVENTED_BYTES: u64 = 128 << 10;

/// The changes to the target's PDUs on one connection.
#[derive(Arbitrary, Debug)]
pub struct Mischief<'a> {
    /// Changes to the PDUs of these numbers.
    twists: Vec<(u8, Twist)>,
    /// Invented PDUs before the PDUs of these numbers.
    said: Vec<(u8, Said<'a>)>,
    delivery: Delivery,
}

/// A PDU that the target did not send.
#[derive(Arbitrary, Debug)]
enum Said<'a> {
    Completion { id: Id, result: u64, status: u16 },
    Data { id: Id, offset: Number, length: Number, flags: u8 },
    R2t { id: Id, tag: u16, offset: Number, length: Number },
    Terminate { status: u16, information: u32 },
    Bytes(&'a [u8]),
}

/// The command to which an invented PDU refers.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Id {
    /// The command of the PDU that follows.
    OfNext,
    NearNext(i8),
    Any(u16),
}

/// The kinds of changes that a connection has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// The middle changed, lost, repeated or reordered PDUs.
    pub twisted: bool,
    /// The middle invented PDUs.
    pub said: bool,
}

/// An initiator's connection and the connection to the target that serves it.
struct Pair<'a> {
    host: UnixStream,
    target: UnixStream,
    shape: Shape,
    mischief: &'a Mischief<'a>,
    to_host: Vec<u8>,
    to_target: Vec<u8>,
    /// Bytes of a PDU of the target that is still incomplete.
    started: Vec<u8>,
    /// Number of PDUs that the target has sent.
    count: usize,
    pieces: usize,
    done: Done,
    over: bool,
}

/// Carries an initiator's connections to a target until `stop` closes; returns the changes on each.
///
/// The n-th connection gets the n-th mischief. Further connections are closed.
pub fn carry<const COUNT: usize>(
    listener: &UnixListener,
    stop: &UnixStream,
    shape: Shape,
    mischiefs: [&Mischief<'_>; COUNT],
    serve: impl Fn(UnixStream) + Sync,
) -> [Done; COUNT] {
    let mut done = [Done::default(); COUNT];
    thread::scope(|scope| {
        let mut pairs: Vec<Pair<'_>> = Vec::new();
        loop {
            let mut polled =
                vec![PollFd::new(listener, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
            for pair in pairs.iter().filter(|pair| !pair.over) {
                let wants = |pending: &Vec<u8>| {
                    if pending.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT }
                };
                polled.push(PollFd::new(&pair.host, wants(&pair.to_host)));
                polled.push(PollFd::new(&pair.target, wants(&pair.to_target)));
            }
            let deceived = pairs.iter().any(|pair| pair.done != Done::default());
            let timeout = deceived.then_some(&DECEIVED_WAIT);
            let happened = poll(&mut polled, timeout).expect("poll(2) failed");
            let (connecting, stopped) =
                (!polled[0].revents().is_empty(), !polled[1].revents().is_empty());
            for (pair, done) in pairs.iter().zip(&mut done) {
                *done = pair.done;
            }
            if stopped {
                pairs.iter_mut().for_each(Pair::end);
                return;
            }
            if connecting {
                let (host, _) = listener.accept().expect("no file descriptor is free");
                if let Some(mischief) = mischiefs.get(pairs.len()) {
                    let (target, theirs) = UnixStream::pair().expect("no file descriptor is free");
                    let serve = &serve;
                    scope.spawn(move || serve(theirs));
                    pairs.push(Pair::new(host, target, shape, mischief));
                }
            }
            for pair in pairs.iter_mut().filter(|pair| !pair.over) {
                pair.carry();
                if happened == 0 && pair.done != Done::default() {
                    pair.end();
                }
            }
        }
    });
    done
}

impl<'a> Pair<'a> {
    fn new(host: UnixStream, target: UnixStream, shape: Shape, mischief: &'a Mischief<'a>) -> Self {
        for stream in [&host, &target] {
            stream.set_nonblocking(true).expect("the descriptor is a socket");
        }
        let (to_host, to_target, started) = (Vec::new(), Vec::new(), Vec::new());
        let (count, pieces, done, over) = (0, 0, Done::default(), false);
        Self {
            host,
            target,
            shape,
            mischief,
            to_host,
            to_target,
            started,
            count,
            pieces,
            done,
            over,
        }
    }

    /// Passes on all bytes that both sides can take now.
    fn carry(&mut self) {
        let asks = hear(&self.host, &mut self.to_target);
        let answers = hear(&self.target, &mut self.started);
        self.deceive();
        let is_small = self.pieces < MAX_PIECES;
        let piece = if is_small { self.mischief.delivery.piece() } else { usize::MAX };
        self.pieces += 1;
        let taken = say(&self.target, &mut self.to_target, usize::MAX);
        let told = say(&self.host, &mut self.to_host, piece);
        if !asks || !told || !(answers && taken || !self.to_host.is_empty()) {
            self.end();
        }
    }

    /// Applies the mischief to all PDUs that have arrived whole.
    fn deceive(&mut self) {
        let (mut messages, mut twists) = (Twisted::default(), Vec::new());
        let mut next_message = 0u8;
        while let Some(pdu) = self.next() {
            let number = self.count;
            let of_this = |to: &u8| usize::from(*to) == number;
            for (_, said) in self.mischief.said.iter().filter(|(to, _)| of_this(to)) {
                self.done.said = true;
                messages.push(said.bytes(self.shape, command_of(&pdu)));
                next_message = next_message.saturating_add(1);
            }
            for (_, twist) in self.mischief.twists.iter().filter(|(to, _)| of_this(to)) {
                self.done.twisted = true;
                twists.push((next_message, *twist));
            }
            messages.push(pdu);
            next_message = next_message.saturating_add(1);
            self.count += 1;
        }
        messages.twist(&twists);
        let room = MAX_SENT_BYTES.saturating_sub(self.to_host.len());
        let bytes = messages.bytes();
        self.to_host.extend(&bytes[..bytes.len().min(room)]);
    }

    fn next(&mut self) -> Option<Vec<u8>> {
        let (header, _) = CommonHeader::read_from_prefix(&self.started).ok()?;
        let length = header.length.get() as usize;
        (self.started.len() >= length).then(|| self.started.drain(..length).collect())
    }

    fn end(&mut self) {
        self.over = true;
        for stream in [&self.host, &self.target] {
            // It fails if the peer has closed the connection first.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Reads all available bytes; returns false at the end of the stream or on an error.
fn hear(mut stream: &UnixStream, into: &mut Vec<u8>) -> bool {
    match stream.read_to_end(into) {
        Ok(_) => false,
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    }
}

/// Sends the bytes that the socket takes now, at most `most` if that is a limit; returns false on
/// an error.
fn say(mut stream: &UnixStream, bytes: &mut Vec<u8>, most: usize) -> bool {
    while !bytes.is_empty() {
        match stream.write(&bytes[..bytes.len().min(most)]) {
            Ok(sent) => drop(bytes.drain(..sent)),
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        }
        if most < usize::MAX {
            break;
        }
    }
    true
}

/// Returns the command to which a PDU of a target refers.
fn command_of(pdu: &[u8]) -> u16 {
    let at = match pdu[0] {
        kind::CAPSULE_RESP => {
            offset_of!(CapsuleResp, completion) + offset_of!(Completion, command_id)
        }
        _ => offset_of!(Data, command_id),
    };
    pdu.get(at..at + 2).map_or(0, |id| u16::from_le_bytes([id[0], id[1]]))
}

impl Id {
    fn number(self, next: u16) -> u16 {
        match self {
            Self::OfNext => next,
            Self::NearNext(by) => next.wrapping_add_signed(by.into()),
            Self::Any(number) => number,
        }
    }
}

impl Said<'_> {
    fn bytes(&self, shape: Shape, next: u16) -> Vec<u8> {
        match *self {
            Self::Completion { id, result, status } => {
                let header = shape.header(kind::CAPSULE_RESP, 0, size_of::<CapsuleResp>(), 0);
                let mut completion = Completion::new_zeroed();
                completion.command_id = id.number(next).into();
                completion.result = result.into();
                completion.status = NvmeStatus(status).to_field();
                finish(shape, CapsuleResp { header, completion }.as_bytes(), &header, &[])
            }
            Self::Data { id, offset, length, flags } => {
                let data = vec![FOREIGN_BYTE; length.bytes().min(MAX_INVENTED_BYTES) as usize];
                let header =
                    shape.header(kind::C2H_DATA, flags & 0xC, size_of::<Data>(), data.len());
                let (command_id, tag) = (id.number(next).into(), 0.into());
                let (offset, length) = ((offset.bytes() as u32).into(), (data.len() as u32).into());
                let pdu = Data { header, command_id, tag, offset, length, reserved: [0; 4] };
                finish(shape, pdu.as_bytes(), &header, &data)
            }
            Self::R2t { id, tag, offset, length } => {
                let header = shape.header(kind::R2T, 0, size_of::<R2t>(), 0);
                let (command_id, tag) = (id.number(next).into(), tag.into());
                let (offset, length) =
                    ((offset.bytes() as u32).into(), (length.bytes() as u32).into());
                let pdu = R2t { header, command_id, tag, offset, length, reserved: [0; 4] };
                finish(shape, pdu.as_bytes(), &header, &[])
            }
            Self::Terminate { status, information } => {
                let header = CommonHeader::bare(kind::C2H_TERM_REQ, size_of::<TermReq>());
                let (status, information) = (status.into(), information.into());
                TermReq { header, status, information, reserved: [0; 10] }.as_bytes().to_vec()
            }
            Self::Bytes(bytes) => bytes.to_vec(),
        }
    }
}
