//! A connection as a stream of PDUs.

use std::io::IoSlice;

use aquifer_transport::channel::{Channel, Socket};
use aquifer_transport::initiating::{Deadline, Failure as _, Input};
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{IntoBytes, transmute};

use super::head::Head;
use super::{Failure, Target};
use crate::proto::pdu::{
    CapsuleCmd, CapsuleResp, CommonHeader, Data, IC_LENGTH, IcReq, IcResp, MAX_ALIGNMENT,
    MIN_MAX_DATA, R2t, Shape, TermReq, flag, kind,
};
use crate::proto::{Command, Completion, digest};

/// Bytes of the header of every PDU that a controller sends after the handshake.
const HEADER: usize = size_of::<Data>();

/// A PDU from the controller.
pub(super) enum Pdu {
    /// The completion of a command.
    Completion(Completion),
    /// Data of a command, to be read by [`Link::data`] next.
    Data(Data),
    /// A request for a part of a command's data.
    R2t(R2t),
}

/// A connection that sends and receives PDUs, and that allocates only when it is made.
pub(super) struct Link {
    pub(super) socket: Socket,
    input: Input,
    /// The form of PDUs, in both directions; its data alignment is that of sent PDUs.
    shape: Shape,
    /// The most data bytes in an H2CData PDU.
    max_data: usize,
}

impl Link {
    /// Connects and agrees with the target on the form of PDUs.
    pub(super) fn connect(target: &Target, deadline: Deadline) -> Result<Self, Failure> {
        let socket = Socket::connect(&target.address, deadline.left()).map_err(Failure::Connect)?;
        // Until an orderly end, closing resets: no sent data may arrive after this host gives up or
        // its process dies.
        socket.set_abortive(true).map_err(Failure::Connect)?;
        let (shape, max_data) = (Shape::default(), 0);
        let mut link = Self { socket, input: Input::default(), shape, max_data };
        let wanted = target.digests();
        link.send(&mut [IoSlice::new(IcReq::new(wanted).as_bytes())], deadline)?;
        let header = link.input.peek::<CommonHeader>(&mut link.socket, deadline)?;
        match (header.kind, usize::from(header.header_length), header.length.get() as usize) {
            (kind::IC_RESP, IC_LENGTH, IC_LENGTH) => {}
            (kind::C2H_TERM_REQ, ..) => return Err(link.accusation(deadline)),
            _ => return Err(Failure::protocol("it does not answer as an NVMe/TCP target")),
        }
        let response = link.input.take::<IcResp>(&mut link.socket, deadline)?;
        if response.format.get() != 0 || response.alignment > MAX_ALIGNMENT {
            return Err(Failure::protocol("its ICResp has an unknown format or alignment"));
        }
        if response.max_data.get() < MIN_MAX_DATA {
            return Err(Failure::protocol("it accepts less than a page of data in a PDU"));
        }
        if response.digests != wanted {
            return Err(Failure::Refused(format!(
                "it chose digests {:#04b} instead of {wanted:#04b} (1: headers, 2: data)",
                response.digests
            )));
        }
        link.shape = Shape::new(wanted, response.alignment);
        link.max_data = response.max_data.get() as usize;
        Ok(link)
    }

    /// Lets the connection close with a FIN, in order.
    pub(super) fn part(&self) {
        // If the call fails, the target sees a reset instead of a FIN.
        let _ = self.socket.set_abortive(false);
    }

    /// Waits until some bytes are here. Returns false at the deadline.
    pub(super) fn wait_for_input(&mut self, deadline: Deadline) -> Result<bool, Failure> {
        Ok(self.input.wait(&mut self.socket, deadline)?)
    }

    /// Returns whether received bytes are still unread.
    pub(super) fn has_input(&self) -> bool {
        !self.input.is_empty()
    }

    pub(super) fn data_digest(&self) -> bool {
        self.shape.data_digest
    }

    pub(super) fn send(
        &mut self,
        slices: &mut [IoSlice<'_>],
        deadline: Deadline,
    ) -> Result<(), Failure> {
        Ok(deadline.send(&mut self.socket, slices)?)
    }

    /// Starts a command capsule with `length` bytes of data.
    pub(super) fn start_command(&self, head: &mut Head, command: &Command, length: usize) {
        let header = self.shape.header(kind::CAPSULE_CMD, 0, size_of::<CapsuleCmd>(), length);
        head.start(
            &CapsuleCmd { header, command: *command },
            self.shape.header_digest,
            header.data_offset,
        );
    }

    /// Sends the requested data.
    pub(super) fn send_data(
        &mut self,
        asked: &R2t,
        data: &[u8],
        deadline: Deadline,
    ) -> Result<(), Failure> {
        let (end, mut offset) = (asked.offset.get() + data.len() as u32, asked.offset.get());
        let mut head = Head::EMPTY;
        for piece in data.chunks(self.max_data) {
            let length = piece.len() as u32;
            let flags = if offset + length == end { flag::LAST } else { 0 };
            let header = self.shape.header(kind::H2C_DATA, flags, HEADER, piece.len());
            let pdu = Data {
                header,
                command_id: asked.command_id,
                tag: asked.tag,
                offset: offset.into(),
                length: length.into(),
                reserved: [0; 4],
            };
            head.start(&pdu, self.shape.header_digest, header.data_offset);
            let digest = if self.shape.data_digest { digest::of(piece) } else { U32::ZERO };
            let digest = if self.shape.data_digest { digest.as_bytes() } else { &[] };
            let mut slices =
                [IoSlice::new(head.bytes()), IoSlice::new(piece), IoSlice::new(digest)];
            self.send(&mut slices, deadline)?;
            offset += length;
        }
        Ok(())
    }

    /// Waits for the next PDU. Reports an error in the PDU as soon as its common header is there.
    pub(super) fn next(&mut self, deadline: Deadline) -> Result<Pdu, Failure> {
        let header = self.input.peek::<CommonHeader>(&mut self.socket, deadline)?;
        let most_data = match header.kind {
            kind::CAPSULE_RESP | kind::R2T => 0,
            kind::C2H_DATA => u32::MAX as usize,
            kind::C2H_TERM_REQ => return Err(self.accusation(deadline)),
            kind::IC_RESP => return Err(Failure::protocol("a second ICResp")),
            kind::IC_REQ | kind::H2C_TERM_REQ | kind::CAPSULE_CMD | kind::H2C_DATA => {
                return Err(Failure::protocol("a PDU that only hosts send"));
            }
            _ => return Err(Failure::protocol("a PDU of an unknown type")),
        };
        let payload = self.shape.payload(&header, HEADER, most_data)?;
        let bytes = self.input.take::<[u8; HEADER]>(&mut self.socket, deadline)?;
        let mut taken = HEADER;
        if self.shape.header_digest {
            let there = self.input.take::<U32>(&mut self.socket, deadline)?;
            if there != digest::of(&bytes) {
                return Err(Failure::Damaged("a header"));
            }
            taken += size_of::<U32>();
        }
        Ok(match header.kind {
            kind::CAPSULE_RESP => {
                let response: CapsuleResp = transmute!(bytes);
                Pdu::Completion(response.completion)
            }
            kind::R2T => Pdu::R2t(transmute!(bytes)),
            _ => {
                let data: Data = transmute!(bytes);
                if data.length.get() as usize != payload.length || payload.length == 0 {
                    return Err(Failure::protocol(
                        "a data PDU whose length differs from its data's",
                    ));
                }
                self.input.skip(&mut self.socket, deadline, payload.start - taken)?;
                Pdu::Data(data)
            }
        })
    }

    /// Reads the data of the last data PDU; `into` must have its length.
    pub(super) fn data(&mut self, into: &mut [u8], deadline: Deadline) -> Result<(), Failure> {
        self.input.read(&mut self.socket, deadline, into)?;
        if self.shape.data_digest {
            let there = self.input.take::<U32>(&mut self.socket, deadline)?;
            if there != digest::of(into) {
                return Err(Failure::Damaged("data that was read"));
            }
        }
        Ok(())
    }

    /// Reads a C2HTermReq.
    fn accusation(&mut self, deadline: Deadline) -> Failure {
        match self.input.take::<TermReq>(&mut self.socket, deadline) {
            Ok(term) => {
                Failure::Accused { status: term.status.get(), information: term.information.get() }
            }
            Err(interrupted) => interrupted.into(),
        }
    }
}

/// Checks that a data PDU continues a read of `length` bytes, `received` of which have come.
/// Returns whether the PDU also completes the command.
pub(super) fn completes(data: &Data, received: u32, length: u32) -> Result<bool, Failure> {
    if data.offset.get() != received || data.length.get() > length - received {
        return Err(Failure::protocol("data outside of the request, or out of order"));
    }
    let (last, success) =
        (data.header.flags & flag::LAST != 0, data.header.flags & flag::SUCCESS != 0);
    if last != (received + data.length.get() == length) {
        return Err(Failure::protocol("a wrong LAST flag on data"));
    }
    if success && !last {
        return Err(Failure::protocol("a success before the last data"));
    }
    Ok(success)
}

const _: () = assert!(size_of::<CapsuleResp>() == HEADER && size_of::<R2t>() == HEADER);
const _: () = assert!(size_of::<TermReq>() == HEADER);
