//! Requests to a VM's supervisor. Each wait has a deadline; its error names the VM, the request and
//! the time.

use std::time::Duration;

use aquifer_control_socket::{Answers, CallError};

use super::files::Files;
use super::message::{Request, Told};
use crate::error::VmError;

/// Timeout of an answer that a supervisor knows at once, or asks of its QEMU.
pub(super) const ANSWERING: Duration = Duration::from_secs(5);

/// Longest silence of a supervisor at work: it waits no longer for QEMU, the guest, an engine or
/// another host.
pub(super) const SILENCE: Duration = Duration::from_secs(90);

/// Sends a request to a VM's supervisor, and returns a function that waits for the next answer, at
/// most for `silence`.
pub(super) fn answers<'a>(
    files: &'a Files,
    request: &Request,
    silence: Duration,
) -> Result<impl FnMut() -> Result<Told, VmError> + use<'a>, VmError> {
    files.read()?;
    let mut answers =
        Answers::to(&files.supervisor(), request, silence).map_err(no_answer(files))?;
    Ok(move || answers.receive().map_err(no_answer(files)))
}

/// Sends a request that has one answer, and waits for it.
pub(super) fn answer(files: &Files, request: &Request, timeout: Duration) -> Result<Told, VmError> {
    answers(files, request, timeout)?()
}

/// Makes an error of an unexpected answer.
pub(super) fn unexpected(told: Told) -> VmError {
    match told {
        Told::Failed { error } => VmError::Reported(error),
        other => VmError::Reported(format!("unexpected answer of the supervisor: {other:?}")),
    }
}

fn no_answer(files: &Files) -> impl FnOnce(CallError) -> VmError {
    let name = files.name().clone();
    move |error| match error {
        CallError::Absent(_, source) | CallError::Unread(_, source) => {
            VmError::Unsupervised { name, source }
        }
        error => {
            VmError::io(format!("the supervisor of VM '{name}' does not answer"))(error.into())
        }
    }
}
