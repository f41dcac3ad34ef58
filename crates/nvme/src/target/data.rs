//! The place of a command's data.

use super::parse::Payload;
use crate::proto::command::{flag, sgl};
use crate::proto::{Command, NvmeStatus};

/// The place of the data that a command brings.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// In the command's capsule.
    Here(Payload),
    /// At the host, to be requested by an R2T.
    There,
}

/// Finds the data of a command that needs `length` bytes. The command may describe more: Linux
/// describes room for 256 ranges in every Dataset Management.
pub(super) fn source(
    command: &Command,
    payload: Payload,
    length: usize,
) -> Result<Source, NvmeStatus> {
    check_flags(command)?;
    let described = command.sgl.length.get() as usize;
    match command.sgl.kind {
        sgl::IN_CAPSULE if command.sgl.address.get() != 0 => {
            Err(NvmeStatus::SGL_OFFSET_INVALID.final_())
        }
        _ if described < length => Err(NvmeStatus::DATA_LENGTH_INVALID.final_()),
        sgl::IN_CAPSULE if payload.length != described => {
            Err(NvmeStatus::DATA_LENGTH_INVALID.final_())
        }
        // Without "do not retry": the host retries.
        sgl::IN_CAPSULE if !payload.intact => Err(NvmeStatus::TRANSIENT_TRANSPORT),
        sgl::IN_CAPSULE => Ok(Source::Here(Payload { length, ..payload })),
        sgl::TRANSPORT => Ok(Source::There),
        _ => Err(NvmeStatus::SGL_TYPE_INVALID.final_()),
    }
}

/// Checks that the host has room for the `length` bytes that a command returns.
pub(super) fn sink(command: &Command, length: usize) -> Result<(), NvmeStatus> {
    check_flags(command)?;
    match command.sgl.kind {
        sgl::TRANSPORT if (command.sgl.length.get() as usize) < length => {
            Err(NvmeStatus::DATA_LENGTH_INVALID.final_())
        }
        sgl::TRANSPORT => Ok(()),
        _ => Err(NvmeStatus::SGL_TYPE_INVALID.final_()),
    }
}

/// Checks that a command is not fused and describes its data by an SGL.
pub(super) fn check_flags(command: &Command) -> Result<(), NvmeStatus> {
    let good = command.flags & flag::FUSED == 0 && command.flags & flag::SGL != 0;
    if good { Ok(()) } else { Err(NvmeStatus::INVALID_FIELD.final_()) }
}
