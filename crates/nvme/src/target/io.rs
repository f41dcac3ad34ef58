//! I/O queues.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_page::PAGE_SIZE;
use zerocopy::FromBytes;

use super::admission::Admission;
use super::blocks::{self, range, status_of};
use super::controller::Controller;
use super::data::{Source, check_flags, sink, source};
use super::large_read::LargeRead;
use super::link::{Link, PIECE};
use super::parse::{Payload, Pdu};
use super::transfers::{Transfer, Transfers};
use super::{Broken, Fatal, MAX_TRANSFER, Namespace};
use crate::proto::command::{DSM_DEALLOCATE, DsmRange, FABRICS, control, io};
use crate::proto::pdu::Data;
use crate::proto::{Command, NvmeStatus, fabrics};

/// An I/O queue. Between a command and its completion the queue allocates nothing, except for a
/// Dataset Management with its ranges outside the capsule.
pub(super) struct IoQueue<'a> {
    link: &'a mut Link,
    controller: Arc<Controller>,
    namespace: Arc<Namespace>,
    transfers: Transfers,
    large_read: LargeRead,
    tally: Tally,
    admission: Admission,
}

/// Work done and not yet added to the namespace's tally.
#[derive(Default)]
struct Tally {
    reads: u64,
    blocks_read: u64,
    writes: u64,
    blocks_written: u64,
}

/// Whether the queue continues.
#[derive(PartialEq, Eq)]
enum Step {
    Next,
    End,
}

impl<'a> IoQueue<'a> {
    pub(super) fn new(
        link: &'a mut Link,
        size: u32,
        controller: Arc<Controller>,
        namespace: Arc<Namespace>,
        admission: Admission,
    ) -> Self {
        let (transfers, large_read) = (Transfers::new(size), LargeRead::new());
        let tally = Tally::default();
        Self { link, controller, namespace, transfers, large_read, tally, admission }
    }

    /// Executes commands until the host ends the queue. Sends the answers when no received command
    /// is left.
    pub(super) fn run(&mut self) -> Result<(), Broken> {
        let done = self.serve();
        // What came last counts, too.
        self.tell_tally();
        done
    }

    fn serve(&mut self) -> Result<(), Broken> {
        loop {
            while let Some(pdu) = self.link.next()? {
                let step = match pdu {
                    Pdu::Command(command, payload) => {
                        self.admission.wait(&command, self.link)?;
                        self.execute(&command, payload)?
                    }
                    Pdu::Data(data, payload) => self.receive(&data, payload)?,
                    Pdu::Request(_) => return Err(Fatal::sequence("a second ICReq").into()),
                };
                if step == Step::End {
                    return Ok(self.link.flush()?);
                }
            }
            self.link.flush()?;
            self.controller.touch();
            self.tell_tally();
            self.admission.tell_traffic();
            if !self.link.fill()? {
                return Ok(());
            }
        }
    }

    fn execute(&mut self, command: &Command, payload: Payload) -> Result<Step, Broken> {
        let id = command.id.get();
        let status = match command.opcode {
            io::READ => {
                self.read(command)?;
                return Ok(Step::Next);
            }
            io::WRITE | io::COMPARE => match self.write_or_compare(command, payload)? {
                Some(status) => status,
                None => return Ok(Step::Next),
            },
            io::WRITE_ZEROES => self.write_zeroes(command),
            io::DATASET_MANAGEMENT => match self.dataset_management(command, payload)? {
                Some(status) => status,
                None => return Ok(Step::Next),
            },
            // Acknowledged writes are in RAM, the most permanent place here.
            io::FLUSH => self.flush(command),
            // Ends the I/O queue that carries the command (Base, section 6.4 "Disconnect command").
            FABRICS if command.fabrics_type() == fabrics::kind::DISCONNECT => {
                let good = command.dword(10) as u16 == 0;
                let status =
                    if good { NvmeStatus::SUCCESS } else { NvmeStatus::CONNECT_FORMAT.final_() };
                self.link.complete(id, status, 0)?;
                return Ok(if good { Step::End } else { Step::Next });
            }
            FABRICS => NvmeStatus::COMMAND_SEQUENCE.final_(),
            _ => NvmeStatus::INVALID_OPCODE.final_(),
        };
        self.link.complete(id, status, 0)?;
        Ok(Step::Next)
    }

    fn read(&mut self, command: &Command) -> Result<(), Broken> {
        let id = command.id.get();
        let (offset, length) = match self.checked_range(command).and_then(|(offset, length)| {
            sink(command, length)?;
            Ok((offset, length))
        }) {
            Ok(range) => range,
            Err(status) => return Ok(self.link.complete(id, status, 0)?),
        };
        self.tally.reads += 1;
        self.tally.blocks_read += (length / PAGE_SIZE) as u64;
        let lease = self.namespace.lease();
        if length <= PIECE {
            let fill = |buf: &mut [u8]| lease.read(offset, buf).map_err(|error| status_of(&error));
            return Ok(self.link.answer(id, length, fill)?);
        }
        match self.large_read.send(self.link, id, &self.namespace, offset, length)? {
            Ok(()) => {
                self.link.reserve(super::link::AROUND_DATA)?;
                self.link.end_data(id);
                Ok(())
            }
            // The data PDU that would signal success has not been sent.
            Err(error) => Ok(self.link.complete(id, status_of(&error), 0)?),
        }
    }

    /// Returns `None` if the data must be requested first.
    fn write_or_compare(
        &mut self,
        command: &Command,
        payload: Payload,
    ) -> Result<Option<NvmeStatus>, Broken> {
        let found = self
            .checked_range(command)
            .and_then(|(offset, length)| Ok((offset, length, source(command, payload, length)?)));
        let (offset, length, source) = match found {
            Ok(found) => found,
            Err(status) => return Ok(Some(status)),
        };
        if command.opcode == io::WRITE {
            self.tally.writes += 1;
            self.tally.blocks_written += (length / PAGE_SIZE) as u64;
        }
        match source {
            Source::Here(payload) => {
                let data = self.link.data(payload);
                Ok(Some(blocks::apply(&self.namespace, command.opcode, offset, data)))
            }
            Source::There => {
                let tag = self.transfers.begin(command, length as u32, false)?;
                self.link.ask(command.id.get(), tag, length as u32)?;
                Ok(None)
            }
        }
    }

    /// Handles requested data.
    fn receive(&mut self, data: &Data, payload: Payload) -> Result<Step, Broken> {
        let transfer = self.transfers.expect(data)?;
        let bytes = self.link.data(payload);
        if !payload.intact {
            transfer.status = NvmeStatus::TRANSIENT_TRANSPORT;
        } else if let Some(gathered) = &mut transfer.gathered {
            // `begin` has reserved room for all of it.
            gathered.extend_from_slice(bytes);
        } else if transfer.status.is_success() {
            let offset =
                transfer.command.start_block() * PAGE_SIZE as u64 + u64::from(transfer.received);
            transfer.status =
                blocks::apply(&self.namespace, transfer.command.opcode, offset, bytes);
        }
        transfer.received += data.length.get();
        if let Some(transfer) = self.transfers.finish(data.tag.get()) {
            let Transfer { command, mut status, gathered, .. } = transfer;
            if let (Some(ranges), true) = (gathered, status.is_success()) {
                status = deallocate(&self.namespace, &mut self.admission, &ranges);
            }
            self.link.complete(command.id.get(), status, 0)?;
        }
        Ok(Step::Next)
    }

    /// Makes blocks zero and frees their RAM, whether the host asks for deallocation or not.
    fn write_zeroes(&mut self, command: &Command) -> NvmeStatus {
        let checked = check_flags(command).and_then(|()| {
            self.check_namespace(command)?;
            range(&self.namespace, command.start_block(), command.blocks().into())
        });
        match checked {
            Ok((offset, length)) if command.dword(12) & control::PROTECTION == 0 => {
                self.admission.freed(length);
                blocks::discard(&self.namespace, offset, length)
            }
            Ok(_) => NvmeStatus::INVALID_FIELD.final_(),
            Err(status) => status,
        }
    }

    /// Returns `None` if the ranges must be requested first.
    fn dataset_management(
        &mut self,
        command: &Command,
        payload: Payload,
    ) -> Result<Option<NvmeStatus>, Broken> {
        let ranges = (command.dword(10) & 0xFF) as usize + 1;
        let length = ranges * size_of::<DsmRange>();
        let source = self.check_namespace(command).and_then(|()| source(command, payload, length));
        match source {
            Err(status) => Ok(Some(status)),
            // The other attributes are hints, which this target ignores.
            Ok(_) if command.dword(11) & DSM_DEALLOCATE == 0 => Ok(Some(NvmeStatus::SUCCESS)),
            Ok(Source::Here(payload)) => {
                let ranges = self.link.data(payload);
                Ok(Some(deallocate(&self.namespace, &mut self.admission, ranges)))
            }
            Ok(Source::There) => {
                let tag = self.transfers.begin(command, length as u32, true)?;
                self.link.ask(command.id.get(), tag, length as u32)?;
                Ok(None)
            }
        }
    }

    fn flush(&self, command: &Command) -> NvmeStatus {
        match (check_flags(command), command.nsid.get()) {
            (Err(status), _) => status,
            (_, super::NSID | crate::proto::identify::ALL_NAMESPACES) => NvmeStatus::SUCCESS,
            _ => NvmeStatus::INVALID_NAMESPACE.final_(),
        }
    }

    /// Returns offset and length in bytes of a Read, Write or Compare.
    fn checked_range(&self, command: &Command) -> Result<(u64, usize), NvmeStatus> {
        self.check_namespace(command)?;
        if command.dword(12) & control::PROTECTION != 0 {
            return Err(NvmeStatus::INVALID_FIELD.final_());
        }
        let (offset, length) =
            range(&self.namespace, command.start_block(), command.blocks().into())?;
        if length > MAX_TRANSFER as u64 {
            return Err(NvmeStatus::INVALID_FIELD.final_());
        }
        if u64::from(command.sgl.length.get()) != length {
            return Err(NvmeStatus::DATA_LENGTH_INVALID.final_());
        }
        Ok((offset, length as usize))
    }

    fn check_namespace(&self, command: &Command) -> Result<(), NvmeStatus> {
        if command.nsid.get() == super::NSID {
            Ok(())
        } else {
            Err(NvmeStatus::INVALID_NAMESPACE.final_())
        }
    }

    /// Adds the work done to the namespace's tally.
    fn tell_tally(&mut self) {
        let Tally { reads, blocks_read, writes, blocks_written } = std::mem::take(&mut self.tally);
        let all = &self.namespace.tally;
        if reads > 0 {
            all.reads.fetch_add(reads, Ordering::Relaxed);
            all.blocks_read.fetch_add(blocks_read, Ordering::Relaxed);
        }
        if writes > 0 {
            all.writes.fetch_add(writes, Ordering::Relaxed);
            all.blocks_written.fetch_add(blocks_written, Ordering::Relaxed);
        }
    }
}

/// Makes ranges of blocks zero, and frees their RAM.
fn deallocate(namespace: &Namespace, admission: &mut Admission, ranges: &[u8]) -> NvmeStatus {
    // The length is a multiple of a range's size, and ranges need no alignment.
    let Ok(ranges) = <[DsmRange]>::ref_from_bytes(ranges) else {
        return NvmeStatus::DATA_LENGTH_INVALID.final_();
    };
    let found = |one: &DsmRange| range(namespace, one.start.get(), one.blocks.get().into());
    // Checks all ranges first, so that a failed command deallocates none.
    if let Some(status) = ranges.iter().find_map(|one| found(one).err()) {
        return status;
    }
    ranges.iter().filter_map(|one| found(one).ok()).fold(
        NvmeStatus::SUCCESS,
        |before, (offset, length)| {
            admission.freed(length);
            let status = blocks::discard(namespace, offset, length);
            if before.is_success() { status } else { before }
        },
    )
}
