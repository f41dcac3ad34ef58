//! A connection as a stream of PDUs.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use aquifer_transport::channel::{Channel, Socket};
use aquifer_transport::serving::{Inbox, Outbox};
use zerocopy::{Immutable, IntoBytes};

use super::broken::{Broken, Fatal};
use super::parse::{self, Payload, Pdu};
use crate::proto::pdu::{
    CapsuleResp, CommonHeader, DIGEST, Data, R2t, Shape, TERM_DATA, TermReq, flag, kind,
};
use crate::proto::{Completion, NvmeStatus, digest};

/// Room beside data, in bytes: a header with its digest and padding, and a completion.
pub(super) const AROUND_DATA: usize = 256;
/// The most data copied into the outbox at once, in bytes.
pub(super) const PIECE: usize = 32 << 10;
/// Time for a host that broke the protocol to read the reason.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A connection that sends and receives PDUs, and that allocates only when it is made.
pub(super) struct Link {
    pub(super) socket: Socket,
    inbox: Inbox,
    pub(super) outbox: Outbox,
    /// The form of received PDUs.
    incoming: Shape,
    /// The form of sent PDUs.
    pub(super) outgoing: Shape,
    /// Length of the current PDU, in bytes.
    current: usize,
    ring: Ring,
}

/// The submission queue, as the host counts it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ring {
    /// Entries of the queue.
    pub(super) size: u32,
    /// The number of commands taken from the queue, modulo its size.
    head: u32,
    /// Whether completions report the head.
    flow_control: bool,
}

impl Ring {
    /// Makes the state of a queue from which the Connect has been taken.
    pub(super) fn new(size: u32, flow_control: bool) -> Self {
        Self { size, head: 1, flow_control }
    }
}

impl Link {
    pub(super) fn new(socket: Socket, deadline: Instant) -> Self {
        socket.set_deadline(Some(deadline));
        Self {
            socket,
            inbox: Inbox::default(),
            outbox: Outbox::default(),
            incoming: Shape::default(),
            outgoing: Shape::default(),
            current: 0,
            ring: Ring::new(1, false),
        }
    }

    /// Sets the form of all further PDUs.
    pub(super) fn agree(&mut self, incoming: Shape, outgoing: Shape) {
        (self.incoming, self.outgoing) = (incoming, outgoing);
    }

    /// Makes the connection a queue.
    pub(super) fn become_queue(&mut self, ring: Ring) {
        self.ring = ring;
    }

    /// Removes the deadline of the handshake.
    pub(super) fn take_time(&self) {
        self.socket.set_deadline(None);
    }

    /// Returns the next PDU if it has arrived completely. The data of the previous PDU becomes
    /// invalid.
    pub(super) fn next(&mut self) -> Result<Option<Pdu>, Broken> {
        self.inbox.consume(std::mem::take(&mut self.current));
        let Some((pdu, length)) = parse::first(self.inbox.bytes(), self.incoming)? else {
            return Ok(None);
        };
        self.current = length;
        if matches!(pdu, Pdu::Command(..)) {
            self.ring.head =
                if self.ring.head + 1 >= self.ring.size { 0 } else { self.ring.head + 1 };
        }
        Ok(Some(pdu))
    }

    /// Waits for the next PDU until the deadline; `None` if the host has closed the connection.
    pub(super) fn wait_next(&mut self) -> Result<Option<Pdu>, Broken> {
        loop {
            if let Some(pdu) = self.next()? {
                return Ok(Some(pdu));
            }
            self.flush()?;
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// Returns the data of the current PDU.
    pub(super) fn data(&self, payload: Payload) -> &[u8] {
        &self.inbox.bytes()[payload.start..][..payload.length]
    }

    /// Waits for more bytes, without a current PDU. Returns false if the host has closed the
    /// connection.
    pub(super) fn fill(&mut self) -> Result<bool, Broken> {
        match self.inbox.fill(&mut self.socket) {
            Ok(true) => Ok(true),
            Ok(false) if self.inbox.bytes().is_empty() => Ok(false),
            Ok(false) => Err(Broken::Truncated),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(Broken::Late),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends all buffered answers.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.outbox.flush(&mut self.socket)
    }

    /// Makes room for `count` bytes of answers.
    pub(super) fn reserve(&mut self, count: usize) -> io::Result<()> {
        self.outbox.reserve(count, &mut self.socket)
    }

    /// Sends a PDU of the handshake, before the form of PDUs is agreed.
    pub(super) fn send(&mut self, pdu: &(impl IntoBytes + Immutable)) -> io::Result<()> {
        self.reserve(size_of_val(pdu))?;
        self.outbox.push(pdu);
        self.flush()
    }

    /// Completes a command.
    pub(super) fn complete(&mut self, id: u16, status: NvmeStatus, result: u64) -> io::Result<()> {
        self.reserve(AROUND_DATA)?;
        self.push_completion(id, status, result);
        Ok(())
    }

    /// As [`complete`](Self::complete); the caller has reserved room.
    fn push_completion(&mut self, id: u16, status: NvmeStatus, result: u64) {
        let completion = Completion {
            result: result.into(),
            queue_head: if self.ring.flow_control {
                (self.ring.head as u16).into()
            } else {
                0.into()
            },
            queue_id: 0.into(),
            command_id: id.into(),
            status: status.to_field(),
        };
        self.push_capsule(completion);
    }

    /// Adds a completion with all its fields; the caller has reserved room.
    pub(super) fn push_capsule(&mut self, completion: Completion) {
        let length = size_of::<CapsuleResp>();
        let header = self.outgoing.header(kind::CAPSULE_RESP, 0, length, 0);
        self.push_header(&CapsuleResp { header, completion });
    }

    /// Requests all data of a command by an R2T.
    pub(super) fn ask(&mut self, id: u16, tag: u16, length: u32) -> io::Result<()> {
        self.reserve(AROUND_DATA)?;
        let header = self.outgoing.header(kind::R2T, 0, size_of::<R2t>(), 0);
        let (offset, length, reserved) = (0.into(), length.into(), [0; 4]);
        self.push_header(&R2t {
            header,
            command_id: id.into(),
            tag: tag.into(),
            offset,
            length,
            reserved,
        });
        Ok(())
    }

    /// Starts a data PDU; `length` bytes and [`end_data`](Self::end_data) must follow. The caller
    /// has reserved room.
    pub(super) fn push_data_head(&mut self, id: u16, offset: usize, length: usize, last: bool) {
        let success = if self.ring.flow_control { 0 } else { flag::SUCCESS };
        let flags = if last { flag::LAST | success } else { 0 };
        let header = self.outgoing.header(kind::C2H_DATA, flags, size_of::<Data>(), length);
        let padded = usize::from(header.data_offset);
        let before = self.outbox.bytes().len();
        self.push_header(&Data {
            header,
            command_id: id.into(),
            tag: 0.into(),
            offset: (offset as u32).into(),
            length: (length as u32).into(),
            reserved: [0; 4],
        });
        let padding = before + padded - self.outbox.bytes().len();
        self.outbox.space(padding).fill(0);
    }

    /// Ends a successful command after its data. The caller has reserved room.
    pub(super) fn end_data(&mut self, id: u16) {
        if self.ring.flow_control {
            self.push_completion(id, NvmeStatus::SUCCESS, 0);
        }
    }

    /// Answers a command with at most [`PIECE`] bytes of data, which `fill` writes, or with the
    /// status that `fill` returns.
    pub(super) fn answer(
        &mut self,
        id: u16,
        length: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), NvmeStatus>,
    ) -> io::Result<()> {
        self.reserve(length + AROUND_DATA)?;
        let before = self.outbox.bytes().len();
        self.push_data_head(id, 0, length, true);
        match fill(self.outbox.space(length)) {
            Ok(()) => {
                self.push_data_digest(length);
                self.end_data(id);
            }
            Err(status) => {
                self.outbox.truncate(before);
                self.push_completion(id, status, 0);
            }
        }
        Ok(())
    }

    /// Answers a command with any number of bytes.
    pub(super) fn answer_bytes(&mut self, id: u16, bytes: &[u8]) -> io::Result<()> {
        let mut offset = 0;
        for piece in bytes.chunks(PIECE) {
            self.reserve(piece.len() + AROUND_DATA)?;
            self.push_data_head(id, offset, piece.len(), offset + piece.len() == bytes.len());
            self.outbox.push_bytes(piece);
            self.push_data_digest(piece.len());
            offset += piece.len();
        }
        self.end_data(id);
        Ok(())
    }

    /// Adds the digest of the last `length` bytes, if data digests are in use.
    fn push_data_digest(&mut self, length: usize) {
        if self.outgoing.data_digest {
            let there = self.outbox.bytes();
            let digest = digest::of(&there[there.len() - length..]);
            self.outbox.push(&digest);
        }
    }

    fn push_header(&mut self, pdu: &(impl IntoBytes + Immutable)) {
        self.outbox.push(pdu);
        if self.outgoing.header_digest {
            self.outbox.push(&digest::of(pdu.as_bytes()));
        }
    }

    /// Sends the host the protocol error and the start of its PDU, then reads until the host closes
    /// or [`LAST_WORDS`] pass. A close with unread bytes would reset the connection and discard the
    /// message.
    pub(super) fn terminate(&mut self, fatal: &Fatal) -> io::Result<()> {
        let offending = self.inbox.bytes();
        let offending = &offending[..offending.len().min(TERM_DATA)];
        let mut header = CommonHeader::bare(kind::C2H_TERM_REQ, size_of::<TermReq>());
        header.length = ((size_of::<TermReq>() + offending.len()) as u32).into();
        let (status, information) = (fatal.status.into(), fatal.information.into());
        self.socket.set_deadline(Some(Instant::now() + LAST_WORDS));
        self.outbox.reserve(size_of::<TermReq>() + TERM_DATA, &mut self.socket)?;
        self.outbox.push(&TermReq { header, status, information, reserved: [0; 10] });
        self.outbox.push_bytes(offending);
        self.flush()?;
        self.socket.shutdown_sending()?;
        let mut ignored = [0; 4096];
        while self.socket.recv(&mut ignored)? > 0 {}
        Ok(())
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

const _: () =
    assert!(size_of::<CapsuleResp>() + size_of::<Data>() + 128 + 3 * DIGEST <= AROUND_DATA);
