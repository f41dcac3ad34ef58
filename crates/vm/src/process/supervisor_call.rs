//! Requests to a VM's supervisor. Each wait has a deadline; its error names the VM, the request and
//! the time.

use std::io::{self, BufReader};
use std::time::Duration;

use aquifer_region::process::{ControlCall, next_answer};

use super::files::Files;
use super::message::{Request, Told};
use crate::error::VmError;

/// Timeout of an answer that a supervisor knows at once, or asks of its QEMU.
pub(super) const ANSWERING: Duration = Duration::from_secs(5);

/// Longest silence of a supervisor at work: it waits no longer for QEMU, the guest, an engine or
/// another host.
pub(super) const SILENCE: Duration = Duration::from_secs(90);

/// The answers to one request.
pub(super) struct Answers<'a> {
    files: &'a Files,
    lines: BufReader<ControlCall>,
    /// Timeout of the next answer.
    silence: Duration,
}

impl<'a> Answers<'a> {
    /// Sends a request to a VM's supervisor. `silence` is the timeout of each answer.
    pub(super) fn to(
        files: &'a Files,
        request: &Request,
        silence: Duration,
    ) -> Result<Self, VmError> {
        files.read()?;
        let call =
            ControlCall::ask(&files.supervisor(), request, silence).map_err(no_answer(files))?;
        Ok(Self { files, lines: BufReader::new(call), silence })
    }

    /// Waits for the next answer.
    pub(super) fn next(&mut self) -> Result<Told, VmError> {
        self.lines.get_mut().wait(self.silence);
        next_answer(&mut self.lines).map_err(no_answer(self.files))
    }
}

/// Sends a request that has one answer, and waits for it.
pub(super) fn answer(files: &Files, request: &Request, timeout: Duration) -> Result<Told, VmError> {
    Answers::to(files, request, timeout)?.next()
}

/// Makes an error of an unexpected answer.
pub(super) fn unexpected(told: Told) -> VmError {
    match told {
        Told::Failed { error } => VmError::Reported(error),
        other => VmError::Reported(format!("unexpected answer of the supervisor: {other:?}")),
    }
}

fn no_answer(files: &Files) -> impl FnOnce(io::Error) -> VmError {
    VmError::io(format!("the supervisor of VM '{}' does not answer", files.name()))
}
