//! The workers that serve the nbd driver's requests from a disk.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use aquifer_nbd::proto::{REQUEST_MAGIC, Request, SIMPLE_REPLY_MAGIC, SimpleReply, command, errno};
use aquifer_page::{PAGE_SIZE, WorkerId, lock};
use aquifer_transport::poll_token::PollToken;
use zerocopy::{FromZeros, IntoBytes};

use crate::Disk;
use crate::backend::MAX_REQUEST;
use crate::safety::touch_stack;

const REPLY: usize = size_of::<SimpleReply>();

/// This process's end of the driver's connection.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    /// Token to wait for a request and read all of it.
    poll_token: Arc<PollToken>,
    /// Held while a worker sends a reply.
    replies: Mutex<()>,
}

impl Connection {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { stream, poll_token: Arc::default(), replies: Mutex::new(()) }
    }
}

/// Serves the driver's requests, in the transmission phase of the NBD protocol, until the driver
/// disconnects.
///
/// Calls `ready` once, when all memory that requests need is resident.
pub(super) fn run(
    disk: &dyn Disk,
    worker: WorkerId,
    connection: &Connection,
    ready: impl FnOnce(io::Result<()>),
) -> io::Result<()> {
    touch_stack();
    connection.poll_token.join();
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
    // If one worker has lost its place in the stream, no other can read it either. The call fails
    // if the connection is already shut down.
    let _ = connection.stream.shutdown(Shutdown::Both);
    connection.poll_token.end();
    result
}

struct Server<'a> {
    disk: &'a dyn Disk,
    worker: WorkerId,
    connection: &'a Connection,
    /// Room for a reply's header followed by its data, so that one call sends both.
    buffer: Vec<u8>,
}

impl Server<'_> {
    /// Serves one request. Returns false at the end of the stream.
    fn serve_one(&mut self) -> io::Result<bool> {
        self.connection.poll_token.take();
        let mut stream = &self.connection.stream;
        let mut request = Request::new_zeroed();
        match stream.read_exact(request.as_mut_bytes()) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            result => result?,
        }
        let length = request.length.get() as usize;
        let carries_data = matches!(request.command.get(), command::READ | command::WRITE);
        if request.magic.get() != REQUEST_MAGIC || (carries_data && length > MAX_REQUEST) {
            // The kernel is the only peer. After a malformed request its stream cannot be parsed.
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
            // The driver sends `NBD_CMD_DISC` twice, and logs an error if the socket is closed
            // before. So keep reading until the stream ends.
            command::DISC => return Ok(true),
            _ => (Err(io::Error::from_raw_os_error(libc::EINVAL)), 0),
        };
        self.reply(&request, done, answered)?;
        Ok(true)
    }

    /// Sends the first `length` bytes of data, or the error alone.
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
        // The lock guards only the order of replies, so a panic cannot have left broken state.
        let _order = lock(&self.connection.replies);
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
