//! A server under test, and a client that speaks the protocol byte by byte.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use aquifer_nbd::Uri;
use aquifer_nbd::proto::{self, chunk, command, option, reply};
use aquifer_nbd::server::{Limits, Security, Server};
use aquifer_page::Bytes;
use aquifer_store::{Lease, Store};
use aquifer_transport::Address;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::common::{Raw, connect};
use crate::exports::ExportRegistry;
use crate::stores::{record, temporary_store};

/// A server on a unix socket with a temporary store; the default export is `lease`.
pub struct Served {
    pub server: Server,
    pub registry: Arc<ExportRegistry>,
    pub lease: Arc<Lease>,
    pub store: Store,
    pub dir: tempfile::TempDir,
}

impl Served {
    pub fn new(capacity: Bytes) -> Self {
        Self::with(capacity, capacity, Limits::default())
    }

    pub fn with(capacity: Bytes, quota: Bytes, limits: Limits) -> Self {
        let (dir, store) = temporary_store();
        let lease = store.create(record(capacity, quota)).unwrap();
        let registry = ExportRegistry::with("", &lease);
        let address = Address::Unix(dir.path().join("socket"));
        let server =
            Server::bind_with(&address, Security::Plain, registry.clone(), limits).unwrap();
        Self { server, registry, lease, store, dir }
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    pub fn uri(&self) -> String {
        Uri { secure: false, address: self.server.address().clone(), export: String::new() }
            .to_string()
    }

    /// Returns a path for a file of the test.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Adds an export with a lease of its own.
    pub fn add(&self, name: &str, capacity: Bytes) -> Arc<Lease> {
        let lease = self.store.create(record(capacity, capacity)).unwrap();
        self.registry.leases.lock().unwrap().insert(name.to_owned(), Arc::clone(&lease));
        lease
    }

    pub fn connections(&self) -> usize {
        self.registry.connections()
    }

    /// Returns a client of the default export in the transmission phase.
    pub fn client(&self, structured: bool) -> Client {
        let mut client = Client::greeted(&self.socket());
        if structured {
            client.structured();
        }
        client.go("");
        client
    }

    /// Asserts that a new client can write and read.
    pub fn assert_serves(&self) {
        let mut client = self.client(false);
        client.write(0, b"still here");
        assert_eq!(client.read(0, 10), b"still here");
    }
}

/// Runs a tool until it exits, and returns its standard output.
pub fn run(command: &mut Command) -> String {
    let Output { status, stdout, stderr } =
        command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?} failed: {stdout}{stderr}");
    stdout.into_owned()
}

/// Parses a command line into a command with arguments.
pub fn tool(line: &str) -> Command {
    let mut words = line.split_whitespace();
    let mut command = Command::new(words.next().unwrap());
    command.args(words);
    command
}

/// Returns the whole content of a lease.
pub fn contents(lease: &Lease) -> Vec<u8> {
    let mut bytes = vec![0; lease.capacity().0 as usize];
    lease.read(0, &mut bytes).unwrap();
    bytes
}

/// A reply to a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    Simple { cookie: u64, error: u32 },
    Chunk { cookie: u64, done: bool, kind: u16, payload: Vec<u8> },
}

/// A client that sends any bytes, valid or not.
pub struct Client {
    pub stream: UnixStream,
}

impl Raw for Client {
    fn stream(&mut self) -> &mut UnixStream {
        &mut self.stream
    }
}

impl Client {
    /// Connects and sends nothing.
    pub fn connect(socket: &Path) -> Self {
        Self { stream: connect(socket) }
    }

    /// Connects and exchanges the greetings.
    pub fn greeted(socket: &Path) -> Self {
        let mut client = Self::connect(socket);
        let greeting: proto::Greeting = client.take();
        assert_eq!(
            (greeting.magic.get(), greeting.option_magic.get()),
            (proto::MAGIC, proto::OPTION_MAGIC)
        );
        client.put(&3u32.to_be_bytes());
        client
    }

    pub fn option(&mut self, option: u32, payload: &[u8]) {
        let header = proto::OptionHeader {
            magic: proto::OPTION_MAGIC.into(),
            option: option.into(),
            length: (payload.len() as u32).into(),
        };
        self.put(&[header.as_bytes(), payload].concat());
    }

    /// Receives one reply to `option`.
    pub fn option_reply(&mut self, option: u32) -> (u32, Vec<u8>) {
        let header: proto::OptionReply = self.take();
        assert_eq!((header.magic.get(), header.option.get()), (proto::OPTION_REPLY_MAGIC, option));
        let payload = self.take_bytes(header.length.get() as usize);
        (header.reply.get(), payload)
    }

    /// Receives all replies to `option` up to the last.
    pub fn option_replies(&mut self, option: u32) -> Vec<(u32, Vec<u8>)> {
        let mut replies = Vec::new();
        loop {
            let (kind, payload) = self.option_reply(option);
            replies.push((kind, payload));
            if kind == reply::ACK || kind & reply::ERROR_BIT != 0 {
                return replies;
            }
        }
    }

    pub fn structured(&mut self) {
        self.option(option::STRUCTURED_REPLY, &[]);
        assert_eq!(self.option_reply(option::STRUCTURED_REPLY).0, reply::ACK);
    }

    pub fn go(&mut self, name: &str) {
        self.option(option::GO, &info_payload(name));
        assert_eq!(self.option_replies(option::GO).last().unwrap().0, reply::ACK);
    }

    pub fn request(&mut self, command: u16, flags: u16, cookie: u64, offset: u64, length: u32) {
        let request = request(command, flags, cookie, offset, length);
        self.put(&request);
    }

    pub fn simple_reply(&mut self) -> (u64, u32) {
        let reply: proto::SimpleReply = self.take();
        assert_eq!(reply.magic.get(), proto::SIMPLE_REPLY_MAGIC);
        (reply.cookie.get(), reply.error.get())
    }

    /// Receives the next reply, simple or structured.
    pub fn answer(&mut self) -> Answer {
        let magic: zerocopy::byteorder::big_endian::U32 = self.take();
        if magic.get() == proto::SIMPLE_REPLY_MAGIC {
            let [error, cookie] = [self.take_bytes(4), self.take_bytes(8)];
            let error = u32::from_be_bytes(error.try_into().unwrap());
            return Answer::Simple {
                cookie: u64::from_be_bytes(cookie.try_into().unwrap()),
                error,
            };
        }
        assert_eq!(magic.get(), proto::STRUCTURED_REPLY_MAGIC);
        let mut header = magic.as_bytes().to_vec();
        header.extend(self.take_bytes(16));
        let header = proto::ChunkHeader::read_from_bytes(&header).unwrap();
        let payload = self.take_bytes(header.length.get() as usize);
        let done = header.flags.get() & chunk::DONE != 0;
        Answer::Chunk { cookie: header.cookie.get(), done, kind: header.kind.get(), payload }
    }

    /// Reads with structured replies; returns the assembled bytes and the number of chunks.
    pub fn structured_read(&mut self, flags: u16, offset: u64, length: u32) -> (Vec<u8>, usize) {
        self.request(command::READ, flags, 77, offset, length);
        let mut bytes = vec![0xAA; length as usize];
        for count in 1.. {
            let Answer::Chunk { cookie, done, kind, payload } = self.answer() else {
                panic!("a simple reply")
            };
            assert_eq!(cookie, 77);
            if kind != chunk::NONE {
                let (at, rest) = payload.split_at(8);
                let at = (u64::from_be_bytes(at.try_into().unwrap()) - offset) as usize;
                match kind {
                    chunk::OFFSET_DATA => bytes[at..at + rest.len()].copy_from_slice(rest),
                    chunk::OFFSET_HOLE => {
                        let hole = u32::from_be_bytes(rest.try_into().unwrap()) as usize;
                        bytes[at..at + hole].fill(0);
                    }
                    _ => panic!("chunk {kind:#x} {payload:?}"),
                }
            }
            if done {
                return (bytes, count);
            }
        }
        unreachable!()
    }

    pub fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        self.request(command::READ, 0, 1, offset, length);
        assert_eq!(self.simple_reply(), (1, 0));
        self.take_bytes(length as usize)
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let header = request(command::WRITE, 0, 2, offset, data.len() as u32);
        self.put(&[&header, data].concat());
        assert_eq!(self.simple_reply(), (2, 0));
    }
}

pub fn request(command: u16, flags: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let request = proto::Request {
        magic: proto::REQUEST_MAGIC.into(),
        flags: flags.into(),
        command: command.into(),
        cookie: cookie.into(),
        offset: offset.into(),
        length: length.into(),
    };
    bytes_of(&request)
}

fn bytes_of(value: &(impl IntoBytes + Immutable)) -> Vec<u8> {
    value.as_bytes().to_vec()
}

/// Returns the payload of INFO and GO without information requests.
pub fn info_payload(name: &str) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes(), name.as_bytes(), &[0, 0]].concat()
}

/// Returns the payload of LIST_META_CONTEXT and SET_META_CONTEXT.
pub fn meta_payload(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut payload = [&(name.len() as u32).to_be_bytes(), name.as_bytes()].concat();
    payload.extend((queries.len() as u32).to_be_bytes());
    for query in queries {
        payload.extend((query.len() as u32).to_be_bytes());
        payload.extend(query.as_bytes());
    }
    payload
}
