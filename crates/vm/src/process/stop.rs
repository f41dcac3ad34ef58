//! Stopping VMs.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::client::{CLEARING, TIMEOUT, forget, wait_until};
use super::files::Files;
use super::message::Origin;
use super::run::{note_end, remove_region};
use crate::error::VmError;
use crate::qmp::Qmp;

/// How long QEMU may take to quit.
const ENDING: Duration = Duration::from_secs(3);

/// How long QEMU may take to start.
const STARTING: Duration = Duration::from_secs(60);

/// The order that ends a VM whose start fails after QEMU runs. The operator still wants the VM.
pub(super) const WITHDRAWAL: &str = "vm start, which failed";

/// Ends a VM at once, because its start fails after QEMU runs.
///
/// # Errors
/// As [`stop`].
pub fn withdraw(files: &Files) -> Result<(), VmError> {
    end(files, true, Duration::ZERO, WITHDRAWAL)
}

/// Makes the guest power itself off, or QEMU quit if `at_once`, and removes the VM. Also removes
/// the remains of a VM that has ended by itself.
///
/// # Errors
/// [`VmError::StillRunning`] if the guest does not power itself off within `timeout`;
/// [`VmError::Misuse`] for an adopted VM; [`VmError::Reported`] if QEMU does not answer.
pub fn stop(files: &Files, at_once: bool, timeout: Duration) -> Result<(), VmError> {
    end(files, at_once, timeout, if at_once { "vm stop --force" } else { "vm stop" })
}

pub(super) fn end(
    files: &Files,
    at_once: bool,
    timeout: Duration,
    order: &str,
) -> Result<(), VmError> {
    if matches!(files.read()?.origin, Origin::Adopted { .. }) && files.is_running() {
        let why = format!(
            "Aquifer did not start the VM, and cannot stop it: stop it where it was started, \
             or run 'aquifer vm forget {}'",
            files.name()
        );
        return Err(VmError::Misuse(why));
    }
    let was_supervised = files.is_supervised();
    files.order_end(order);
    // A starting QEMU listens in a moment.
    let deadline = Instant::now() + STARTING;
    let qemu = loop {
        let is_starting = files.read()?.pid.is_none() && files.is_supervised();
        match Qmp::connect(&files.control(), TIMEOUT) {
            Ok(qmp) => break Some(qmp),
            Err(_) if is_starting && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(10))
            }
            Err(_) => break None,
        }
    };
    if qemu.is_none() && files.is_running() {
        // QEMU hangs, or is stopped.
        if !at_once {
            let name = files.name();
            let why = format!(
                "QEMU of VM '{name}' did not answer within {TIMEOUT:?}: kill it with \
                 'aquifer vm stop {name} --force'"
            );
            return Err(VmError::Reported(why));
        }
        kill(files)?;
    }
    if let Some(mut qmp) = qemu {
        match qmp.execute(if at_once { "quit" } else { "system_powerdown" }, json!({})) {
            // QEMU may exit before it answers `quit`.
            Ok(_) | Err(VmError::Io { .. }) => drop(qmp),
            Err(error) => return Err(error),
        }
        let ended = wait_until(if at_once { ENDING } else { timeout }, || !files.is_running());
        if at_once && ended.is_err() {
            // The vCPUs may be blocked on pages of an unreachable lender.
            kill(files)?;
        } else {
            ended.map_err(|()| VmError::StillRunning(timeout))?;
        }
    }
    // The supervisor cleans up. Without one, or if QEMU failed, this function does it.
    let seen = wait_until(CLEARING, || !files.is_supervised()).is_ok() && was_supervised;
    remove(files, seen)
}

/// Removes what is left of a VM that has ended, or whose start was cut off. Does nothing if nothing
/// is left.
///
/// # Errors
/// [`VmError::Exists`] if the VM runs, moves, or belongs to another host.
pub fn clear(files: &Files) -> Result<(), VmError> {
    let record = match files.read() {
        Err(VmError::Unknown(_)) => return Ok(()),
        record => record?,
    };
    let moves = record.incoming.is_some() || record.handed_over.is_some();
    if moves || files.is_running() || files.is_supervised() {
        return Err(VmError::Exists(files.name().clone()));
    }
    remove(files, false)
}

/// Removes a VM without a QEMU. `seen` says whether its supervisor has recorded the end.
fn remove(files: &Files, seen: bool) -> Result<(), VmError> {
    remove_region(files)?;
    // The supervisor records the end and then removes the files one by one, so that missing files
    // prove nothing.
    if !seen
        && let Ok(record) = files.read()
        && record.ended.is_none()
    {
        note_end(files, &record, None);
    }
    forget(files);
    Ok(())
}

/// Kills a QEMU that still listens, and waits for its end.
fn kill(files: &Files) -> Result<(), VmError> {
    let fail = || VmError::io("cannot kill QEMU");
    let pid = files.read()?.pid.and_then(|pid| Pid::from_raw(pid as i32));
    if let Some(pid) = pid.filter(|_| files.is_running()) {
        kill_process(pid, Signal::KILL).map_err(io::Error::from).map_err(fail())?;
    }
    wait_until(CLEARING, || !files.is_running()).map_err(|()| VmError::StillRunning(CLEARING))
}
