//! Starting VMs, asking about them and stopping them. All calls block.

use std::fs::OpenOptions;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::MigrationId;
use aquifer_region::process::{RegionSpec, client as regions, first_word};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::files::Files;
use super::meminfo;
use super::message::{Record, Request, Response, State, Status, Told};
use super::run::{SUBCOMMAND, remove_region};
use crate::error::GuestError;
use crate::migrate::{self, Arrival, Awaited, Given, Order, Progress, Report};
use crate::qmp::Qmp;
use crate::spec::VmSpec;

/// How long QEMU may think about an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a keeper may take to clear away what its QEMU has left.
const CLEARING: Duration = Duration::from_secs(40);

/// How long a QEMU may take to end that is to end at once.
const ENDING: Duration = Duration::from_secs(3);

/// How long a QEMU may take to start.
const STARTING: Duration = Duration::from_secs(60);

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
    files.create(&Record::of(spec, None))?;
    let started = regions::create(program, &run_dir.join("regions"), memory)
        .map_err(GuestError::from)
        .and_then(|_| keeper(program, &files).inspect_err(|_| _ = remove_region(&files)));
    started.inspect_err(|_| files.remove())?;
    status(&files)
}

/// Has a VM be waited for that is to come from another host, and says at which address. It is gone again if it does not come.
///
/// # Errors
/// [`GuestError`]: what this host lacks to take it.
pub fn receive(
    program: &Path,
    run_dir: &Path,
    arrival: &Arrival,
    awaited: Awaited,
) -> Result<SocketAddr, GuestError> {
    let Arrival { vm, memory, .. } = arrival;
    vm.check()?;
    if vm.name != memory.name || vm.memory != memory.size {
        return Err(GuestError::Misuse("the region that is offered is not the VM's".to_owned()));
    }
    let spare = meminfo::available().map_err(GuestError::io("cannot read /proc/meminfo"))?;
    if memory.cache > spare {
        return Err(GuestError::Misuse(format!(
            "the VM's local cache would be {}, and there are {spare} here: give it less by --cache",
            memory.cache
        )));
    }
    let files = Files::new(run_dir, &vm.name);
    files.create(&Record::of(vm, Some(awaited)))?;
    let started = regions::create_foreign(program, &run_dir.join("regions"), memory)
        .map_err(GuestError::from)
        .and_then(|_| keeper(program, &files).inspect_err(|_| _ = remove_region(&files)))
        .and_then(|address| {
            address.ok_or_else(|| GuestError::Keeper("its keeper does not wait for it".to_owned()))
        });
    started.inspect_err(|_| files.remove())
}

/// Starts a VM's keeper; says where it waits for the VM, if it does.
fn keeper(program: &Path, files: &Files) -> Result<Option<SocketAddr>, GuestError> {
    let fail = || GuestError::io(format!("cannot start {}", program.display()));
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(files.log()).map_err(fail())?;
    let mut keeper = Command::new(program)
        .arg(SUBCOMMAND)
        .args([files.run_dir().as_os_str(), files.name().as_str().as_ref()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(fail())?;
    let error = match first_word::heard(&mut keeper).map_err(fail())? {
        Some(Response::Started) => return Ok(None),
        Some(Response::Awaits { address }) => return Ok(Some(address)),
        Some(Response::Failed { error }) => error,
        None => "its keeper ended before it ran".to_owned(),
    };
    let _ = keeper.wait();
    Err(GuestError::Keeper(error))
}

/// What a VM and its memory are like, for another host.
///
/// # Errors
/// [`GuestError`].
pub fn offer(files: &Files) -> Result<Arrival, GuestError> {
    let record = files.read()?;
    if let Some(given) = record.given {
        return Err(GuestError::Given { name: files.name().clone(), to: given.to });
    }
    let memory = regions::record(&files.region())?;
    Ok(Arrival { migration: MigrationId::random(), vm: record.spec, memory })
}

/// Moves a VM to the host where it is waited for, and tells of progress meanwhile. A caller that dies, or whose `tell` says no, cancels it.
///
/// # Errors
/// [`GuestError`]. The VM is here and as it was, unless that says otherwise.
pub fn migrate(
    files: &Files,
    order: &Order,
    mut tell: impl FnMut(&Progress) -> bool,
) -> Result<Report, GuestError> {
    let stream = asked(files, &Request::Migrate(Box::new(order.clone())))?;
    let fail = || GuestError::io(format!("the keeper of VM '{}' does not answer", files.name()));
    for line in BufReader::new(&stream).lines() {
        match serde_json::from_str(&line.map_err(fail())?).map_err(|error| fail()(error.into()))? {
            Told::Progress(progress) => {
                if !tell(&progress) {
                    // From some moment on it goes on without who asked.
                    return Err(match files.read()?.given {
                        Some(given) => GuestError::Given { name: files.name().clone(), to: given.to },
                        None => GuestError::Cancelled,
                    });
                }
            }
            Told::Moved(report) => {
                // So that it can come back at once.
                let _ = wait_until(CLEARING, || matches!(files.read(), Err(GuestError::Unknown(_))));
                return Ok(report);
            }
            Told::Failed { error } => return Err(GuestError::Keeper(error)),
            Told::Cancelled => return Err(GuestError::Cancelled),
        }
    }
    Err(fail()(io::ErrorKind::UnexpectedEof.into()))
}

/// Asks a VM's keeper.
fn asked(files: &Files, request: &Request) -> Result<UnixStream, GuestError> {
    files.read()?;
    let fail = || GuestError::io(format!("the keeper of VM '{}' does not answer", files.name()));
    let mut stream = UnixStream::connect(files.keeper()).map_err(fail())?;
    let mut line = serde_json::to_vec(request).map_err(|error| fail()(error.into()))?;
    line.push(b'\n');
    stream.write_all(&line).map_err(fail())?;
    Ok(stream)
}

/// Has a VM stay that is being moved; returns when it is as it was.
///
/// # Errors
/// It is not being moved, or is the other host's already.
pub fn cancel(files: &Files) -> Result<(), GuestError> {
    let fail = || GuestError::io(format!("the keeper of VM '{}' does not answer", files.name()));
    let mut line = String::new();
    BufReader::new(asked(files, &Request::Cancel)?).read_line(&mut line).map_err(fail())?;
    match serde_json::from_str(&line).map_err(|error| fail()(error.into()))? {
        Told::Cancelled => Ok(()),
        Told::Failed { error } => Err(GuestError::Keeper(error)),
        other => Err(GuestError::Keeper(format!("it says {other:?}"))),
    }
}

/// What became of a VM that was to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// It runs.
    Runs,
    /// It is another host's, and what was left here of its memory is sent there.
    Sends,
}

/// Has a VM go on that stands still: because it is paused, or because its move to another host or from there was cut off. One whose keeper was
/// killed gets another: `program`, as in [`start`].
///
/// # Errors
/// [`GuestError`]: where it may be another host's, and `force` does not say that it is not.
pub fn resume(program: &Path, files: &Files, force: bool) -> Result<Resumed, GuestError> {
    let record = files.read()?;
    match (record.awaited, record.given) {
        (Some(awaited), _) if !awaited.prepared => {
            return Err(GuestError::Misuse(format!(
                "the VM is still on its way from host {}, or was when that was cut off: 'aquifer vm stop {} --force' removes what is left here",
                awaited.from,
                files.name()
            )));
        }
        (Some(awaited), _) if !force => {
            return Err(GuestError::Awaited { name: files.name().clone(), from: awaited.from });
        }
        (Some(_), _) => {
            files.take_over()?;
            if files.is_kept() {
                // Its keeper does the rest.
                return wait_until(PATIENCE, || runs(files))
                    .map(|()| Resumed::Runs)
                    .map_err(|()| GuestError::Keeper(format!("VM '{}' does not go on", files.name())));
            }
        }
        (None, Some(Given { left: Some(_), .. })) if !force && !files.is_kept() => {
            // Who takes its keeper's place sends what was left here.
            keeper(program, files)?;
            return Ok(Resumed::Sends);
        }
        (None, Some(given)) if !force => {
            return Err(GuestError::Given { name: files.name().clone(), to: given.to });
        }
        (None, Some(_)) => files.give_away(None)?,
        (None, None) => {}
    }
    let coming = files.read()?.coming;
    if coming.is_some() && !files.is_kept() {
        // QEMU may wait for what nobody fetches.
        keeper(program, files)?;
    }
    migrate::resume(files, true)?;
    if !files.is_kept() {
        keeper(program, files)?;
    }
    Ok(Resumed::Runs)
}

fn runs(files: &Files) -> bool {
    status(files).is_ok_and(|status| status.state == State::Qemu("running".to_owned()))
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
    let Record { spec, pid, ended, awaited, given, coming } = files.read()?;
    let asked =
        Qmp::connect(&files.control(), PATIENCE).and_then(|mut qmp| qmp.execute("query-status", json!({})));
    let state = match asked {
        Ok(answer) => State::Qemu(answer["status"].as_str().unwrap_or("unknown").to_owned()),
        Err(_) if pid.is_none() && files.is_kept() => State::Qemu("starting".to_owned()),
        // It may wait for a page of the guest's memory.
        Err(_) if files.is_running() => State::Qemu("unresponsive".to_owned()),
        Err(error) => State::Ended(ended.unwrap_or_else(|| error.to_string())),
    };
    let region = regions::status(&files.region()).ok();
    let [qmp, serial, console, log] = [files.qmp(), files.serial(), files.console(), files.log()];
    Ok(Status { spec, state, pid, qmp, serial, console, log, awaited, given, coming, region })
}

/// Has the guest power itself off, or QEMU end at once; returns when nothing is left of it. What a QEMU has left that ended by
/// itself is removed.
///
/// # Errors
/// [`GuestError::StillRunning`] if that takes longer than `patience`.
pub fn stop(files: &Files, at_once: bool, patience: Duration) -> Result<(), GuestError> {
    // One that is being started listens in a moment.
    let deadline = Instant::now() + STARTING;
    let qemu = loop {
        let is_starting = files.read()?.pid.is_none() && files.is_kept();
        match Qmp::connect(&files.control(), PATIENCE) {
            Ok(qmp) => break Some(qmp),
            Err(_) if is_starting && Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
            Err(_) => break None,
        }
    };
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
    let _ = wait_until(CLEARING, || !files.is_kept());
    remove_region(files)?;
    files.remove();
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
