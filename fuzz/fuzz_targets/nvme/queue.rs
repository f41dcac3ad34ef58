//! Connections that become queues by the rules, so that attacks can start from there.

use aquifer_fuzz::{Peer, Worker};
use aquifer_nvme::proto::command::{FABRICS, Sgl};
use aquifer_nvme::proto::fabrics::{
    ANY_CONTROLLER, Connect, ConnectData, configuration, connect, kind as fabrics, property,
};
use aquifer_nvme::proto::pdu::{CapsuleResp, CommonHeader, Data, IcResp, Shape, kind};
use aquifer_nvme::proto::{Command, Completion, Nqn};
use arbitrary::Arbitrary;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::host::HOST;
use crate::script::{QUEUE_ENTRIES, capsule, ic_req};

/// The negotiable properties of a connection.
#[derive(Arbitrary, Clone, Copy, Debug, Default)]
pub struct Form {
    digests: u8,
    alignment: u8,
    flow_control: bool,
}

impl Form {
    pub fn shape(self) -> Shape {
        // Data to the target needs no alignment.
        Shape::new(self.digests, 0)
    }

    pub fn ic_req(self) -> Vec<u8> {
        ic_req(self.digests, self.alignment % 32)
    }
}

/// A queue that runs its commands one after another.
pub struct Queue<'a> {
    pub peer: Peer<'a>,
    form: Form,
    pub controller: u16,
    next_id: u16,
}

/// The error if no queue results: the target closed the connection or refused it.
pub struct NoQueue;

/// The response to a command.
pub struct Answer {
    pub data: Vec<u8>,
    pub completion: Option<Completion>,
}

impl<'a> Queue<'a> {
    /// Connects queue `number`; the admin queue, 0, creates a controller.
    pub fn connect(
        worker: &'a Worker,
        form: Form,
        subsystem: &Nqn,
        number: u16,
        controller: u16,
    ) -> Result<Self, NoQueue> {
        let mut peer = worker.connect();
        peer.send(&form.ic_req());
        let response = peer.take(size_of::<IcResp>()).ok_or(NoQueue)?;
        assert_eq!(response[0], kind::IC_RESP);
        let mut queue = Self { peer, form, controller, next_id: 0 };
        let (command, data) = connect(number, controller, subsystem, form.flow_control);
        let answer = queue.execute(command, data.as_bytes()).ok_or(NoQueue)?;
        let completion = answer.completion.ok_or(NoQueue)?;
        if !completion.status().is_success() {
            return Err(NoQueue);
        }
        queue.controller = completion.result.get() as u16;
        Ok(queue)
    }

    /// Enables the controller.
    pub fn enable(&mut self) {
        let command = Command::new(FABRICS, 0, fabrics::PROPERTY_SET.into(), Sgl::NONE);
        let command = command.with(11, property::CONFIGURATION).with(12, configuration::START);
        self.execute(command, &[]);
    }

    /// Runs a command, which the target must answer; `None` if it closes the connection or requests
    /// data.
    pub fn execute(&mut self, mut command: Command, data: &[u8]) -> Option<Answer> {
        self.next_id += 1;
        command.id = self.next_id.into();
        self.peer.send(&capsule(self.form.shape(), &command, data));
        let mut answer = Answer { data: Vec::new(), completion: None };
        loop {
            let pdu = self.pdu()?;
            match pdu[0] {
                kind::CAPSULE_RESP => {
                    let (response, _) =
                        CapsuleResp::read_from_prefix(&pdu).expect("the PDU holds a completion");
                    assert_eq!(response.completion.command_id, command.id);
                    return Some(Answer { completion: Some(response.completion), ..answer });
                }
                kind::C2H_DATA => {
                    let (head, _) =
                        Data::read_from_prefix(&pdu).expect("the PDU holds a data header");
                    assert_eq!(head.command_id, command.id);
                    let start = usize::from(head.header.data_offset);
                    answer.data.extend(&pdu[start..][..head.length.get() as usize]);
                    if !self.form.flow_control {
                        return Some(answer);
                    }
                }
                kind::R2T | kind::C2H_TERM_REQ => return None,
                other => panic!("the target sent a PDU of type {other:#x}"),
            }
        }
    }

    fn pdu(&mut self) -> Option<Vec<u8>> {
        let mut bytes = self.peer.take(size_of::<CommonHeader>())?;
        let header = CommonHeader::read_from_bytes(&bytes).expect("a header has 8 bytes");
        let rest = header.length.get() as usize - bytes.len();
        bytes.extend(self.peer.take(rest)?);
        Some(bytes)
    }
}

/// Returns a Connect command with its data.
pub fn connect(
    number: u16,
    controller: u16,
    subsystem: &Nqn,
    flow_control: bool,
) -> (Command, ConnectData) {
    let attributes = if flow_control { 0 } else { connect::NO_FLOW_CONTROL };
    let size = QUEUE_ENTRIES - 1;
    let wanted = Connect { format: 0, queue: number, size, attributes, keep_alive: 0 };
    let sgl = Sgl::in_capsule(size_of::<ConnectData>() as u32);
    let command = wanted.put(Command::new(FABRICS, 1, fabrics::CONNECT.into(), sgl));
    let mut data = ConnectData::new_zeroed();
    data.host_id = [7; 16];
    data.controller_id = if number == 0 { ANY_CONTROLLER } else { controller }.into();
    data.subsystem = subsystem.to_field();
    data.host = HOST.parse::<Nqn>().expect("HOST is a valid NQN").to_field();
    (command, data)
}
