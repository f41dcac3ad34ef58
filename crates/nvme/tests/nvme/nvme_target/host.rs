//! A host for tests, which sends whatever a test asks for, valid or not.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;

use aquifer_nvme::proto::command::{FABRICS, Sgl, admin, io};
use aquifer_nvme::proto::fabrics::{
    ANY_CONTROLLER, Connect, ConnectData, PROPERTY_8_BYTES, configuration, connect,
    kind as fabrics, property,
};
use aquifer_nvme::proto::identify::LENGTH;
use aquifer_nvme::proto::log::Request;
use aquifer_nvme::proto::pdu::{
    CapsuleCmd, CapsuleResp, CommonHeader, Data, IcReq, IcResp, R2t, Shape, TermReq, digests, flag,
    kind,
};
use aquifer_nvme::proto::{Command, Completion, Nqn, NvmeStatus, digest};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::common::{Raw, connect as open};

/// The name of a valid host.
pub const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-1111-2222-3333-444444444444";

/// A PDU from the controller.
#[derive(Debug)]
pub enum Pdu {
    Completion(Completion),
    Data(Data, Vec<u8>),
    R2t(R2t),
    Term(TermReq),
}

/// A connection of a host to the target.
pub struct Host {
    pub stream: UnixStream,
    pub shape: Shape,
    pub max_data: u32,
    pub nqn: Nqn,
    pub flow_control: bool,
    next_id: u16,
}

impl Raw for Host {
    fn stream(&mut self) -> &mut UnixStream {
        &mut self.stream
    }
}

impl Host {
    /// Connects without sending anything.
    pub fn silent(socket: &Path) -> Self {
        let stream = open(socket);
        let nqn = HOST.parse().unwrap();
        Self { stream, shape: Shape::default(), max_data: 0, nqn, flow_control: false, next_id: 1 }
    }

    /// Connects and exchanges ICReq and ICResp, with these digests.
    pub fn connect(socket: &Path, wanted: u8) -> Self {
        let mut host = Self::silent(socket);
        host.put(ic_req(wanted, 0).as_bytes());
        let response: IcResp = host.take();
        assert_eq!((response.header.kind, response.digests), (kind::IC_RESP, wanted));
        host.max_data = response.max_data.get();
        host.shape = Shape::new(wanted, 0);
        host
    }

    /// Returns an unused command identifier.
    pub fn id(&mut self) -> u16 {
        self.next_id = self.next_id.wrapping_add(1);
        self.next_id
    }

    /// Returns a command as a PDU, with its data.
    pub fn capsule(&self, command: &Command, data: &[u8]) -> Vec<u8> {
        let header = self.shape.header(kind::CAPSULE_CMD, 0, size_of::<CapsuleCmd>(), data.len());
        self.finish(CapsuleCmd { header, command: *command }.as_bytes(), &header, data)
    }

    /// Returns requested data as a PDU.
    pub fn data(&self, request: &R2t, offset: u32, data: &[u8], last: bool) -> Vec<u8> {
        let flags = if last { flag::LAST } else { 0 };
        let header = self.shape.header(kind::H2C_DATA, flags, size_of::<Data>(), data.len());
        let pdu = Data {
            header,
            command_id: request.command_id,
            tag: request.tag,
            offset: offset.into(),
            length: (data.len() as u32).into(),
            reserved: [0; 4],
        };
        self.finish(pdu.as_bytes(), &header, data)
    }

    fn finish(&self, pdu: &[u8], header: &CommonHeader, data: &[u8]) -> Vec<u8> {
        let mut bytes = pdu.to_vec();
        if self.shape.header_digest {
            bytes.extend(digest::of(pdu).as_bytes());
        }
        if !data.is_empty() {
            bytes.resize(header.data_offset.into(), 0);
            bytes.extend(data);
            if self.shape.data_digest {
                bytes.extend(digest::of(data).as_bytes());
            }
        }
        assert_eq!(bytes.len(), header.length.get() as usize);
        bytes
    }

    pub fn send(&mut self, command: &Command, data: &[u8]) {
        let capsule = self.capsule(command, data);
        self.put(&capsule);
    }

    /// Receives the next PDU, and asserts that its digests are right.
    pub fn pdu(&mut self) -> Pdu {
        let header: CommonHeader = self.take();
        let mut bytes = header.as_bytes().to_vec();
        bytes.resize(header.length.get() as usize, 0);
        self.stream.read_exact(&mut bytes[size_of::<CommonHeader>()..]).unwrap();
        if header.kind == kind::C2H_TERM_REQ {
            return Pdu::Term(TermReq::read_from_prefix(&bytes).unwrap().0);
        }
        let length = usize::from(header.header_length);
        if self.shape.header_digest {
            assert_eq!(bytes[length..length + 4], *digest::of(&bytes[..length]).as_bytes());
        }
        match header.kind {
            kind::CAPSULE_RESP => {
                Pdu::Completion(CapsuleResp::read_from_prefix(&bytes).unwrap().0.completion)
            }
            kind::R2T => Pdu::R2t(R2t::read_from_prefix(&bytes).unwrap().0),
            kind::C2H_DATA => {
                let pdu = Data::read_from_prefix(&bytes).unwrap().0;
                let start = usize::from(header.data_offset);
                assert!(
                    start.is_multiple_of((usize::from(self.shape.alignment) + 1) * 4),
                    "data at {start}"
                );
                let data = bytes[start..][..pdu.length.get() as usize].to_vec();
                if self.shape.data_digest {
                    assert_eq!(bytes[start + data.len()..], *digest::of(&data).as_bytes());
                }
                Pdu::Data(pdu, data)
            }
            other => panic!("a PDU of type {other:#x}"),
        }
    }

    /// Receives the next PDU, which must be a completion.
    pub fn completion(&mut self) -> Completion {
        match self.pdu() {
            Pdu::Completion(completion) => completion,
            other => panic!("{other:?} instead of a completion"),
        }
    }

    pub fn r2t(&mut self) -> R2t {
        match self.pdu() {
            Pdu::R2t(request) => request,
            other => panic!("{other:?} instead of R2T"),
        }
    }

    /// Receives a termination, asserts that the connection then ends, and returns the fatal error
    /// status.
    pub fn terminated(&mut self) -> u16 {
        match self.pdu() {
            Pdu::Term(term) => {
                assert!(self.is_closed());
                term.status.get()
            }
            other => panic!("{other:?} instead of a termination"),
        }
    }

    /// Sends a command with data in its capsule and returns its completion.
    pub fn execute(&mut self, command: &Command, data: &[u8]) -> Completion {
        self.send(command, data);
        let completion = self.completion();
        assert_eq!(completion.command_id, command.id);
        completion
    }

    /// As [`execute`](Self::execute), but returns the status without its flags.
    pub fn status(&mut self, command: &Command, data: &[u8]) -> NvmeStatus {
        NvmeStatus(self.execute(command, data).status().code())
    }

    /// Sends a command and receives its `length` bytes of data.
    pub fn fetch(&mut self, command: &Command, length: usize) -> Result<Vec<u8>, NvmeStatus> {
        self.send(command, &[]);
        let mut all = Vec::new();
        loop {
            match self.pdu() {
                Pdu::Data(pdu, data) => {
                    assert_eq!(
                        (pdu.command_id, pdu.offset.get() as usize),
                        (command.id, all.len())
                    );
                    all.extend(data);
                    let flags = pdu.header.flags;
                    assert_eq!(flags & flag::LAST != 0, all.len() == length);
                    if flags & flag::SUCCESS != 0 {
                        assert!(!self.flow_control && all.len() == length);
                        return Ok(all);
                    }
                }
                Pdu::Completion(completion) if completion.status().is_success() => {
                    assert!(self.flow_control && all.len() == length);
                    return Ok(all);
                }
                Pdu::Completion(completion) => return Err(NvmeStatus(completion.status().code())),
                other => panic!("{other:?} instead of data"),
            }
        }
    }

    pub fn connect_command(&mut self, queue: u16, keep_alive: u32) -> Command {
        let attributes = if self.flow_control { 0 } else { connect::NO_FLOW_CONTROL };
        let wanted = Connect { format: 0, queue, size: 31, attributes, keep_alive };
        let length = size_of::<ConnectData>() as u32;
        let id = self.id();
        wanted.put(Command::new(FABRICS, id, fabrics::CONNECT.into(), Sgl::in_capsule(length)))
    }

    pub fn connect_data(&self, subsystem: &Nqn, controller: u16) -> ConnectData {
        let mut data = ConnectData::new_zeroed();
        data.host_id = [7; 16];
        data.controller_id = controller.into();
        data.subsystem = subsystem.to_field();
        data.host = self.nqn.to_field();
        data
    }

    pub fn try_connect(
        &mut self,
        subsystem: &Nqn,
        controller: u16,
        queue: u16,
        keep_alive: u32,
    ) -> Completion {
        let command = self.connect_command(queue, keep_alive);
        let data = self.connect_data(subsystem, controller);
        self.execute(&command, data.as_bytes())
    }

    pub fn connect_admin(&mut self, subsystem: &Nqn, keep_alive: u32) -> u16 {
        let completion = self.try_connect(subsystem, ANY_CONTROLLER, 0, keep_alive);
        assert!(completion.status().is_success(), "{:?}", completion.status());
        completion.result.get() as u16
    }

    pub fn connect_io(&mut self, subsystem: &Nqn, controller: u16, queue: u16) {
        let completion = self.try_connect(subsystem, controller, queue, 0);
        assert!(completion.status().is_success(), "{:?}", completion.status());
        assert_eq!(completion.result.get(), u64::from(controller));
    }

    pub fn property(&mut self, offset: u32) -> u64 {
        let size = if offset == property::CAPABILITIES { PROPERTY_8_BYTES } else { 0 };
        let id = self.id();
        let command = Command::new(FABRICS, id, fabrics::PROPERTY_GET.into(), Sgl::NONE);
        let completion = self.execute(&command.with(10, size).with(11, offset), &[]);
        assert!(completion.status().is_success());
        completion.result.get()
    }

    pub fn set_property(&mut self, offset: u32, value: u32) -> NvmeStatus {
        let id = self.id();
        let command = Command::new(FABRICS, id, fabrics::PROPERTY_SET.into(), Sgl::NONE);
        self.status(&command.with(11, offset).with(12, value), &[])
    }

    pub fn enable(&mut self) {
        assert_eq!(
            self.set_property(property::CONFIGURATION, configuration::START),
            NvmeStatus::SUCCESS
        );
    }

    pub fn identify(&mut self, what: u8, nsid: u32) -> Result<Vec<u8>, NvmeStatus> {
        let id = self.id();
        let command = Command::new(admin::IDENTIFY, id, nsid, Sgl::transport(LENGTH as u32));
        self.fetch(&command.with(10, what.into()), LENGTH)
    }

    pub fn log(&mut self, page: u8, offset: u64, length: usize) -> Result<Vec<u8>, NvmeStatus> {
        let id = self.id();
        let command =
            Command::new(admin::GET_LOG_PAGE, id, u32::MAX, Sgl::transport(length as u32));
        let request = Request { page, length: length as u64, offset, retain: false };
        self.fetch(&request.put(command), length)
    }

    pub fn command(&mut self, opcode: u8, sgl: Sgl) -> Command {
        let id = self.id();
        Command::new(opcode, id, 1, sgl)
    }

    /// Writes whole blocks, with the data in the capsule.
    pub fn write(&mut self, block: u64, data: &[u8]) {
        let sgl = Sgl::in_capsule(data.len() as u32);
        let command = self.command(io::WRITE, sgl).with_blocks(block, (data.len() / 4096) as u32);
        assert_eq!(self.status(&command, data), NvmeStatus::SUCCESS);
    }

    pub fn read(&mut self, block: u64, blocks: u32) -> Vec<u8> {
        let length = blocks as usize * 4096;
        let command =
            self.command(io::READ, Sgl::transport(length as u32)).with_blocks(block, blocks);
        self.fetch(&command, length).unwrap()
    }
}

/// Makes the first PDU of a connection.
pub fn ic_req(wanted: u8, alignment: u8) -> IcReq {
    assert_eq!(wanted & !(digests::HEADER | digests::DATA), 0);
    IcReq { alignment, ..IcReq::new(wanted) }
}
