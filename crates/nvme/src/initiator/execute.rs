//! Commands one at a time, for the set-up of queues and the administration of controllers.

use std::io::IoSlice;

use aquifer_transport::initiating::{Deadline, Failure as _};
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::Failure;
use super::head::Head;
use super::link::{Link, Pdu, completes};
use crate::proto::command::{FABRICS, Sgl, admin};
use crate::proto::fabrics::{PROPERTY_8_BYTES, kind};
use crate::proto::identify::LENGTH;
use crate::proto::{Command, Completion, NvmeStatus, digest};

/// A queue with one command in flight.
pub(super) struct Executor<'a> {
    pub(super) link: &'a mut Link,
    pub(super) deadline: Deadline,
    next_id: u16,
}

impl<'a> Executor<'a> {
    pub(super) fn new(link: &'a mut Link, deadline: Deadline) -> Self {
        Self { link, deadline, next_id: 0 }
    }

    /// Sends a command with data in its capsule, waits for its completion, and also returns the
    /// number of bytes received `into`.
    pub(super) fn execute(
        &mut self,
        mut command: Command,
        data: &[u8],
        into: &mut [u8],
    ) -> Result<(Completion, usize), Failure> {
        // Any identifier will do: no other command is in flight.
        self.next_id = self.next_id % 0x7FFF + 1;
        command.id = self.next_id.into();
        let mut head = Head::EMPTY;
        self.link.start_command(&mut head, &command, data.len());
        let with_digest = self.link.data_digest() && !data.is_empty();
        let digest = if with_digest { digest::of(data) } else { U32::ZERO };
        let digest = if with_digest { digest.as_bytes() } else { &[] };
        let mut slices = [IoSlice::new(head.bytes()), IoSlice::new(data), IoSlice::new(digest)];
        self.link.send(&mut slices, self.deadline)?;
        let mut received = 0;
        loop {
            let unknown = || Failure::protocol("an answer to an unknown command");
            match self.link.next(self.deadline)? {
                Pdu::Completion(completion) if completion.command_id == command.id => {
                    return Ok((completion, received));
                }
                Pdu::Data(data) if data.command_id == command.id => {
                    let success = completes(&data, received as u32, into.len() as u32)?;
                    let length = data.length.get() as usize;
                    self.link.data(&mut into[received..][..length], self.deadline)?;
                    received += length;
                    if success {
                        let mut completion = Completion::new_zeroed();
                        completion.command_id = command.id;
                        return Ok((completion, received));
                    }
                }
                Pdu::R2t(_) => return Err(Failure::protocol("it requests the same data twice")),
                Pdu::Completion(_) | Pdu::Data(_) => return Err(unknown()),
            }
        }
    }

    /// Executes a command without data that must succeed, and returns its result.
    fn result(&mut self, command: Command) -> Result<u64, Failure> {
        let (completion, _) = self.execute(command, &[], &mut [])?;
        succeeded(completion.status())?;
        Ok(completion.result.get())
    }

    /// Reads a property of 8 or 4 bytes (Base, Figure 386 "Property Get Command").
    pub(super) fn property(&mut self, offset: u32, eight_bytes: bool) -> Result<u64, Failure> {
        let command = Command::new(FABRICS, 0, kind::PROPERTY_GET.into(), Sgl::NONE);
        let size = if eight_bytes { PROPERTY_8_BYTES } else { 0 };
        self.result(command.with(10, size).with(11, offset))
    }

    /// Sets a property of 4 bytes (Base, Figure 388 "Property Set Command").
    pub(super) fn set_property(&mut self, offset: u32, value: u32) -> Result<(), Failure> {
        let command = Command::new(FABRICS, 0, kind::PROPERTY_SET.into(), Sgl::NONE);
        self.result(command.with(11, offset).with(12, value)).map(drop)
    }

    /// Sets a feature (Base, section 5.27 "Set Features command") and returns the result.
    pub(super) fn set_feature(&mut self, feature: u8, value: u32) -> Result<u64, Failure> {
        let command = Command::new(admin::SET_FEATURES, 0, 0, Sgl::NONE);
        self.result(command.with(10, feature.into()).with(11, value))
    }

    /// Sends a Keep Alive (Base, section 5.18 "Keep Alive command").
    pub(super) fn keep_alive(&mut self) -> Result<(), Failure> {
        self.result(Command::new(admin::KEEP_ALIVE, 0, 0, Sgl::NONE)).map(drop)
    }

    /// Reads a structure of 4096 bytes (Base, section 5.17 "Identify command"); the inner error is
    /// the command's status.
    pub(super) fn identify<T: FromBytes + IntoBytes>(
        &mut self,
        what: u8,
        nsid: u32,
    ) -> Result<Result<Box<T>, NvmeStatus>, Failure> {
        const { assert!(size_of::<T>() == LENGTH) };
        let mut structure = Box::new(T::new_zeroed());
        let command = Command::new(admin::IDENTIFY, 0, nsid, Sgl::transport(LENGTH as u32));
        let (completion, received) =
            self.execute(command.with(10, what.into()), &[], structure.as_mut_bytes())?;
        match completion.status() {
            status if !status.is_success() => Ok(Err(status)),
            _ if received < LENGTH => Err(Failure::protocol("an Identify with too little data")),
            _ => Ok(Ok(structure)),
        }
    }
}

/// Turns a status other than success into a failure.
pub(super) fn succeeded(status: NvmeStatus) -> Result<(), Failure> {
    if status.is_success() { Ok(()) } else { Err(Failure::from_status(status)) }
}
