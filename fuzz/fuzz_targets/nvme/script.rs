//! Sequences of PDUs of a host.

use aquifer_fuzz::{Number, Twisted};
use aquifer_nvme::proto::command::Sgl;
use aquifer_nvme::proto::pdu::{
    CapsuleCmd, CommonHeader, Data, IC_LENGTH, IcReq, Shape, TermReq, digests, flag, kind,
};
use aquifer_nvme::proto::{Command, digest};
use arbitrary::Arbitrary;
use zerocopy::IntoBytes;

/// Number of entries of each queue.
pub const QUEUE_ENTRIES: u16 = 32;

/// The PDUs of a host, in order.
pub struct Script {
    pub shape: Shape,
    pub messages: Twisted,
    next_id: u16,
    asked: Vec<Asked>,
    free: Vec<u16>,
}

/// Data that the target will request, predicted before it does.
struct Asked {
    id: u16,
    tag: u16,
    length: usize,
}

/// The place of a command's data, as its SGL states it.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Place {
    Capsule,
    Apart,
    Lie { kind: u8, address: Number, length: Number },
}

impl Place {
    pub fn sgl(self, length: usize) -> Sgl {
        match self {
            Self::Capsule => Sgl::in_capsule(length as u32),
            Self::Apart => Sgl::transport(length as u32),
            Self::Lie { kind, address, length } => Sgl {
                address: address.bytes().into(),
                length: (length.bytes() as u32).into(),
                reserved: [0; 3],
                kind,
            },
        }
    }
}

impl Script {
    pub fn new(shape: Shape) -> Self {
        let free = (0..QUEUE_ENTRIES).rev().collect();
        Self { shape, messages: Twisted::default(), next_id: 100, asked: Vec::new(), free }
    }

    pub fn id(&mut self) -> u16 {
        self.next_id += 1;
        self.next_id
    }

    /// Puts a command, with its data if the SGL does not place them apart.
    pub fn command(&mut self, command: &Command, place: Place, data: &[u8]) {
        let inside = matches!(place, Place::Capsule | Place::Lie { .. });
        let bytes = capsule(self.shape, command, if inside { data } else { &[] });
        self.messages.push(bytes);
    }

    /// Puts a command with data; if the target must request them, [`answer`](Self::answer) can send
    /// them.
    pub fn command_with_data(&mut self, command: &Command, place: Place, data: &[u8]) {
        self.command(command, place, data);
        if let (Place::Apart, Some(tag)) = (place, self.free.pop()) {
            self.asked.push(Asked { id: command.id.get(), tag, length: data.len() });
        }
    }

    /// Sends requested data in pieces of `piece` bytes.
    pub fn answer(&mut self, which: u8, piece: usize, fill: u8) {
        if self.asked.is_empty() {
            return;
        }
        let Asked { id, tag, length } = self.asked.remove(usize::from(which) % self.asked.len());
        self.free.push(tag);
        let piece = piece.clamp(512, 128 << 10);
        for offset in (0..length).step_by(piece) {
            let now = piece.min(length - offset);
            self.data(id, tag, offset as u32, &vec![fill; now], offset + now == length);
        }
    }

    /// Sends data, whether requested or not.
    pub fn data(&mut self, id: u16, tag: u16, offset: u32, data: &[u8], last: bool) {
        let flags = if last { flag::LAST } else { 0 };
        let header = self.shape.header(kind::H2C_DATA, flags, size_of::<Data>(), data.len());
        let (command_id, tag) = (id.into(), tag.into());
        let length = (data.len() as u32).into();
        let pdu = Data { header, command_id, tag, offset: offset.into(), length, reserved: [0; 4] };
        self.messages.push(finish(self.shape, pdu.as_bytes(), &header, data));
    }

    /// Sends a termination with the start of the offending PDU.
    pub fn terminate(&mut self, offence: &[u8]) {
        let mut header = CommonHeader::bare(kind::H2C_TERM_REQ, size_of::<TermReq>());
        header.length = ((size_of::<TermReq>() + offence.len()) as u32).into();
        let pdu = TermReq { header, status: 1.into(), information: 0.into(), reserved: [0; 10] };
        self.messages.push([pdu.as_bytes(), offence].concat());
    }
}

/// Returns the first PDU of a connection (ICReq).
pub fn ic_req(wanted: u8, alignment: u8) -> Vec<u8> {
    let request = IcReq {
        header: CommonHeader::bare(kind::IC_REQ, IC_LENGTH),
        format: 0.into(),
        alignment,
        digests: wanted & (digests::HEADER | digests::DATA),
        max_r2t: 0.into(),
        reserved: [0; 112],
    };
    request.as_bytes().to_vec()
}

/// Returns a command as a PDU.
pub fn capsule(shape: Shape, command: &Command, data: &[u8]) -> Vec<u8> {
    let header = shape.header(kind::CAPSULE_CMD, 0, size_of::<CapsuleCmd>(), data.len());
    finish(shape, CapsuleCmd { header, command: *command }.as_bytes(), &header, data)
}

pub fn finish(shape: Shape, pdu: &[u8], header: &CommonHeader, data: &[u8]) -> Vec<u8> {
    let mut bytes = pdu.to_vec();
    if shape.header_digest {
        bytes.extend(digest::of(pdu).as_bytes());
    }
    if !data.is_empty() {
        bytes.resize(header.data_offset.into(), 0);
        bytes.extend(data);
        if shape.data_digest {
            bytes.extend(digest::of(data).as_bytes());
        }
    }
    bytes
}
