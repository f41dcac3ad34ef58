//! Functions that start volume processes and send requests to them. All calls block.

use std::io::{self, Write};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_control_socket::{Answers, CallError, first_word};
use aquifer_page::{LeaseId, VolumeId};
use aquifer_volume::LeaseTarget;

use super::ProcessError;
pub use super::clean_up::clean_up;
use super::message::{KEEP, Request, Response, VolumeProcessStatus};
use super::run::Task;
use super::spec::{Files, Locked, SUBCOMMAND, VolumeRecord, VolumeSpec};
use super::swap_off;
use crate::swap::{self, SwapError};

/// Time that a volume process may be silent. It exceeds the longest step, moving an extent.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Time for a reply to a status request, which waits for no lender.
const STATUS_TIMEOUT: Duration = Duration::from_secs(3);

/// Time from the start of a volume process until it serves the volume.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A served volume that is not kept yet.
///
/// The process detaches the volume again if this value is dropped, or this program ends, before a
/// call of [`keep`](Started::keep).
#[derive(Debug)]
pub struct Started {
    files: Files,
    record: VolumeRecord,
    /// Pipe on which the process waits for the keep message or the end of the pipe.
    pipe: ChildStdin,
}

impl Started {
    /// Returns the record of the served volume.
    pub fn record(&self) -> &VolumeRecord {
        &self.record
    }

    /// Tells the process to serve the volume until a request or a signal detaches it.
    ///
    /// # Errors
    /// Returns [`ProcessError::Silent`] if the process ended before.
    pub fn keep(mut self) -> Result<VolumeRecord, ProcessError> {
        let told = self.pipe.write_all(KEEP.as_bytes());
        told.map_err(|error| {
            silent(&self.files, &format!("ended right after its start ({error})"))
        })?;
        Ok(self.record)
    }
}

/// Starts a process that serves a volume, waits until it serves, and keeps the volume.
///
/// # Errors
/// Fails as [`start`] and [`Started::keep`] do.
pub fn spawn(program: &Path, spec: &VolumeSpec) -> Result<VolumeRecord, ProcessError> {
    start(program, spec)?.keep()
}

/// Starts a process that serves a volume, and waits until it serves.
///
/// `program` must call [`super::run()`] for its subcommand [`SUBCOMMAND`]. On failure nothing is
/// left: if the process was silent for too long, this function waits until the process has removed
/// everything and ended.
///
/// # Errors
/// Says why the volume cannot be served. Returns [`ProcessError::Left`] if the process does not
/// end.
pub fn start(program: &Path, spec: &VolumeSpec) -> Result<Started, ProcessError> {
    let files = spec.files();
    try_start(program, spec, &files).map_err(|error| match error {
        // A process that reports its failure has cleaned up already.
        ProcessError::Silent { .. } => wait_for_end(&files).err().unwrap_or(error),
        error => error,
    })
}

/// Waits until no process serves the volume, and removes the leftovers.
fn wait_for_end(files: &Files) -> Result<(), ProcessError> {
    let deadline = Instant::now() + START_TIMEOUT;
    while Locked::is_taken(files) {
        if Instant::now() > deadline {
            let pid =
                files.read().ok().flatten().map_or("?".to_owned(), |record| record.pid.to_string());
            let why = format!(
                "its process ({pid}) neither served it in time nor ended; kill that process"
            );
            return Err(ProcessError::Left { volume: files.id, why });
        }
        thread::sleep(Duration::from_millis(20));
    }
    files.clean_up()
}

fn try_start(program: &Path, spec: &VolumeSpec, files: &Files) -> Result<Started, ProcessError> {
    files.make_directory()?;
    files.remove_old_logs();
    let fail =
        || ProcessError::io(format!("cannot start a volume process with {}", program.display()));
    let mut task = serde_json::to_vec(&Task::Serve(Box::new(spec.clone())))
        .map_err(|error| fail()(error.into()))?;
    task.push(b'\n');
    let mut serving = Command::new(program);
    serving.args(SUBCOMMAND).stdin(Stdio::piped());
    let mut child = first_word::spawn(&mut serving, &files.log()).map_err(fail())?;
    let pipe = child.stdin.take().ok_or_else(|| fail()(io::ErrorKind::BrokenPipe.into()));
    let told = pipe.and_then(|mut pipe| pipe.write_all(&task).map(|()| pipe).map_err(fail()));
    let first = first_word::heard(&mut child, START_TIMEOUT);
    // This child forks the serving process and exits.
    child.wait().map_err(fail())?;
    let pipe = told?;
    match first {
        Ok(Some(Response::Status(status))) => {
            Ok(Started { files: files.clone(), record: status.record, pipe })
        }
        Ok(Some(Response::Failed { error })) => Err(ProcessError::Refused(error)),
        Ok(Some(_)) => Err(silent(files, "did not report that it serves the volume")),
        Err(error) if error.kind() != io::ErrorKind::TimedOut => Err(fail()(error)),
        Ok(None) | Err(_) => Err(silent(files, "ended, or did not serve the volume in time")),
    }
}

/// Lists all volumes under a state directory, served or left behind.
pub fn list(state: &Path) -> Result<Vec<VolumeId>, ProcessError> {
    let files = Files::all(state)
        .map_err(ProcessError::io(format!("cannot list volumes in {}", state.display())))?;
    Ok(files.into_iter().map(|files| files.id).collect())
}

/// Tells whether a process serves the volume. If not, [`clean_up`] removes its leftovers.
pub fn is_alive(state: &Path, volume: VolumeId) -> bool {
    Locked::is_taken(&Files::new(state, volume))
}

/// Reads the record of a volume's process.
///
/// # Errors
/// Returns [`ProcessError::NotServed`] if there is no valid record.
pub fn record(state: &Path, volume: VolumeId) -> Result<VolumeRecord, ProcessError> {
    let files = Files::new(state, volume);
    match files.read() {
        Ok(Some(record)) => Ok(record),
        Ok(None) => Err(ProcessError::NotServed(volume)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(ProcessError::NotServed(volume))
        }
        Err(error) => {
            Err(ProcessError::io(format!("cannot read {}", files.record().display()))(error))
        }
    }
}

/// Asks the volume's process for the status.
pub fn status(state: &Path, volume: VolumeId) -> Result<VolumeProcessStatus, ProcessError> {
    let files = Files::new(state, volume);
    match ask(&files, &Request::Status, STATUS_TIMEOUT, |_| ())? {
        Response::Status(status) => Ok(*status),
        other => Err(unexpected(&files, &other)),
    }
}

/// Adds a lease to the volume.
pub fn add_lease(state: &Path, volume: VolumeId, lease: LeaseTarget) -> Result<(), ProcessError> {
    done(&Files::new(state, volume), &Request::AddLease { lease: Box::new(lease) }, |_| ())
}

/// Begins a second copy of the pages of the lease `of`, on another lease. A copy that the volume
/// has is not begun again.
pub fn add_copy(
    state: &Path,
    volume: VolumeId,
    of: LeaseId,
    lease: LeaseTarget,
) -> Result<(), ProcessError> {
    let request = Request::AddCopy { of, lease: Box::new(lease) };
    done(&Files::new(state, volume), &request, |_| ())
}

/// Moves all extents off a lease and releases it, or ends the second copy on it, while I/O
/// continues. With `spills`, extents go to the spill file if no other lease has room.
pub fn evacuate(
    state: &Path,
    volume: VolumeId,
    (lease, spills): (LeaseId, bool),
    mut progress: impl FnMut(aquifer_volume::Progress),
) -> Result<(), ProcessError> {
    done(&Files::new(state, volume), &Request::Evacuate { lease, spills }, |response| {
        if let Response::Evacuating(now) = response {
            progress(now);
        }
    })
}

/// Turns swap off, detaches the device, waits until the process has ended, and removes its log. On
/// failure the process still serves the volume.
pub fn detach(
    state: &Path,
    volume: VolumeId,
    mut progress: impl FnMut(swap::Progress),
) -> Result<(), ProcessError> {
    let files = Files::new(state, volume);
    done(&files, &Request::Detach, |response| {
        if let Response::SwapOff(now) = response {
            progress(now);
        }
    })?;
    files.remove_log();
    Ok(())
}

/// Turns off swap on a device that no volume process serves, in a separate process. If memory runs
/// out meanwhile, the kernel kills the process that calls swapoff. `program` is as for [`start`].
///
/// # Errors
/// Fails if the swapped-out pages do not fit into memory or the kernel refuses. Swap is then still
/// on.
pub fn swap_off(
    program: &Path,
    device: &Path,
    progress: impl FnMut(swap::Progress),
) -> Result<(), SwapError> {
    let mut helper = Command::new(program);
    helper.args(SUBCOMMAND);
    swap_off::by_helper(helper, device, progress)
}

fn done(
    files: &Files,
    request: &Request,
    progress: impl FnMut(Response),
) -> Result<(), ProcessError> {
    match ask(files, request, TIMEOUT, progress)? {
        Response::Done => Ok(()),
        other => Err(unexpected(files, &other)),
    }
}

/// Sends a request, passes progress on, and returns the last response. A `Failed` response becomes
/// an error.
fn ask(
    files: &Files,
    request: &Request,
    io_timeout: Duration,
    mut progress: impl FnMut(Response),
) -> Result<Response, ProcessError> {
    let failed = |error| match error {
        CallError::Absent(..) => ProcessError::NotServed(files.id),
        CallError::Unreachable(socket, source) => {
            ProcessError::io(format!("cannot connect to {}", socket.display()))(source)
        }
        CallError::Silent(_, source) if source.kind() == io::ErrorKind::UnexpectedEof => {
            silent(files, "ended without an answer")
        }
        CallError::Unread(_, source) | CallError::Silent(_, source) => {
            silent(files, &format!("sent no complete answer ({source})"))
        }
    };
    let mut answers = Answers::to(&files.socket(), request, io_timeout).map_err(failed)?;
    loop {
        match answers.receive().map_err(failed)? {
            Response::Failed { error } => return Err(ProcessError::Refused(error)),
            now @ (Response::SwapOff(_) | Response::Evacuating(_)) => progress(now),
            last => {
                // After a detach, the end of the connection is the end of the process.
                answers.wait_for_end();
                return Ok(last);
            }
        }
    }
}

fn unexpected(files: &Files, response: &Response) -> ProcessError {
    silent(files, &format!("sent an unexpected response: {response:?}"))
}

fn silent(files: &Files, why: &str) -> ProcessError {
    ProcessError::Silent { volume: files.id, why: why.to_owned(), log: files.log() }
}
