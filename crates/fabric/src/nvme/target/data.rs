use super::parse::Payload;
use crate::nvme::proto::command::{flag, sgl};
use crate::nvme::proto::{Command, Status};

/// Where the data of a command that brings data is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// In its capsule.
    Here(Payload),
    /// With the host, to be asked for.
    There,
}

/// Finds the data of a command that brings `length` bytes, or more that do not matter: Linux describes room for 256 ranges
/// in every Dataset Management.
pub(super) fn source(command: &Command, payload: Payload, length: usize) -> Result<Source, Status> {
    check_flags(command)?;
    let described = command.sgl.length.get() as usize;
    match command.sgl.kind {
        sgl::IN_CAPSULE if command.sgl.address.get() != 0 => {
            Err(Status::SGL_OFFSET_INVALID.final_())
        }
        _ if described < length => Err(Status::DATA_LENGTH_INVALID.final_()),
        sgl::IN_CAPSULE if payload.length != described => Err(Status::DATA_LENGTH_INVALID.final_()),
        // To be tried again.
        sgl::IN_CAPSULE if !payload.intact => Err(Status::TRANSIENT_TRANSPORT),
        sgl::IN_CAPSULE => Ok(Source::Here(Payload { length, ..payload })),
        sgl::TRANSPORT => Ok(Source::There),
        _ => Err(Status::SGL_TYPE_INVALID.final_()),
    }
}

/// Checks that there is room for the `length` bytes that a command wants.
pub(super) fn sink(command: &Command, length: usize) -> Result<(), Status> {
    check_flags(command)?;
    match command.sgl.kind {
        sgl::TRANSPORT if (command.sgl.length.get() as usize) < length => {
            Err(Status::DATA_LENGTH_INVALID.final_())
        }
        sgl::TRANSPORT => Ok(()),
        _ => Err(Status::SGL_TYPE_INVALID.final_()),
    }
}

/// No command is fused, and data is described by SGLs.
pub(super) fn check_flags(command: &Command) -> Result<(), Status> {
    let good = command.flags & flag::FUSED == 0 && command.flags & flag::SGL != 0;
    if good { Ok(()) } else { Err(Status::INVALID_FIELD.final_()) }
}
