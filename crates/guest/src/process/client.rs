//! Starting VMs, asking about them and stopping them. All calls block.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_region::process::{RegionSpec, client as regions, first_word};
use serde_json::json;

use super::files::Files;
use super::message::{Record, Response, State, Status};
use super::run::{SUBCOMMAND, remove_region};
use crate::error::GuestError;
use crate::qmp::Qmp;
use crate::spec::VmSpec;

/// How long QEMU may think about an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a keeper may take to clear away what its QEMU has left.
const CLEARING: Duration = Duration::from_secs(40);

/// Starts a VM with files under `run_dir`, whose memory is the region of `memory`, which is made for it. Its keeper is `program`, whose
/// [`SUBCOMMAND`] must come to call [`super::run()`]. When this fails nothing is left of it.
///
/// # Errors
/// [`GuestError`].
pub fn start(
    program: &Path,
    run_dir: &Path,
    spec: &VmSpec,
    memory: &RegionSpec,
) -> Result<Status, GuestError> {
    spec.check()?;
    let files = Files::new(run_dir, &spec.name);
    files.create(&Record { spec: spec.clone(), pid: None, ended: None })?;
    let started = regions::create(program, &run_dir.join("regions"), memory)
        .map_err(GuestError::from)
        .and_then(|_| keeper(program, &files).inspect_err(|_| _ = remove_region(&files)));
    started.inspect_err(|_| files.remove())?;
    status(&files)
}

fn keeper(program: &Path, files: &Files) -> Result<(), GuestError> {
    let fail = || GuestError::io(format!("cannot start {}", program.display()));
    let mut keeper = Command::new(program)
        .arg(SUBCOMMAND)
        .args([files.run_dir().as_os_str(), files.name().as_str().as_ref()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(fail())?;
    let error = match first_word::heard(&mut keeper).map_err(fail())? {
        Some(Response::Started) => return Ok(()),
        Some(Response::Failed { error }) => error,
        None => "its keeper ended before it ran".to_owned(),
    };
    let _ = keeper.wait();
    Err(GuestError::Keeper(error))
}

/// The VMs under `run_dir`.
///
/// # Errors
/// Where they cannot be listed.
pub fn list(run_dir: &Path) -> Result<Vec<Files>, GuestError> {
    Files::all(run_dir).map_err(GuestError::io(format!("cannot list the VMs in {}", run_dir.display())))
}

/// How a VM is.
///
/// # Errors
/// [`GuestError`].
pub fn status(files: &Files) -> Result<Status, GuestError> {
    let Record { spec, pid, ended } = files.read()?;
    let asked =
        Qmp::connect(&files.control(), PATIENCE).and_then(|mut qmp| qmp.execute("query-status", json!({})));
    let state = match asked {
        Ok(answer) => State::Qemu(answer["status"].as_str().unwrap_or("unknown").to_owned()),
        Err(_) if pid.is_none() && files.is_kept() => State::Qemu("starting".to_owned()),
        Err(error) => State::Ended(ended.unwrap_or_else(|| error.to_string())),
    };
    let region = regions::status(&files.region()).ok();
    let [qmp, serial, console, log] = [files.qmp(), files.serial(), files.console(), files.log()];
    Ok(Status { spec, state, pid, qmp, serial, console, log, region })
}

/// Has the guest power itself off, or QEMU end at once; returns when nothing is left of it. What a QEMU has left that ended by
/// itself is removed.
///
/// # Errors
/// [`GuestError::StillRunning`] if that takes longer than `patience`.
pub fn stop(files: &Files, at_once: bool, patience: Duration) -> Result<(), GuestError> {
    files.read()?;
    if let Ok(mut qmp) = Qmp::connect(&files.control(), PATIENCE) {
        match qmp.execute(if at_once { "quit" } else { "system_powerdown" }, json!({})) {
            // Who quits may not answer first.
            Ok(_) | Err(GuestError::Io { .. }) => drop(qmp),
            Err(error) => return Err(error),
        }
        wait_until(patience, || !is_running(files)).map_err(|()| GuestError::StillRunning(patience))?;
    }
    // Its keeper does the rest; where there is none any more, or QEMU ended badly, it is done here.
    let _ = wait_until(CLEARING, || !files.is_kept());
    remove_region(files)?;
    files.remove();
    Ok(())
}

fn is_running(files: &Files) -> bool {
    std::os::unix::net::UnixStream::connect(files.control()).is_ok()
}

fn wait_until(patience: Duration, condition: impl Fn() -> bool) -> Result<(), ()> {
    let deadline = Instant::now() + patience;
    while !condition() {
        if Instant::now() > deadline {
            return Err(());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
