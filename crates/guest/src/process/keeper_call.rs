//! Orders to a VM's keeper, by its socket. Each wait has a deadline, and its error names the VM, the order and the time.

use std::io::{self, BufReader};
use std::time::Duration;

use aquifer_region::process::{ControlCall, next_answer};

use super::files::Files;
use super::message::{Request, Told};
use crate::error::GuestError;

/// How long a keeper may take for what it knows at once, or its QEMU.
pub(super) const ANSWERING: Duration = Duration::from_secs(5);

/// How long a keeper that is at work may say nothing: it waits for QEMU, the guest, an engine or another host no longer.
pub(super) const SILENCE: Duration = Duration::from_secs(90);

/// The answers to one order, as they come.
pub(super) struct Answers<'a> {
    files: &'a Files,
    lines: BufReader<ControlCall>,
    /// How long the next one may take.
    silence: Duration,
}

impl<'a> Answers<'a> {
    /// Asks a VM's keeper, which may not be silent for longer than this.
    pub(super) fn to(
        files: &'a Files,
        request: &Request,
        silence: Duration,
    ) -> Result<Self, GuestError> {
        files.read()?;
        let call = ControlCall::ask(&files.keeper(), request, silence).map_err(no_answer(files))?;
        Ok(Self { files, lines: BufReader::new(call), silence })
    }

    /// The next one.
    pub(super) fn next(&mut self) -> Result<Told, GuestError> {
        self.lines.get_mut().wait(self.silence);
        next_answer(&mut self.lines).map_err(no_answer(self.files))
    }
}

/// Asks a VM's keeper what has one answer.
pub(super) fn answer(
    files: &Files,
    request: &Request,
    patience: Duration,
) -> Result<Told, GuestError> {
    Answers::to(files, request, patience)?.next()
}

/// That it did not say what it should.
pub(super) fn unexpected(told: Told) -> GuestError {
    match told {
        Told::Failed { error } => GuestError::Keeper(error),
        other => GuestError::Keeper(format!("it says {other:?}")),
    }
}

fn no_answer(files: &Files) -> impl FnOnce(io::Error) -> GuestError {
    GuestError::io(format!("the keeper of VM '{}' does not answer", files.name()))
}
