//! Rounds of commands: sent together, completed in any order.

use std::io::IoSlice;
use std::time::Duration;

use aquifer_transport::initiating::{Deadline, Failure as _, Late, Pipelined, WINDOW};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::U32;

use super::link::{Pdu, completes};
use super::{Connection, Failure, NvmeError, Operation, Target};
use crate::proto::command::{DSM_DEALLOCATE, DsmRange, Sgl, control, io};
use crate::proto::pdu::{Data, R2t};
use crate::proto::{Command, Completion, digest};

/// The commands in flight, with their identifiers as numbers.
type Round = aquifer_transport::initiating::Round<Failure>;

/// Identifiers stay below this, so that a round never uses 65535 (Base, Figure 86 "Command Dword
/// 0").
const IDS: u16 = u16::MAX - (WINDOW as u16 - 1);

impl Connection {
    /// Carries out all operations in any order, up to 64 in flight at a time.
    ///
    /// # Errors
    /// The first error found; which of the other operations took effect is then unspecified. An
    /// operation that is longer than the controller accepts is an error. [`read`](Self::read),
    /// [`write`](Self::write) and [`write_zeroes`](Self::write_zeroes) split long operations, this
    /// function does not.
    pub fn run(&mut self, operations: &mut [Operation<'_>]) -> Result<(), NvmeError> {
        self.run_by(Deadline::after(self.io_timeout), operations)
    }
}

impl Pipelined for Connection {
    type Target = Target;
    type Failure = Failure;

    /// A queue of N entries is full with N - 1 commands.
    fn window(&self) -> usize {
        WINDOW.min(self.controller.facts.limits.queue_size as usize - 1)
    }

    fn io_timeout(&self) -> Duration {
        self.io_timeout
    }

    fn is_broken(&self) -> bool {
        self.broken
    }

    /// Ends the whole controller if the failure ends the connection.
    fn fail(&mut self, failure: Failure) -> NvmeError {
        if failure.ends_connection() && !self.broken {
            self.broken = true;
            self.controller.end();
        }
        NvmeError::new(&self.target, failure)
    }

    fn check(&self, operation: &Operation<'_>) -> Result<(), Failure> {
        let facts = &self.controller.facts;
        let ((offset, length), size) = (operation.range(), facts.size);
        let most = match operation {
            Operation::Read { .. } | Operation::Write { .. } => facts.limits.transfer,
            Operation::WriteZeroes { .. } if !self.can_write_zeroes() => {
                return Err(Failure::Unsupported("the controller lacks Write Zeroes"));
            }
            Operation::WriteZeroes { .. } => facts.limits.zeroes,
            Operation::Trim { .. } if !self.can_trim() => {
                return Err(Failure::Unsupported("the controller lacks Dataset Management"));
            }
            Operation::BlockStatus { .. } => {
                return Err(Failure::Unsupported("NVMe does not report holes"));
            }
            Operation::Trim { .. } | Operation::Flush => u64::MAX,
        };
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(Failure::OutOfRange { offset, length, size });
        }
        if (offset | length) & (facts.block() - 1) != 0 {
            return Err(Failure::Unaligned { offset, length, block: facts.block() });
        }
        if length > most {
            return Err(Failure::TooLong { length, most });
        }
        Ok(())
    }

    fn wait_for_input(&mut self, deadline: Deadline) -> Result<bool, Failure> {
        self.link.wait_for_input(deadline)
    }

    fn late(&mut self) -> &mut Late<Failure> {
        &mut self.late
    }

    fn begin(&mut self, deadline: Deadline) -> Result<u64, Failure> {
        if self.link.has_input() {
            // If this input ends the connection, `next` returns the reason.
            self.link.next(deadline)?;
            return Err(Failure::protocol("an answer to no command"));
        }
        let first = self.next_id;
        self.next_id = (first + WINDOW as u16) % IDS;
        Ok(first.into())
    }

    fn send(
        &mut self,
        operations: &[Operation<'_>],
        round: &mut Round,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        let with_digest = self.link.data_digest();
        for (index, operation) in operations.iter().enumerate() {
            if operation.is_empty() {
                continue;
            }
            let command = self.command(operation, round.number(index) as u16);
            let head = &mut self.heads[index];
            match operation {
                Operation::Write { from, .. } if self.controller.facts.fit_capsule(from.len()) => {
                    self.link.start_command(head, &command, from.len());
                    if with_digest {
                        head.digest = digest::of(from);
                    }
                }
                Operation::Write { from, .. } => {
                    self.link.start_command(head, &command, 0);
                    *round.missing(index) = from.len() as u32;
                }
                Operation::Trim { offset, length } => {
                    let shift = self.controller.facts.block_shift;
                    let range = DsmRange {
                        attributes: U32::ZERO,
                        blocks: (length >> shift).into(),
                        start: (offset >> shift).into(),
                    };
                    self.link.start_command(head, &command, size_of::<DsmRange>());
                    head.push(range.as_bytes());
                    if with_digest {
                        head.push(digest::of(range.as_bytes()).as_bytes());
                    }
                }
                _ => self.link.start_command(head, &command, 0),
            }
        }
        let mut slices = [IoSlice::new(&[]); 3 * WINDOW];
        let mut used = 0;
        let mut push = |bytes| {
            slices[used] = IoSlice::new(bytes);
            used += 1;
        };
        for (index, operation) in
            operations.iter().enumerate().filter(|(_, operation)| !operation.is_empty())
        {
            let head = &self.heads[index];
            push(head.bytes());
            if let Operation::Write { from, .. } = operation
                && *round.missing(index) == 0
            {
                push(from);
                if with_digest {
                    push(head.digest.as_bytes());
                }
            }
        }
        self.link.send(&mut slices[..used], deadline)
    }

    /// Receives one PDU.
    fn receive_one(
        &mut self,
        operations: &mut [Operation<'_>],
        round: &mut Round,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        match self.link.next(deadline)? {
            Pdu::Completion(completion) => complete(&completion, round),
            Pdu::Data(data) => {
                let index = round.index(data.command_id.get().into())?;
                self.data(&data, &mut operations[index], round, index, deadline)
            }
            Pdu::R2t(asked) => {
                let index = round.index(asked.command_id.get().into())?;
                self.give(&asked, &operations[index], round.missing(index), deadline)
            }
        }
    }
}

impl Connection {
    fn command(&self, operation: &Operation<'_>, id: u16) -> Command {
        let nsid = self.target.namespace;
        let shift = self.controller.facts.block_shift;
        let (offset, length) = operation.range();
        // `check` has ensured that the range fits the namespace and the limits of a command.
        let (start, blocks, length) = (offset >> shift, (length >> shift) as u32, length as u32);
        match operation {
            Operation::Read { .. } => {
                Command::new(io::READ, id, nsid, Sgl::transport(length)).with_blocks(start, blocks)
            }
            Operation::Write { from, .. } => {
                let here = self.controller.facts.fit_capsule(from.len());
                let sgl = if here { Sgl::in_capsule(length) } else { Sgl::transport(length) };
                Command::new(io::WRITE, id, nsid, sgl).with_blocks(start, blocks)
            }
            Operation::WriteZeroes { .. } => {
                let command =
                    Command::new(io::WRITE_ZEROES, id, nsid, Sgl::NONE).with_blocks(start, blocks);
                command.with(12, command.dword(12) | control::DEALLOCATE)
            }
            Operation::Trim { .. } => {
                let sgl = Sgl::in_capsule(size_of::<DsmRange>() as u32);
                // Dword 10 is the number of ranges minus one: 0.
                Command::new(io::DATASET_MANAGEMENT, id, nsid, sgl).with(11, DSM_DEALLOCATE)
            }
            Operation::Flush | Operation::BlockStatus { .. } => {
                Command::new(io::FLUSH, id, nsid, Sgl::NONE)
            }
        }
    }

    fn data(
        &mut self,
        data: &Data,
        operation: &mut Operation<'_>,
        round: &mut Round,
        index: usize,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        let Operation::Read { into, .. } = operation else {
            return Err(Failure::protocol("data for a command that reads none"));
        };
        let missing = round.missing(index);
        let received = into.len() as u32 - *missing;
        let done = completes(data, received, into.len() as u32)?;
        let length = data.length.get();
        *missing -= length;
        self.link.data(&mut into[received as usize..][..length as usize], deadline)?;
        if done { round.close(index) } else { Ok(()) }
    }

    /// Sends the part of a write's data that the controller requests.
    fn give(
        &mut self,
        asked: &R2t,
        operation: &Operation<'_>,
        missing: &mut u32,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        let Operation::Write { from, .. } = operation else {
            return Err(Failure::protocol("it requests data of a command that writes none"));
        };
        let (offset, length) = (asked.offset.get(), asked.length.get());
        if offset != from.len() as u32 - *missing || length == 0 || length > *missing {
            return Err(Failure::protocol("it requests data outside of the write, or twice"));
        }
        *missing -= length;
        self.link.send_data(asked, &from[offset as usize..][..length as usize], deadline)
    }
}

fn complete(completion: &Completion, round: &mut Round) -> Result<(), Failure> {
    let index = round.index(completion.command_id.get().into())?;
    let status = completion.status();
    if !status.is_success() {
        let failure = Failure::from_status(status);
        if failure.ends_connection() {
            return Err(failure);
        }
        round.fail(index, failure);
    }
    round.close(index)
}
