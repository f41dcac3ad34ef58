//! The transmission phase: rounds of requests sent together, and their replies in any order.

use std::io::IoSlice;
use std::time::Duration;

use aquifer_transport::initiating::{Deadline, Failure as _, Late, Pipelined, WINDOW};
use zerocopy::IntoBytes;
use zerocopy::byteorder::big_endian::{U32, U64};

use super::operation::{farewell, request_for};
use super::{Connection, Failure, NbdError, Operation, Run, Target};
use crate::proto::{
    ChunkError, ChunkHeader, Hole, MAX_STRING, SIMPLE_REPLY_MAGIC, STATE_HOLE, STATE_ZERO,
    STRUCTURED_REPLY_MAGIC, SimpleReply, StatusRun, chunk, errno,
};

/// The most runs that the client accepts in one reply about block status; known servers send fewer.
const MAX_RUNS: usize = 1 << 20;

/// The requests in flight.
type Round = aquifer_transport::initiating::Round<Failure>;

impl Connection {
    /// Executes all operations in any order, with up to 64 of them in flight.
    ///
    /// # Errors
    /// The first error found; it is then unspecified which other operations took effect. An
    /// operation longer than the server takes is an error. [`read`](Self::read) and
    /// [`write`](Self::write) split theirs.
    pub fn run(&mut self, operations: &mut [Operation<'_>]) -> Result<(), NbdError> {
        self.run_by(Deadline::after(self.io_timeout), operations)
    }
}

impl Pipelined for Connection {
    type Target = Target;
    type Failure = Failure;

    fn io_timeout(&self) -> Duration {
        self.io_timeout
    }

    fn is_broken(&self) -> bool {
        self.broken
    }

    fn fail(&mut self, failure: Failure) -> NbdError {
        self.broken |= failure.ends_connection();
        NbdError::new(&self.target, failure)
    }

    /// Checks that a request lies within the export and its payload within the server's maximum
    /// (NBD, "Size constraints").
    fn check(&self, operation: &Operation<'_>) -> Result<(), Failure> {
        let (offset, length) = operation.range();
        let size = self.agreement.size;
        let payload = matches!(operation, Operation::Read { .. } | Operation::Write { .. });
        if offset.checked_add(length).is_none_or(|end| end > size)
            || payload && length > u64::from(self.agreement.max_payload)
        {
            return Err(Failure::OutOfRange { offset, length, size });
        }
        // A client sends only what the flags offer (NBD, "Transmission flags"), and block status
        // needs a selected context (NBD, "NBD_CMD_BLOCK_STATUS").
        let (offered, what) = match operation {
            Operation::Read { .. } | Operation::Write { .. } => return Ok(()),
            Operation::Trim { .. } => (self.can_trim(), "release space"),
            Operation::WriteZeroes { .. } => (self.can_write_zeroes(), "write zeroes"),
            Operation::Flush => (self.can_flush(), "flush"),
            Operation::BlockStatus { .. } => (self.knows_holes(), "report holes"),
        };
        match offered {
            true => Ok(()),
            false => {
                Err(Failure::from_reply(errno::ENOTSUP, format!("the server does not {what}")))
            }
        }
    }

    fn wait_for_input(&mut self, deadline: Deadline) -> Result<bool, Failure> {
        Ok(self.input.wait(&mut *self.channel, deadline)?)
    }

    fn late(&mut self) -> &mut Late<Failure> {
        &mut self.late
    }

    fn begin(&mut self, _: Deadline) -> Result<u64, Failure> {
        if !self.input.is_empty() {
            return Err(Failure::protocol("a reply to no request"));
        }
        let first = self.next_cookie;
        self.next_cookie += WINDOW as u64;
        Ok(first)
    }

    fn send(
        &mut self,
        operations: &[Operation<'_>],
        round: &mut Round,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        let mut requests = [farewell(); WINDOW];
        for (index, operation) in operations.iter().enumerate() {
            requests[index] = request_for(operation, round.number(index));
        }
        let mut slices = [IoSlice::new(&[]); 2 * WINDOW];
        let mut used = 0;
        for (index, operation) in
            operations.iter().enumerate().filter(|(_, operation)| !operation.is_empty())
        {
            slices[used] = IoSlice::new(requests[index].as_bytes());
            used += 1;
            if let Operation::Write { from, .. } = operation {
                slices[used] = IoSlice::new(from);
                used += 1;
            }
        }
        Ok(deadline.send(&mut *self.channel, &mut slices[..used])?)
    }

    /// Receives one simple reply, or one chunk of a structured reply.
    fn receive_one(
        &mut self,
        operations: &mut [Operation<'_>],
        round: &mut Round,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        let channel = &mut *self.channel;
        match self.input.peek::<U32>(channel, deadline)?.get() {
            SIMPLE_REPLY_MAGIC => {
                let head = self.input.take::<SimpleReply>(channel, deadline)?;
                let index = round.index(head.cookie.get())?;
                self.simple_reply(&mut operations[index], round, index, head.error.get(), deadline)
            }
            STRUCTURED_REPLY_MAGIC if self.agreement.structured => {
                let head = self.input.take::<ChunkHeader>(channel, deadline)?;
                let index = round.index(head.cookie.get())?;
                self.chunk(&mut operations[index], round, index, &head, deadline)?;
                // A client ignores unknown flags (NBD, "Structured reply flags").
                if head.flags.get() & chunk::DONE != 0 { round.close(index) } else { Ok(()) }
            }
            magic => Err(Failure::Protocol(format!("a reply that begins with {magic:#010x}"))),
        }
    }
}

impl Connection {
    /// Handles a simple reply, which may carry data only without structured replies (NBD, "Simple
    /// reply message").
    fn simple_reply(
        &mut self,
        operation: &mut Operation<'_>,
        round: &mut Round,
        index: usize,
        error: u32,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        if error != errno::OK {
            round.fail(index, Failure::from_reply(error, String::new()));
        } else {
            match operation {
                Operation::Read { .. } | Operation::BlockStatus { .. }
                    if self.agreement.structured =>
                {
                    return Err(Failure::protocol(
                        "a simple reply instead of the agreed structured one",
                    ));
                }
                Operation::Read { into, .. } => {
                    self.input.read(&mut *self.channel, deadline, into)?;
                    *round.missing(index) = 0;
                }
                _ => {}
            }
        }
        round.close(index)
    }

    /// Handles a chunk; one of an unknown or unfitting kind ends the connection, unless it is an
    /// error (NBD, "Structured reply types"). Data may come in any order (NBD, "NBD_CMD_READ").
    fn chunk(
        &mut self,
        operation: &mut Operation<'_>,
        round: &mut Round,
        index: usize,
        head: &ChunkHeader,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        let channel = &mut *self.channel;
        let length = head.length.get() as usize;
        match (head.kind.get(), operation) {
            (chunk::NONE, _) if length == 0 => Ok(()),
            (chunk::OFFSET_DATA, Operation::Read { offset, into }) if length > size_of::<U64>() => {
                let at = self.input.take::<U64>(channel, deadline)?.get();
                let part =
                    part_of(into, *offset, at, length - size_of::<U64>(), round.missing(index))?;
                Ok(self.input.read(channel, deadline, part)?)
            }
            (chunk::OFFSET_HOLE, Operation::Read { offset, into })
                if length == size_of::<Hole>() =>
            {
                let hole = self.input.take::<Hole>(channel, deadline)?;
                let missing = round.missing(index);
                part_of(into, *offset, hole.offset.get(), hole.length.get() as usize, missing)?
                    .fill(0);
                Ok(())
            }
            (chunk::BLOCK_STATUS, Operation::BlockStatus { runs, .. })
                if length >= 12 && length % 8 == 4 && length / 8 <= MAX_RUNS =>
            {
                let context = self.input.take::<U32>(channel, deadline)?.get();
                let ours = Some(context) == self.agreement.allocation;
                if ours && round.tell(index) {
                    return Err(Failure::protocol("the same block status twice"));
                }
                for _ in 0..length / size_of::<StatusRun>() {
                    let run = self.input.take::<StatusRun>(channel, deadline)?;
                    if ours {
                        // Unknown flags do not count (NBD, "base:allocation metadata context").
                        let hole =
                            run.status.get() & (STATE_HOLE | STATE_ZERO) == STATE_HOLE | STATE_ZERO;
                        runs.push(Run { length: run.length.get(), hole });
                    }
                }
                Ok(())
            }
            (kind, _) if kind & chunk::ERROR_BIT != 0 => {
                let failure = self.error_chunk(length, deadline)?;
                round.fail(index, failure);
                Ok(())
            }
            (kind, _) => Err(Failure::Protocol(format!(
                "an unexpected chunk of kind {kind} and {length} bytes"
            ))),
        }
    }

    fn error_chunk(&mut self, length: usize, deadline: Deadline) -> Result<Failure, Failure> {
        let channel = &mut *self.channel;
        let room = length.checked_sub(size_of::<ChunkError>());
        let room = room
            .filter(|room| *room <= 2 * MAX_STRING)
            .ok_or_else(|| Failure::protocol("a malformed error chunk"))?;
        let error = self.input.take::<ChunkError>(channel, deadline)?;
        let mut text = vec![0; usize::from(error.text_length.get())];
        if text.len() > room {
            return Err(Failure::protocol("a malformed error chunk"));
        }
        self.input.read(channel, deadline, &mut text)?;
        self.input.skip(channel, deadline, room - text.len())?;
        let text = String::from_utf8_lossy(&text).chars().filter(|c| !c.is_control()).collect();
        Ok(Failure::from_reply(error.error.get(), text))
    }
}

/// Returns the part of a read's buffer that a chunk covers, and deducts it from `missing`.
fn part_of<'a>(
    into: &'a mut [u8],
    offset: u64,
    at: u64,
    length: usize,
    missing: &mut u32,
) -> Result<&'a mut [u8], Failure> {
    let outside = || Failure::protocol("a chunk outside of the request");
    let start =
        at.checked_sub(offset).and_then(|start| usize::try_from(start).ok()).ok_or_else(outside)?;
    let part =
        start.checked_add(length).and_then(|end| into.get_mut(start..end)).ok_or_else(outside)?;
    *missing = missing.checked_sub(length as u32).ok_or_else(outside)?;
    Ok(part)
}
