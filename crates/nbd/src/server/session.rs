//! The transmission phase of a connection: requests in, replies out.

use std::io::{self, IoSlice};

use aquifer_page::PAGE_SIZE;
use aquifer_page::export::ExportError;
use aquifer_transport::channel::Channel;
use aquifer_transport::serving::{INBOX, Inbox, OUTBOX, Outbox};
use zerocopy::FromBytes;

use super::admission::Admission;
use super::answer::{self, Shape, simple_reply};
use super::handshake::Terms;
use super::large_read::LargeRead;
use super::storage::{Done, Storage, Zeroes};
use crate::proto::{MAX_PAYLOAD, REQUEST_MAGIC, Request, StatusRun, command, command_flag, errno};

/// The longest read, in bytes, that the server copies into the outbox; up to here a copy is cheaper
/// than another send.
const COPIED_READ: usize = 32 << 10;
/// The longest write, in bytes, that the server receives whole; it stores longer ones piece by
/// piece.
const WHOLE_WRITE: usize = INBOX / 2;
/// Bytes for a copied read in the worst case: a chunk for each page.
const COPIED_READ_ROOM: usize = COPIED_READ + (COPIED_READ / PAGE_SIZE + 2) * answer::HEAD;
/// The most runs in one reply about block status; the client asks again for the rest.
const MAX_RUNS: usize = 4096;
/// Bytes for a reply about block status.
const STATUS_ROOM: usize = answer::HEAD + MAX_RUNS * size_of::<StatusRun>();
/// The most memory, in bytes, that a connection keeps between long reads of a disk.
const KEPT_ASIDE: usize = 1 << 20;
const HEADER: usize = size_of::<Request>();

const _: () = assert!(COPIED_READ_ROOM <= OUTBOX && STATUS_ROOM <= OUTBOX);

/// The reason why a connection ends without `CMD_DISC`.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the client violates the protocol: {0}")]
    Protocol(&'static str),
    #[error("the client closed the connection in the middle of a request")]
    Truncated,
    #[error("cannot complete a read: {0}")]
    Export(#[from] ExportError),
}

/// A connection in its transmission phase; on a lease it allocates nothing once it is made.
pub(super) struct Session {
    channel: Box<dyn Channel>,
    export: Storage,
    structured: bool,
    allocation: bool,
    inbox: Inbox,
    outbox: Outbox,
    large_read: LargeRead,
    /// The buffer for long reads of a disk; empty for leases.
    aside: Vec<u8>,
    admission: Admission,
}

/// The decision whether a session continues.
#[derive(PartialEq, Eq)]
enum Step {
    Next,
    End,
}

impl Session {
    pub(super) fn new(terms: Terms) -> Self {
        let Terms { channel, export, structured, allocation, admission, .. } = terms;
        let (inbox, outbox, large_read) = (Inbox::default(), Outbox::default(), LargeRead::new());
        Self {
            channel,
            export,
            structured,
            allocation,
            inbox,
            outbox,
            large_read,
            aside: Vec::new(),
            admission,
        }
    }

    /// Answers requests until the client disconnects. It sends replies once only waiting remains.
    ///
    /// After `CMD_DISC` it sends the outstanding replies. The drop of the channel then closes TLS
    /// and the connection (NBD, "Terminating the transmission phase").
    pub(super) fn run(&mut self) -> Result<(), SessionError> {
        loop {
            while let Some(request) = self.next_request()? {
                let write = request.command.get() == command::WRITE;
                let length = request.length.get() as usize;
                if write && length <= WHOLE_WRITE && self.inbox.bytes().len() < HEADER + length {
                    break;
                }
                self.inbox.consume(HEADER);
                self.admission.wait(&request, &mut self.outbox, &mut *self.channel)?;
                if self.execute(&request)? == Step::End {
                    return Ok(self.outbox.flush(&mut *self.channel)?);
                }
            }
            self.outbox.flush(&mut *self.channel)?;
            self.admission.tell_traffic();
            if !self.inbox.fill(&mut *self.channel)? {
                let clean = self.inbox.bytes().is_empty();
                return if clean { Ok(()) } else { Err(SessionError::Truncated) };
            }
        }
    }

    /// Returns the next request if its whole header has arrived.
    ///
    /// Each begins with the same magic number (NBD, "Request message").
    fn next_request(&self) -> Result<Option<Request>, SessionError> {
        let Ok((request, _)) = Request::read_from_prefix(self.inbox.bytes()) else {
            return Ok(None);
        };
        if request.magic.get() != REQUEST_MAGIC {
            return Err(SessionError::Protocol("a request without its magic number"));
        }
        Ok(Some(request))
    }

    fn execute(&mut self, request: &Request) -> Result<Step, SessionError> {
        let (offset, length) = (request.offset.get(), u64::from(request.length.get()));
        let flags = request.flags.get();
        let export = &self.export;
        let done = match request.command.get() {
            command::READ => {
                self.read(request)?;
                return Ok(Step::Next);
            }
            command::BLOCK_STATUS => {
                self.block_status(request)?;
                return Ok(Step::Next);
            }
            // A disconnect has no reply (NBD, "NBD_CMD_DISC").
            command::DISC => return Ok(Step::End),
            command::WRITE => self.write(request)?,
            _ if flags & !allowed_flags(request.command.get(), self.structured) != 0 => {
                Err(errno::EINVAL)
            }
            command::FLUSH => export.flush(),
            command::TRIM => export.trim(offset, length),
            // The command may have no effect, but no unknown flag (NBD, "NBD_CMD_CACHE").
            command::CACHE => export.check(offset, length),
            command::WRITE_ZEROES => export.write_zeroes(offset, length, zeroes(flags)),
            // An unknown command is an invalid argument (NBD, "Error values").
            _ => Err(errno::EINVAL),
        };
        // The reply to a command with FUA waits until its data is permanent (NBD, "Ordering of
        // messages and writes").
        let is_permanent =
            flags & command_flag::FUA == 0 || request.command.get() == command::FLUSH;
        let done = if is_permanent { done } else { done.and_then(|()| self.export.flush()) };
        self.reply(request, done.err().unwrap_or(errno::OK))?;
        Ok(Step::Next)
    }

    /// Answers by a simple reply, which serves every request whose reply has no data, but not a
    /// read once structured replies are negotiated (NBD, "Simple reply message").
    fn reply(&mut self, request: &Request, error: u32) -> Result<(), SessionError> {
        let reply = simple_reply(request.cookie.get(), error);
        self.outbox.reserve(size_of_val(&reply), &mut *self.channel)?;
        self.outbox.push(&reply);
        Ok(())
    }

    /// Refuses a read or block status; the reply is structured if the client negotiated that (NBD,
    /// "Structured reply chunk message").
    fn refuse(&mut self, request: &Request, error: u32) -> Result<(), SessionError> {
        if !self.structured {
            return self.reply(request, error);
        }
        self.outbox.reserve(answer::HEAD, &mut *self.channel)?;
        answer::push_error_chunk(&mut self.outbox, request.cookie.get(), error);
        Ok(())
    }

    /// Stores the data that follows the request, before the reply (NBD, "NBD_CMD_WRITE").
    ///
    /// Either end may disconnect over a payload of more than 32 MiB (NBD, "Size constraints").
    fn write(&mut self, request: &Request) -> Result<Done, SessionError> {
        let length = request.length.get();
        if length > MAX_PAYLOAD {
            return Err(SessionError::Protocol("a write of more than 32 MiB"));
        }
        let mut done = if request.flags.get() & !allowed_flags(command::WRITE, self.structured) != 0
        {
            Err(errno::EINVAL)
        } else {
            // Checks the whole range first, so that no long write is stored in part and then
            // refused.
            self.export.check_write(request.offset.get(), u64::from(length))
        };
        let mut at = request.offset.get();
        let mut left = length as usize;
        while left > 0 {
            let count = self.next_piece(at, left)?;
            if done.is_ok() {
                done = self.export.write(at, &self.inbox.bytes()[..count]);
            }
            self.inbox.consume(count);
            // If this wraps, `check_write` refused the range and nothing is written.
            at = at.wrapping_add(count as u64);
            left -= count;
        }
        Ok(done)
    }

    /// Returns how much of a write's data to take next.
    ///
    /// The function cuts the piece at a page boundary, so that the session writes no page twice.
    fn next_piece(&mut self, at: u64, left: usize) -> Result<usize, SessionError> {
        loop {
            let there = self.inbox.bytes().len();
            if there >= left {
                return Ok(left);
            }
            let past_page = (at.wrapping_add(there as u64) % PAGE_SIZE as u64) as usize;
            if there > past_page {
                return Ok(there - past_page);
            }
            self.outbox.flush(&mut *self.channel)?;
            if !self.inbox.fill(&mut *self.channel)? {
                return Err(SessionError::Truncated);
            }
        }
    }

    /// Answers by a simple reply, or by chunks if the client negotiated those; with `DF` by one
    /// chunk that spells out the holes (NBD, "NBD_CMD_READ").
    fn read(&mut self, request: &Request) -> Result<(), SessionError> {
        let (flags, length) = (request.flags.get(), request.length.get() as usize);
        if flags & !allowed_flags(command::READ, self.structured) != 0
            || length > MAX_PAYLOAD as usize
        {
            return self.refuse(request, errno::EINVAL);
        }
        let shape = match (self.structured, flags & command_flag::DF != 0) {
            (false, _) => Shape::Simple,
            (true, false) if self.export.lease().is_some() => Shape::Chunks,
            (true, _) => Shape::OneChunk,
        };
        if length > COPIED_READ {
            return self.read_large(request, shape);
        }
        self.outbox.reserve(COPIED_READ_ROOM, &mut *self.channel)?;
        match answer::read(&mut self.outbox, &self.export, request, shape) {
            Ok(()) => Ok(()),
            Err(error) => self.refuse(request, error),
        }
    }

    fn read_large(&mut self, request: &Request, shape: Shape) -> Result<(), SessionError> {
        if let Err(error) = self.export.check(request.offset.get(), u64::from(request.length.get()))
        {
            return self.refuse(request, error);
        }
        if self.export.lease().is_none() {
            return self.read_aside(request, shape);
        }
        self.outbox.reserve(answer::HEAD, &mut *self.channel)?;
        answer::push_read_head(&mut self.outbox, request, shape);
        let Self { channel, export, outbox, large_read, .. } = self;
        match export.lease() {
            Some(lease) => {
                large_read.send(request, shape == Shape::Chunks, lease, outbox, &mut **channel)
            }
            None => Ok(()),
        }
    }

    /// Reads the whole range before it sends any reply, because a disk may fail.
    fn read_aside(&mut self, request: &Request, shape: Shape) -> Result<(), SessionError> {
        self.aside.resize(request.length.get() as usize, 0);
        if let Err(error) = self.export.read(request.offset.get(), &mut self.aside) {
            return self.refuse(request, error);
        }
        self.outbox.reserve(answer::HEAD, &mut *self.channel)?;
        answer::push_read_head(&mut self.outbox, request, shape);
        let Self { channel, outbox, aside, .. } = self;
        channel.send_all(&mut [IoSlice::new(outbox.bytes()), IoSlice::new(aside)])?;
        outbox.clear();
        if aside.len() > KEPT_ASIDE {
            *aside = Vec::new();
        }
        Ok(())
    }

    /// Answers by a structured reply, and only if the client selected `base:allocation` (NBD,
    /// "NBD_CMD_BLOCK_STATUS").
    fn block_status(&mut self, request: &Request) -> Result<(), SessionError> {
        let flags = request.flags.get();
        let unknown = flags & !allowed_flags(command::BLOCK_STATUS, self.structured) != 0;
        let lease =
            self.export.lease().filter(|_| self.allocation && !unknown && request.length.get() > 0);
        let Some(lease) = lease else { return self.refuse(request, errno::EINVAL) };
        let most = if flags & command_flag::REQ_ONE != 0 { 1 } else { MAX_RUNS };
        self.outbox.reserve(STATUS_ROOM, &mut *self.channel)?;
        match answer::block_status(&mut self.outbox, lease, request, most) {
            Ok(()) => Ok(()),
            Err(error) => self.refuse(request, error),
        }
    }
}

/// Returns the flags that are valid with a command; another is an invalid argument (NBD, "Error
/// values"). FUA is valid with all, as the export offers it (NBD, "Command flags").
fn allowed_flags(command: u16, structured: bool) -> u16 {
    command_flag::FUA
        | match command {
            command::READ if structured => command_flag::DF,
            command::WRITE_ZEROES => command_flag::NO_HOLE | command_flag::FAST_ZERO,
            command::BLOCK_STATUS => command_flag::REQ_ONE,
            _ => 0,
        }
}

fn zeroes(flags: u16) -> Zeroes {
    Zeroes { hole: flags & command_flag::NO_HOLE == 0, fast: flags & command_flag::FAST_ZERO != 0 }
}
