//! A lender over NBD whose server answers as the input says.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aquifer_fuzz::{Delivery, Twist, Twisted};
use aquifer_nbd::client::{Connection, Operation, Target};
use aquifer_nbd::proto::{
    Greeting, InfoExport, MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, OptionReply, Request,
    SIMPLE_REPLY_MAGIC, SimpleReply, command, export_flag, info, option, reply,
};
use aquifer_page::{EXTENT_SIZE, WorkerId};
use aquifer_transport::Address;
use aquifer_transport::channel::Channel;
use aquifer_transport::initiator::{InitiatorError, Outcome};
use aquifer_volume::holder::{Holder, HolderError};
use arbitrary::Arbitrary;
use zerocopy::{FromBytes, IntoBytes};

use crate::honest::Memory;

const TIMEOUT: Duration = Duration::from_secs(10);

/// The server's answer to one request.
#[derive(Arbitrary, Clone, Debug)]
pub enum Answer {
    /// As it should be.
    Right,
    /// It says that it is done, and is not. A read returns zeroes.
    Forgotten,
    /// Of a read, one byte is another.
    Flipped {
        at: u16,
        bits: u8,
    },
    /// A read returns the pages from another place.
    Elsewhere {
        page: u8,
    },
    Error(u8),
    Twisted(Vec<(u8, Twist)>),
    Raw(Vec<u8>),
}

/// A holder over a connection; once that has ended, the lender is away.
pub struct Broken {
    connection: Mutex<Option<Connection>>,
}

impl Broken {
    pub fn new(answers: &[Answer]) -> Self {
        let server = Server {
            said: greeting().into(),
            heard: Vec::new(),
            answers: answers.iter().cloned().collect(),
            memory: Memory::default(),
            is_greeted: false,
        };
        let server = Shared(Arc::new(Mutex::new(server)));
        let address = Address::Unix(PathBuf::from("fuzz"));
        let target = Arc::new(Target { address, export: String::new(), tls: None });
        let connection = Connection::over(Box::new(server.clone()), target, TIMEOUT);
        let server = &mut *server.0.lock().unwrap();
        server.heard.clear();
        server.is_greeted = true;
        Self { connection: Mutex::new(Some(connection.expect("the greeting is right"))) }
    }

    fn run(&self, operation: Operation<'_>) -> Result<(), HolderError> {
        let away = || {
            let source = Box::new(InitiatorError::new("lender", Outcome::Ended, "it is broken"));
            HolderError::Unreachable { waited: Duration::MAX, source }
        };
        let slot = &mut *self.connection.lock().unwrap();
        let connection = slot.as_mut().ok_or_else(away)?;
        connection.run(&mut [operation]).map_err(|_| {
            *slot = None;
            away()
        })
    }
}

impl Holder for Broken {
    fn read(&self, _: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        self.run(Operation::Read { offset, into })
    }

    fn write(&self, _: WorkerId, offset: u64, from: &[u8]) -> Result<(), HolderError> {
        self.run(Operation::Write { offset, from })
    }

    fn discard(&self, _: WorkerId, offset: u64, length: u64) -> Result<(), HolderError> {
        self.run(Operation::WriteZeroes { offset, length: length as u32 })
    }

    fn flush(&self, _: WorkerId) -> Result<(), HolderError> {
        self.run(Operation::Flush)
    }

    fn unreachable_for(&self) -> Option<Duration> {
        self.connection.lock().unwrap().is_none().then_some(Duration::MAX)
    }
}

struct Server {
    said: VecDeque<u8>,
    heard: Vec<u8>,
    answers: VecDeque<Answer>,
    memory: Memory,
    is_greeted: bool,
}

#[derive(Clone)]
struct Shared(Arc<Mutex<Server>>);

fn greeting() -> Vec<u8> {
    let greeting =
        Greeting { magic: MAGIC.into(), option_magic: OPTION_MAGIC.into(), flags: 3.into() };
    let answer = |option: u32, reply: u32, payload: &[u8]| {
        let length = (payload.len() as u32).into();
        let (magic, option, reply) = (OPTION_REPLY_MAGIC.into(), option.into(), reply.into());
        [OptionReply { magic, option, reply, length }.as_bytes(), payload].concat()
    };
    let flags = export_flag::HAS_FLAGS
        | export_flag::SEND_FLUSH
        | export_flag::SEND_TRIM
        | export_flag::SEND_WRITE_ZEROES;
    let (size, flags) = (EXTENT_SIZE.into(), flags.into());
    let export = InfoExport { kind: info::EXPORT.into(), size, flags };
    [
        greeting.as_bytes(),
        &answer(option::STRUCTURED_REPLY, reply::ERR_UNSUP, &[]),
        &answer(option::GO, reply::INFO, export.as_bytes()),
        &answer(option::GO, reply::ACK, &[]),
    ]
    .concat()
}

impl Server {
    fn answer_all(&mut self) {
        while let Ok((request, rest)) = Request::read_from_prefix(&self.heard) {
            let is_write = request.command.get() == command::WRITE;
            let payload = if is_write { request.length.get() as usize } else { 0 };
            let Some(payload) = rest.get(..payload).map(<[u8]>::to_vec) else { return };
            self.heard.drain(..size_of::<Request>() + payload.len());
            let answer = self.answers.pop_front().unwrap_or(Answer::Right);
            self.answer(&request, &payload, &answer);
        }
    }

    fn answer(&mut self, request: &Request, payload: &[u8], answer: &Answer) {
        let (offset, length) = (request.offset.get(), request.length.get());
        if !matches!(answer, Answer::Forgotten | Answer::Error(_)) {
            match request.command.get() {
                command::WRITE => self.memory.write(offset, payload),
                command::TRIM | command::WRITE_ZEROES => {
                    self.memory.discard(offset, length.into());
                }
                _ => {}
            }
        }
        let mut data = Vec::new();
        if request.command.get() == command::READ {
            data.resize(length as usize, 0);
            let from = match answer {
                Answer::Elsewhere { page } => u64::from(*page) << 12,
                _ => offset,
            };
            if !matches!(answer, Answer::Forgotten) {
                self.memory.read(from, &mut data);
            }
            if let (Answer::Flipped { at, bits }, false) = (answer, data.is_empty()) {
                let at = usize::from(*at) % data.len();
                data[at] ^= bits;
            }
        }
        let error = if let Answer::Error(error) = answer { u32::from(*error) } else { 0 };
        if error != 0 {
            data.clear();
        }
        let (magic, error, cookie) = (SIMPLE_REPLY_MAGIC.into(), error.into(), request.cookie);
        let mut messages = Twisted::default();
        messages.push([SimpleReply { magic, error, cookie }.as_bytes(), &data].concat());
        match answer {
            Answer::Raw(bytes) => return self.said.extend(bytes),
            Answer::Twisted(twists) => messages.twist(twists),
            _ => {}
        }
        self.said.extend(messages.bytes());
    }
}

impl Channel for Shared {
    fn recv(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let server = &mut *self.0.lock().unwrap();
        if server.said.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let most = buf.len().min(Delivery::default().piece());
        server.said.read(&mut buf[..most])
    }

    fn send_all(&mut self, bufs: &mut [IoSlice<'_>]) -> io::Result<()> {
        let server = &mut *self.0.lock().unwrap();
        bufs.iter().for_each(|buf| server.heard.extend_from_slice(buf));
        if server.is_greeted {
            server.answer_all();
        }
        Ok(())
    }

    fn set_deadline(&self, _deadline: Option<Instant>) {}

    fn pause(&self, _: Duration) -> io::Result<()> {
        Ok(())
    }

    fn shutdown(&self) -> io::Result<()> {
        Ok(())
    }
}
