//! Ending VMs.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::client::{CLEARING, PATIENCE, forget, wait_until};
use super::files::Files;
use super::message::Origin;
use super::run::{note_end, remove_region};
use crate::error::GuestError;
use crate::qmp::Qmp;

/// How long a QEMU may take to end that is to end at once.
const ENDING: Duration = Duration::from_secs(3);

/// How long a QEMU may take to start.
const STARTING: Duration = Duration::from_secs(60);

/// Has the guest power itself off, or QEMU end at once; returns when nothing is left of it. What a QEMU has left that ended by
/// itself is removed.
///
/// # Errors
/// [`GuestError::StillRunning`] if that takes longer than `patience`.
pub fn stop(files: &Files, at_once: bool, patience: Duration) -> Result<(), GuestError> {
    if matches!(files.read()?.origin, Origin::Adopted { .. }) && files.is_running() {
        let why = format!(
            "the VM was started by somebody else, who can stop it: 'aquifer vm release {}' has it be theirs alone",
            files.name()
        );
        return Err(GuestError::Misuse(why));
    }
    let was_kept = files.is_kept();
    files.order_end(if at_once { "vm stop --force" } else { "vm stop" });
    // One that is being started listens in a moment.
    let deadline = Instant::now() + STARTING;
    let qemu = loop {
        let is_starting = files.read()?.pid.is_none() && files.is_kept();
        match Qmp::connect(&files.control(), PATIENCE) {
            Ok(qmp) => break Some(qmp),
            Err(_) if is_starting && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(10))
            }
            Err(_) => break None,
        }
    };
    if qemu.is_none() && files.is_running() {
        // It hangs, or is stopped.
        if !at_once {
            let name = files.name();
            let why = format!(
                "QEMU of VM '{name}' has not answered for {PATIENCE:?}: 'aquifer vm stop {name} --force' ends it at once"
            );
            return Err(GuestError::Keeper(why));
        }
        kill(files)?;
    }
    if let Some(mut qmp) = qemu {
        match qmp.execute(if at_once { "quit" } else { "system_powerdown" }, json!({})) {
            // Who quits may not answer first.
            Ok(_) | Err(GuestError::Io { .. }) => drop(qmp),
            Err(error) => return Err(error),
        }
        let ended = wait_until(if at_once { ENDING } else { patience }, || !files.is_running());
        if at_once && ended.is_err() {
            // Its processors wait, perhaps for pages of a lender that is gone.
            kill(files)?;
        } else {
            ended.map_err(|()| GuestError::StillRunning(patience))?;
        }
    }
    // Its keeper does the rest; where there is none any more, or QEMU ended badly, it is done here.
    let seen = wait_until(CLEARING, || !files.is_kept()).is_ok() && was_kept;
    remove_region(files)?;
    // A keeper puts the end on record, and removes the files one by one: what is there of them says nothing of that.
    if !seen
        && let Ok(record) = files.read()
        && record.ended.is_none()
    {
        note_end(files, &record, None);
    }
    forget(files);
    Ok(())
}

/// Kills a QEMU that listens.
fn kill(files: &Files) -> Result<(), GuestError> {
    let fail = || GuestError::io("cannot kill QEMU");
    let pid = files.read()?.pid.and_then(|pid| Pid::from_raw(pid as i32));
    if let Some(pid) = pid.filter(|_| files.is_running()) {
        kill_process(pid, Signal::KILL).map_err(io::Error::from).map_err(fail())?;
    }
    wait_until(CLEARING, || !files.is_running()).map_err(|()| GuestError::StillRunning(CLEARING))
}
