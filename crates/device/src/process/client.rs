//! Starting volume processes and talking to them. All calls block.

use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{LeaseId, VolumeId};
use aquifer_pool::LeaseTarget;

use super::ProcessError;
pub use super::clean_up::clean_up;
use super::message::{KEEP, Request, Response, Status};
use super::run::Task;
use super::spec::{Files, Locked, SUBCOMMAND, VolumeRecord, VolumeSpec};
use super::swap_off;
use crate::swap::{self, SwapError};

/// How long a volume process may be silent: longer than the most patient step in it, which is moving an extent.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long a volume process may take to tell how it is, which waits for nothing.
const STATUS_PATIENCE: Duration = Duration::from_secs(3);

/// How long a volume may take from its start until it is served.
const START_PATIENCE: Duration = Duration::from_secs(60);

/// A volume that is served. Its process takes all away again when this is dropped, or this program ends in whatever way, before
/// the volume is [kept](Started::keep).
#[derive(Debug)]
pub struct Started {
    files: Files,
    record: VolumeRecord,
    /// The process waits for a word by this pipe, or its end.
    pipe: ChildStdin,
}

impl Started {
    /// What is served.
    pub fn record(&self) -> &VolumeRecord {
        &self.record
    }

    /// From now on the volume is served until somebody detaches it.
    pub fn keep(mut self) -> Result<VolumeRecord, ProcessError> {
        let told = self.pipe.write_all(KEEP.as_bytes());
        told.map_err(|error| {
            silent(&self.files, &format!("ended as soon as it served ({error})"))
        })?;
        Ok(self.record)
    }
}

/// Starts a process that serves a volume, waits until it does, and keeps it.
///
/// # Errors
/// As [`start`].
pub fn spawn(program: &Path, spec: &VolumeSpec) -> Result<VolumeRecord, ProcessError> {
    start(program, spec)?.keep()
}

/// Starts a process that serves a volume and waits until it does.
///
/// `program` must be one whose [`SUBCOMMAND`] comes to call [`super::run()`]. When this fails nothing is left of it: a process
/// that was silent for too long takes away what it has made as soon as it can, and this waits for its end.
///
/// # Errors
/// Why it cannot be served; [`ProcessError::Left`] where the process still has not ended.
pub fn start(program: &Path, spec: &VolumeSpec) -> Result<Started, ProcessError> {
    let files = spec.files();
    try_start(program, spec, &files).map_err(|error| match error {
        // One that says why it does not serve has taken all away before.
        ProcessError::Silent { .. } => wait_for_end(&files).err().unwrap_or(error),
        error => error,
    })
}

/// Waits until no process serves the volume, and removes what it has left.
fn wait_for_end(files: &Files) -> Result<(), ProcessError> {
    let deadline = Instant::now() + START_PATIENCE;
    while Locked::is_taken(files) {
        if Instant::now() > deadline {
            let pid =
                files.read().ok().flatten().map_or("?".to_owned(), |record| record.pid.to_string());
            let why = format!(
                "its process ({pid}) did not serve it in time and does not end either; end that"
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
    let path = files.log();
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&path)
        .map_err(ProcessError::io(format!("cannot open the log {}", path.display())))?;
    let fail =
        || ProcessError::io(format!("cannot start a volume process with {}", program.display()));
    let mut task = serde_json::to_vec(&Task::Serve(Box::new(spec.clone())))
        .map_err(|error| fail()(error.into()))?;
    task.push(b'\n');
    let mut child = Command::new(program)
        .arg(SUBCOMMAND)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(fail())?;
    let pipe = child.stdin.take().ok_or_else(|| fail()(io::ErrorKind::BrokenPipe.into()));
    let told = pipe.and_then(|mut pipe| pipe.write_all(&task).map(|()| pipe).map_err(fail()));
    let first = child.stdout.take().map(first_line);
    // What is waited for is the process that has forked off the one that serves.
    child.wait().map_err(fail())?;
    let pipe = told?;
    match first.transpose().map_err(fail())?.flatten().map(|line| serde_json::from_str(&line)) {
        Some(Ok(Response::Status(status))) => {
            Ok(Started { files: files.clone(), record: status.record, pipe })
        }
        Some(Ok(Response::Failed { error })) => Err(ProcessError::Refused(error)),
        Some(_) => Err(silent(files, "did not say that it serves")),
        None => Err(silent(files, "ended, or did not serve in time")),
    }
}

/// The first line that the process prints; none where it ends before, or takes too long.
fn first_line(output: ChildStdout) -> io::Result<Option<String>> {
    let (lines, first) = mpsc::channel();
    thread::Builder::new().name("volume-start".to_owned()).spawn(move || {
        // Nobody waits for it any more when it took too long.
        let _ = lines.send(BufReader::new(output).lines().next().transpose());
    })?;
    first.recv_timeout(START_PATIENCE).unwrap_or(Ok(None))
}

/// All volumes under a state directory, served or left behind.
pub fn list(state: &Path) -> Result<Vec<VolumeId>, ProcessError> {
    let files = Files::all(state)
        .map_err(ProcessError::io(format!("cannot list volumes in {}", state.display())))?;
    Ok(files.into_iter().map(|files| files.id).collect())
}

/// Whether a process serves the volume; if not, [`clean_up`] removes what one left.
pub fn is_alive(state: &Path, volume: VolumeId) -> bool {
    Locked::is_taken(&Files::new(state, volume))
}

/// What the process of a volume was told, and what came of it.
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

/// How a volume is.
pub fn status(state: &Path, volume: VolumeId) -> Result<Status, ProcessError> {
    let files = Files::new(state, volume);
    match ask(&files, &Request::Status, STATUS_PATIENCE, |_| ())? {
        Response::Status(status) => Ok(*status),
        other => Err(unexpected(&files, &other)),
    }
}

/// Lays a volume over one more lease.
pub fn add_lease(state: &Path, volume: VolumeId, lease: LeaseTarget) -> Result<(), ProcessError> {
    done(&Files::new(state, volume), &Request::AddLease { lease: Box::new(lease) }, |_| ())
}

/// Moves everything off a lease and gives it up, while I/O goes on.
pub fn evacuate(
    state: &Path,
    volume: VolumeId,
    lease: LeaseId,
    mut progress: impl FnMut(aquifer_pool::Progress),
) -> Result<(), ProcessError> {
    done(&Files::new(state, volume), &Request::Evacuate { lease }, |response| {
        if let Response::Evacuating(now) = response {
            progress(now);
        }
    })
}

/// Turns swap off, takes the device away and waits until the process has ended; its log goes, too. Where this fails the
/// volume is still served.
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

/// Turns off swap on a device that no volume process serves, by a process of its own: the kernel ends the one that does it when
/// memory runs out meanwhile. `program` is as for [`spawn`].
///
/// # Errors
/// If what is swapped out does not fit into memory, or the kernel refuses; swap is still on then.
pub fn swap_off(
    program: &Path,
    device: &Path,
    progress: impl FnMut(swap::Progress),
) -> Result<(), SwapError> {
    let mut helper = Command::new(program);
    helper.arg(SUBCOMMAND);
    swap_off::by_helper(helper, device, progress)
}

fn done(
    files: &Files,
    request: &Request,
    progress: impl FnMut(Response),
) -> Result<(), ProcessError> {
    match ask(files, request, PATIENCE, progress)? {
        Response::Done => Ok(()),
        other => Err(unexpected(files, &other)),
    }
}

/// Asks, passes progress on, and returns the last answer, unless it is that it failed.
fn ask(
    files: &Files,
    request: &Request,
    patience: Duration,
    mut progress: impl FnMut(Response),
) -> Result<Response, ProcessError> {
    let mut stream = open(files)?;
    let broken = |error: io::Error| silent(files, &format!("broke off the conversation ({error})"));
    let mut line = serde_json::to_vec(request).map_err(|error| broken(error.into()))?;
    line.push(b'\n');
    stream.set_read_timeout(Some(patience)).map_err(broken)?;
    stream.write_all(&line).map_err(broken)?;
    let mut lines = BufReader::new(stream).lines();
    while let Some(line) = lines.next() {
        match serde_json::from_str(&line.map_err(broken)?).map_err(|error| broken(error.into()))? {
            Response::Failed { error } => return Err(ProcessError::Refused(error)),
            now @ (Response::SwapOff(_) | Response::Evacuating(_)) => progress(now),
            last => {
                // The end of the connection, which after a detach is that of the process.
                lines.next();
                return Ok(last);
            }
        }
    }
    Err(silent(files, "ended without an answer"))
}

fn open(files: &Files) -> Result<UnixStream, ProcessError> {
    let path = files.socket();
    UnixStream::connect(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            ProcessError::NotServed(files.id)
        }
        _ => ProcessError::io(format!("cannot connect to {}", path.display()))(error),
    })
}

fn unexpected(files: &Files, response: &Response) -> ProcessError {
    silent(files, &format!("gave an answer to another question: {response:?}"))
}

fn silent(files: &Files, why: &str) -> ProcessError {
    ProcessError::Silent { volume: files.id, why: why.to_owned(), log: files.log() }
}
