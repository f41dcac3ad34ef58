use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use aquifer_fabric::nbd::proto::{
    REQUEST_MAGIC, Request, SIMPLE_REPLY_MAGIC, SimpleReply, command, errno,
};
use aquifer_fabric::turn::Turn;
use aquifer_page::PAGE_SIZE;
use zerocopy::{FromZeros, IntoBytes};

use crate::Disk;
use crate::backend::MAX_REQUEST;
use crate::safety::touch_stack;

const REPLY: usize = size_of::<SimpleReply>();

/// The end of the driver's connection that is ours.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    /// To wait for a request and read all of it.
    turn: Arc<Turn>,
    /// Held while a reply is sent.
    replies: Mutex<()>,
}

impl Connection {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { stream, turn: Arc::default(), replies: Mutex::new(()) }
    }
}

/// Serves requests of the driver, in NBD's transmission phase, until it disconnects.
///
/// `ready` is called once, when no request will need memory that is not there.
pub(super) fn run(
    disk: &dyn Disk,
    worker: usize,
    connection: &Connection,
    ready: impl FnOnce(io::Result<()>),
) -> io::Result<()> {
    touch_stack();
    connection.turn.join();
    let mut buffer = vec![1; REPLY + MAX_REQUEST];
    ready(disk.read(worker, 0, &mut buffer[..PAGE_SIZE]));
    let mut server = Server { disk, worker, connection, buffer };
    let result = loop {
        match server.serve_one() {
            Ok(true) => {}
            Ok(false) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    // Nobody can make sense of a stream in which one worker got lost. Refused where it is shut down already.
    let _ = connection.stream.shutdown(Shutdown::Both);
    connection.turn.end();
    result
}

struct Server<'a> {
    disk: &'a dyn Disk,
    worker: usize,
    connection: &'a Connection,
    /// Room for a reply's head, then for data, so that both go out in one call.
    buffer: Vec<u8>,
}

impl Server<'_> {
    /// Serves one request; false when it was the last.
    fn serve_one(&mut self) -> io::Result<bool> {
        self.connection.turn.take();
        let mut stream = &self.connection.stream;
        let mut request = Request::new_zeroed();
        match stream.read_exact(request.as_mut_bytes()) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            result => result?,
        }
        let length = request.length.get() as usize;
        let carries_data = matches!(request.command.get(), command::READ | command::WRITE);
        if request.magic.get() != REQUEST_MAGIC || (carries_data && length > MAX_REQUEST) {
            // The kernel is the only peer; after this its stream cannot be understood any more.
            return Err(io::ErrorKind::InvalidData.into());
        }
        let data = &mut self.buffer[REPLY..REPLY + if carries_data { length } else { 0 }];
        if request.command.get() == command::WRITE {
            stream.read_exact(data)?;
        }
        let (offset, worker) = (request.offset.get(), self.worker);
        let (done, answered) = match request.command.get() {
            command::READ => (self.disk.read(worker, offset, data), length),
            command::WRITE => (self.disk.write(worker, offset, data), 0),
            command::TRIM | command::WRITE_ZEROES => {
                (self.disk.discard(worker, offset, length as u64), 0)
            }
            command::FLUSH => (self.disk.flush(worker), 0),
            // The driver announces twice that it goes, and complains where nobody listens: wait until it has gone.
            command::DISC => return Ok(true),
            _ => (Err(io::Error::from_raw_os_error(libc::EINVAL)), 0),
        };
        self.reply(&request, done, answered)?;
        Ok(true)
    }

    /// Answers with the first `length` bytes of data, or with the error alone.
    fn reply(&mut self, request: &Request, done: io::Result<()>, length: usize) -> io::Result<()> {
        let (error, length) = match done {
            Ok(()) => (errno::OK, length),
            Err(error) => (nbd_error(&error), 0),
        };
        let reply = SimpleReply {
            magic: SIMPLE_REPLY_MAGIC.into(),
            error: error.into(),
            cookie: request.cookie,
        };
        self.buffer[..REPLY].copy_from_slice(reply.as_bytes());
        // It guards nothing but an order: a panic could not have broken it.
        let _order = self.connection.replies.lock().unwrap_or_else(PoisonError::into_inner);
        (&self.connection.stream).write_all(&self.buffer[..REPLY + length])
    }
}

fn nbd_error(error: &io::Error) -> u32 {
    match error.raw_os_error() {
        Some(libc::ENOSPC) => errno::ENOSPC,
        Some(libc::EINVAL) => errno::EINVAL,
        Some(libc::ENOMEM) => errno::ENOMEM,
        _ => errno::EIO,
    }
}
