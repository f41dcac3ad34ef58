//! Steps of a broken host on an admin queue.

use aquifer_fuzz::Number;
use aquifer_nvme::proto::command::{FABRICS, Sgl, admin};
use aquifer_nvme::proto::fabrics::{configuration, kind, property};
use aquifer_nvme::proto::feature::id;
use aquifer_nvme::proto::identify::controller;
use aquifer_nvme::proto::log::{Request, page};
use aquifer_nvme::proto::{Command, pdu};
use arbitrary::Arbitrary;

use crate::script::{Place, Script, ic_req};

#[derive(Arbitrary, Debug)]
pub enum Step<'a> {
    PropertyGet { attributes: u8, property: Property },
    PropertySet { attributes: u8, property: Property, value: Value },
    Identify { what: u8, nsid: Nsid, set: u8, place: Place },
    Log { page: Page, offset: Number, length: Number, retain: bool, place: Place },
    GetFeature { feature: Feature, dword11: u8, place: Place },
    SetFeature { feature: Feature, value: FeatureValue },
    AsyncEvent,
    KeepAlive,
    Abort { queue: u8, command: u8 },
    Fabrics { kind: u8, dwords: [u32; 6], data: &'a [u8] },
    Any { opcode: u8, flags: u8, nsid: Nsid, dwords: [u32; 6], place: Place, data: &'a [u8] },
    Data { command: u8, tag: u8, data: &'a [u8], last: bool },
    Begin { digests: u8, alignment: u8 },
    Terminate(&'a [u8]),
    Bytes(&'a [u8]),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Property {
    Capabilities,
    Version,
    Configuration,
    Status,
    SubsystemReset,
    ReadyTimeouts,
    Any(u16),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Value {
    Start,
    Reset,
    Shutdown,
    StartBits(u32),
    Any(u32),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Nsid {
    Ours,
    None,
    All,
    Any(u32),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Page {
    Discovery,
    ChangedNamespaces,
    Any(u8),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Feature {
    AsyncEvents,
    KeepAlive,
    Queues,
    HostId,
    Any(u8),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum FeatureValue {
    AllNotices,
    Any(u32),
}

impl Page {
    fn number(self) -> u8 {
        match self {
            Self::Discovery => page::DISCOVERY,
            Self::ChangedNamespaces => page::CHANGED_NAMESPACES,
            Self::Any(page) => page,
        }
    }
}

impl Feature {
    fn number(self) -> u32 {
        let number = match self {
            Self::AsyncEvents => id::ASYNC_EVENTS,
            Self::KeepAlive => id::KEEP_ALIVE,
            Self::Queues => id::QUEUES,
            Self::HostId => id::HOST_ID,
            Self::Any(number) => number,
        };
        number.into()
    }
}

impl FeatureValue {
    fn value(self) -> u32 {
        match self {
            Self::AllNotices => {
                controller::NAMESPACE_ATTRIBUTE_NOTICES | controller::DISCOVERY_LOG_NOTICES
            }
            Self::Any(value) => value,
        }
    }
}

impl Property {
    fn offset(self) -> u32 {
        match self {
            Self::Capabilities => property::CAPABILITIES,
            Self::Version => property::VERSION,
            Self::Configuration => property::CONFIGURATION,
            Self::Status => property::STATUS,
            Self::SubsystemReset => property::SUBSYSTEM_RESET,
            Self::ReadyTimeouts => property::READY_TIMEOUTS,
            Self::Any(offset) => offset.into(),
        }
    }
}

impl Value {
    fn value(self) -> u32 {
        match self {
            Self::Start => configuration::START,
            Self::Reset => 0,
            Self::Shutdown => configuration::START | configuration::SHUTDOWN_NORMAL,
            Self::StartBits(bits) => configuration::START ^ bits,
            Self::Any(value) => value,
        }
    }
}

impl Nsid {
    pub fn number(self) -> u32 {
        match self {
            Self::Ours => 1,
            Self::None => 0,
            Self::All => u32::MAX,
            Self::Any(number) => number,
        }
    }
}

impl Step<'_> {
    pub fn put(&self, script: &mut Script) {
        let command_id = script.id();
        let fabrics = |kind: u8| Command::new(FABRICS, command_id, kind.into(), Sgl::NONE);
        let plain = |opcode| Command::new(opcode, command_id, 0, Sgl::NONE);
        let mut place = Place::Apart;
        let mut data: &[u8] = &[];
        let command = match *self {
            Self::PropertyGet { attributes, property } => {
                fabrics(kind::PROPERTY_GET).with(10, attributes.into()).with(11, property.offset())
            }
            Self::PropertySet { attributes, property, value } => fabrics(kind::PROPERTY_SET)
                .with(10, (attributes & 1).into())
                .with(11, property.offset())
                .with(12, value.value()),
            Self::Identify { what, nsid, set, place } => {
                Command::new(admin::IDENTIFY, command_id, nsid.number(), place.sgl(4096))
                    .with(10, what.into())
                    .with(11, u32::from(set) << 24)
            }
            Self::Log { page, offset, length, retain, place } => {
                let (length, offset) = (length.bytes() & !3, offset.bytes());
                let page = page.number();
                let request = Request { page, length: length.max(4), offset, retain };
                request.put(Command::new(
                    admin::GET_LOG_PAGE,
                    command_id,
                    u32::MAX,
                    place.sgl(length as usize),
                ))
            }
            Self::GetFeature { feature, dword11, place } => {
                Command::new(admin::GET_FEATURES, command_id, 0, place.sgl(16))
                    .with(10, feature.number())
                    .with(11, dword11.into())
            }
            Self::SetFeature { feature, value } => {
                plain(admin::SET_FEATURES).with(10, feature.number()).with(11, value.value())
            }
            Self::AsyncEvent => plain(admin::ASYNC_EVENT_REQUEST),
            Self::KeepAlive => plain(admin::KEEP_ALIVE),
            Self::Abort { queue, command } => {
                plain(admin::ABORT).with(10, u32::from(queue) | (100 + u32::from(command)) << 16)
            }
            Self::Fabrics { kind, dwords, data: sent } => {
                (place, data) = (Place::Capsule, sent);
                let mut command = fabrics(kind % 16);
                command.sgl = place.sgl(data.len());
                with_all(command, dwords)
            }
            Self::Any { opcode, flags, nsid, dwords, place: there, data: sent } => {
                (place, data) = (there, sent);
                let mut command =
                    Command::new(opcode, command_id, nsid.number(), place.sgl(data.len()));
                command.flags ^= flags;
                with_all(command, dwords)
            }
            Self::Data { command, tag, data, last } => {
                return script.data(100 + u16::from(command), tag.into(), 0, data, last);
            }
            Self::Begin { digests, alignment } => {
                return script.messages.push(ic_req(digests, alignment));
            }
            Self::Terminate(offence) => {
                return script.terminate(&offence[..offence.len().min(pdu::TERM_DATA)]);
            }
            Self::Bytes(bytes) => return script.messages.push(bytes.to_vec()),
        };
        script.command(&command, place, data);
    }
}

pub fn with_all(command: Command, dwords: [u32; 6]) -> Command {
    (10..).zip(dwords).fold(command, |command, (number, dword)| command.with(number, dword))
}
