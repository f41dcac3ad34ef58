use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use zerocopy::{Immutable, IntoBytes};

use super::broken::{Broken, Fatal};
use super::parse::{self, Payload, Pdu};
use crate::channel::{Channel, Socket};
use crate::nvme::proto::pdu::{
    CapsuleResp, CommonHeader, DIGEST, Data, R2t, Shape, TERM_DATA, TermReq, flag, kind,
};
use crate::nvme::proto::{Completion, Status, digest};
use crate::serving::{Inbox, Outbox};

/// Room for a header with its digest and padding, and again for a completion: what comes beside data.
pub(super) const AROUND_DATA: usize = 256;
/// The longest data that is copied into the outbox at once.
pub(super) const PIECE: usize = 32 << 10;
/// How long a host that broke the protocol has to read why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A connection as PDUs. Allocates nothing once it is made.
pub(super) struct Link {
    pub(super) socket: Socket,
    inbox: Inbox,
    pub(super) outbox: Outbox,
    /// How PDUs look that come.
    incoming: Shape,
    /// How PDUs look that go.
    pub(super) outgoing: Shape,
    /// Bytes of the PDU at hand.
    current: usize,
    ring: Ring,
}

/// The submission queue that the host sees.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ring {
    /// Entries.
    pub(super) size: u32,
    /// How many commands were taken from it, modulo the size.
    head: u32,
    /// Whether the host wants to know that.
    flow_control: bool,
}

impl Ring {
    /// Of a queue from which Connect was taken.
    pub(super) fn new(size: u32, flow_control: bool) -> Self {
        Self { size, head: 1, flow_control }
    }
}

impl Link {
    pub(super) fn new(socket: Socket, deadline: Instant) -> Self {
        socket.set_deadline(Some(deadline));
        Self {
            socket,
            inbox: Inbox::new(),
            outbox: Outbox::new(),
            incoming: Shape::default(),
            outgoing: Shape::default(),
            current: 0,
            ring: Ring::new(1, false),
        }
    }

    /// From now on PDUs look so.
    pub(super) fn agree(&mut self, incoming: Shape, outgoing: Shape) {
        (self.incoming, self.outgoing) = (incoming, outgoing);
    }

    /// The connection is a queue from now on.
    pub(super) fn become_queue(&mut self, ring: Ring) {
        self.ring = ring;
    }

    /// The host may take its time from now on.
    pub(super) fn take_time(&self) {
        self.socket.set_deadline(None);
    }

    /// The next PDU, if all of it is there; the one before is gone then.
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

    /// The next PDU, waited for until the deadline; `None` if the host has closed the connection.
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

    /// The data of the PDU at hand.
    pub(super) fn data(&self, payload: Payload) -> &[u8] {
        &self.inbox.bytes()[payload.start..][..payload.length]
    }

    /// Waits for more bytes, when there is no PDU at hand; false if the host has closed the connection.
    pub(super) fn fill(&mut self) -> Result<bool, Broken> {
        match self.inbox.fill(&mut self.socket) {
            Ok(true) => Ok(true),
            Ok(false) if self.inbox.bytes().is_empty() => Ok(false),
            Ok(false) => Err(Broken::Truncated),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(Broken::Late),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends all there is.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.outbox.flush(&mut self.socket)
    }

    /// Makes room for `count` bytes of answers.
    pub(super) fn reserve(&mut self, count: usize) -> io::Result<()> {
        self.outbox.reserve(count, &mut self.socket)
    }

    /// Sends a PDU that is alone on the connection, before anything is agreed on.
    pub(super) fn send(&mut self, pdu: &(impl IntoBytes + Immutable)) -> io::Result<()> {
        self.reserve(size_of_val(pdu))?;
        self.outbox.push(pdu);
        self.flush()
    }

    /// Completes a command.
    pub(super) fn complete(&mut self, id: u16, status: Status, result: u64) -> io::Result<()> {
        self.reserve(AROUND_DATA)?;
        self.push_completion(id, status, result);
        Ok(())
    }

    /// As [`complete`](Self::complete), with room reserved.
    fn push_completion(&mut self, id: u16, status: Status, result: u64) {
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

    /// Completes a command with all that the host gets to see. Room was reserved.
    pub(super) fn push_capsule(&mut self, completion: Completion) {
        let length = size_of::<CapsuleResp>();
        let header = self.outgoing.header(kind::CAPSULE_RESP, 0, length, 0);
        self.push_header(&CapsuleResp { header, completion });
    }

    /// Asks for all data of a command.
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

    /// Starts data for the host: what follows are `length` bytes and [`end_data`](Self::end_data). Room was reserved.
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

    /// Ends a command that succeeded, whose data was sent. Room was reserved.
    pub(super) fn end_data(&mut self, id: u16) {
        if self.ring.flow_control {
            self.push_completion(id, Status::SUCCESS, 0);
        }
    }

    /// Answers a command with at most [`PIECE`] bytes of data that `fill` fills in, or with the status that it fails with.
    pub(super) fn answer(
        &mut self,
        id: u16,
        length: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), Status>,
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

    /// The digest of the last `length` bytes, if there are digests.
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

    /// Tells the host how it broke the protocol, with the PDU's header, and gives it a moment to read that: to close a
    /// connection with bytes unread takes back what was sent.
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
