//! Starting VMs, asking about them and stopping them. All calls block.

use std::fs::OpenOptions;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, MigrationId, RegionName};
use aquifer_region::process::{ControlCall, RegionSpec, client as regions, first_word, record};
use rustix::net::sockopt::socket_peercred;
use serde_json::json;

use super::files::Files;
use super::keeper_call::{ANSWERING, Answers, SILENCE, answer, unexpected};
use super::message::{Origin, Record, Request, Response, State, Status, Told};
use super::run::{SUBCOMMAND, remove_region};
use super::side_by_side;
pub use super::stop::stop;
use crate::error::GuestError;
use crate::meminfo;
use crate::memory::{self, Ballooned, Budget, Limits, Reading, Resized, Share, Times};
use crate::migrate::{self, Arrival, Awaited, Given, Order, Progress, Report};
use crate::qmp::Qmp;
use crate::spec::{Backing, VmSpec};

/// How long QEMU may think about an answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// How long an attempt to move a VM here that has ended may take to clear away what it has left.
const LONGEST_CLEANUP: Duration = Duration::from_secs(5);

/// How long a keeper may take to clear away what its QEMU has left.
pub(super) const CLEARING: Duration = Duration::from_secs(40);

/// Starts a VM with files under `run_dir`, whose memory is the region of `memory`, which is made for it, or in RAM of this host where that is none,
/// and which is kept within `limits`. Its keeper is `program`, whose [`SUBCOMMAND`] must come to call [`super::run()`]. When this fails nothing is
/// left of it.
///
/// # Errors
/// [`GuestError`].
pub fn start(
    program: &Path,
    run_dir: &Path,
    spec: &VmSpec,
    memory: Option<&RegionSpec>,
    limits: &Limits,
) -> Result<Status, GuestError> {
    spec.check()?;
    let files = Files::new(run_dir, &spec.name);
    files.create(&Record::of(spec, None))?;
    let make_region = |memory: Option<&RegionSpec>| {
        memory.map(|memory| regions::create(program, &run_dir.join("regions"), memory)).transpose()
    };
    let started = admit(&files, spec, memory, limits)
        .and_then(|()| Ok(make_region(memory)?))
        .and_then(|_| keeper(program, &files).inspect_err(|_| _ = remove_region(&files)));
    started.inspect_err(|_| forget(&files))?;
    status(&files)
}

/// Notes what a VM has of this host's memory that is about to run here.
fn admit(
    files: &Files,
    spec: &VmSpec,
    memory: Option<&RegionSpec>,
    limits: &Limits,
) -> Result<(), GuestError> {
    files.set_limits(limits)?;
    let mut share = match memory {
        None => Share::local(spec.memory),
        Some(memory) => Share::pool(spec.memory, spec.max_memory, memory.cache),
    };
    share.keep(limits.reserve)?;
    Budget::of(files.run_dir()).admit(files.name(), &share)
}

/// Removes what is left of a VM that does not run.
pub(super) fn forget(files: &Files) {
    files.remove();
    // What a VM has that is not there is found to be free.
    let _ = Budget::of(files.run_dir()).forget(files.name());
}

/// Has a VM that somebody else has started be resized here, by its monitor at `qmp`, which nobody else is at for long, and the port of its agent,
/// if it has one.
///
/// # Errors
/// [`GuestError`]: it cannot be reached, cannot be resized, or has more than is free of the memory set aside for guests.
pub fn adopt(
    program: &Path,
    run_dir: &Path,
    name: &RegionName,
    (qmp, agent): (&Path, Option<&Path>),
    limits: &Limits,
) -> Result<Status, GuestError> {
    let pid =
        peer(qmp).map_err(GuestError::io(format!("cannot reach a QEMU at {}", qmp.display())))?;
    let reading = memory::look(qmp)?;
    let files = Files::new(run_dir, name);
    let origin = Origin::Adopted { qmp: qmp.to_owned(), agent: agent.map(Path::to_owned) };
    files.create(&Record { pid: Some(pid), ..Record::new(origin) })?;
    let links = [(files.control(), Some(qmp)), (files.mover(), Some(qmp)), (files.agent(), agent)];
    let adopted = links
        .iter()
        .try_for_each(|(here, there)| there.map_or(Ok(()), |there| symlink(there, here)))
        .map_err(GuestError::io(format!("cannot keep files of VM '{name}'")))
        .and_then(|()| files.set_limits(limits))
        .and_then(|()| {
            let mut share = Share::local(reading.size);
            share.keep(limits.reserve)?;
            Budget::of(run_dir).admit(name, &share)
        })
        .and_then(|()| keeper(program, &files));
    adopted.inspect_err(|_| forget(&files))?;
    status(&files)
}

/// The process that listens at a socket.
fn peer(socket: &Path) -> io::Result<u32> {
    let stream = ControlCall::connect(socket, "connect", PATIENCE)?.into_stream()?;
    let credentials = socket_peercred(&stream)?;
    Ok(credentials.pid.as_raw_nonzero().get() as u32)
}

/// Has a VM that was adopted be as if it had never been: it runs on.
///
/// # Errors
/// It was not adopted.
pub fn release(files: &Files) -> Result<(), GuestError> {
    if !matches!(files.read()?.origin, Origin::Adopted { .. }) {
        let why = format!("the VM was started here: 'aquifer vm stop {}' ends it", files.name());
        return Err(GuestError::Misuse(why));
    }
    if files.is_kept() {
        // It ends without an answer.
        let _ = Answers::to(files, &Request::Release, PATIENCE)?.next();
        wait_until(CLEARING, || !files.is_kept()).map_err(|()| {
            let why =
                format!("the keeper of VM '{}' has not ended within {CLEARING:?}", files.name());
            GuestError::Keeper(why)
        })?;
    }
    forget(files);
    Ok(())
}

/// Keeps a VM's memory within these from now on.
///
/// # Errors
/// [`GuestError`]: they contradict each other, or its reserve is more than is free.
pub fn limit(files: &Files, limits: &Limits) -> Result<(), GuestError> {
    files.read()?;
    limits.validate().map_err(|error| GuestError::Misuse(error.to_string()))?;
    Budget::of(files.run_dir()).promise(files.name(), limits.reserve)?;
    files.set_limits(limits)
}

/// Resizes a VM's memory, and tells what it has meanwhile. Who ends while it waits has the VM stay at what it has got. A VM whose keeper was killed gets
/// another: `program`, as in [`start`].
///
/// # Errors
/// [`GuestError`]. Where the VM has got a part of the way that is no error: [`Resized`] says so.
pub fn resize(
    program: &Path,
    files: &Files,
    order: &memory::Order,
    mut tell: impl FnMut(Bytes),
) -> Result<Resized, GuestError> {
    let record = files.read()?;
    if let Some(given) = record.given {
        return Err(GuestError::Given { name: files.name().clone(), to: given.to });
    }
    if record.pid.is_some() && files.is_running() && !files.is_kept() {
        keeper(program, files)?;
    }
    let silence = SILENCE + order.retry;
    let mut answers = Answers::to(files, &Request::Resize(order.clone()), silence)?;
    loop {
        match answers.next() {
            Ok(Told::Has { size }) => tell(size),
            Ok(Told::Resized(resized)) => return Ok(*resized),
            Ok(other) => return Err(unexpected(other)),
            Err(_) if !files.is_running() => {
                return Err(GuestError::Ended { name: files.name().clone(), log: files.log() });
            }
            Err(error) => return Err(error),
        }
    }
}

/// The VM whose memory a region is.
pub fn of_region(run_dir: &Path, region: &RegionName) -> Option<Files> {
    let files = Files::new(run_dir, region);
    let record = files.read().ok()?;
    in_a_region(&record.origin).is_some().then_some(files)
}

/// Has a VM whose memory is in the pool have so much of it in local RAM.
///
/// # Errors
/// [`GuestError::NoRoom`]; and where its memory is not in the pool.
pub fn resize_cache(files: &Files, cache: Bytes) -> Result<(), GuestError> {
    if in_a_region(&files.read()?.origin).is_none() {
        return Err(GuestError::Misuse(
            "the VM's memory is in local RAM, all of it: it has no cache".to_owned(),
        ));
    }
    let (budget, region) = (Budget::of(files.run_dir()), files.region());
    let before = regions::status(&region)?.usage.cache;
    // What is noted is never less than what it has.
    budget.cache(files.name(), before.max(cache))?;
    let resized = regions::resize_cache(&region, cache);
    budget.cache(files.name(), if resized.is_ok() { cache } else { before })?;
    Ok(resized?)
}

/// How the memory of a VM is, for who balances it with others'.
///
/// # Errors
/// [`GuestError`].
pub fn reading(files: &Files) -> Result<Reading, GuestError> {
    match answer(files, &Request::Reading, ANSWERING)? {
        Told::Reading(reading) => Ok(reading),
        other => Err(unexpected(other)),
    }
}

/// What a VM's balloon leaves it; first, if that is said, it is to leave it so much. (A VM on the move keeps what it has.)
///
/// # Errors
/// [`GuestError`].
pub fn balloon(files: &Files, target: Option<Bytes>) -> Result<Ballooned, GuestError> {
    match answer(files, &Request::Balloon { target }, ANSWERING)? {
        Told::Balloon(ballooned) => Ok(ballooned),
        other => Err(unexpected(other)),
    }
}

/// What a VM that does not answer may hold at most; nothing where somebody else has started it.
///
/// # Errors
/// [`GuestError`]: its record or its limits cannot be read.
pub fn ballooned_at_most(files: &Files) -> Result<Option<Ballooned>, GuestError> {
    match files.read()?.origin {
        Origin::Started(spec) => Ok(Some(Ballooned::within(spec.max_memory, &files.limits()?))),
        Origin::Adopted { .. } => Ok(None),
    }
}

/// How long the stages of a VM's resizes took.
///
/// # Errors
/// Where they cannot be read.
pub fn times(files: &Files) -> Result<Times, GuestError> {
    let path = files.times();
    let read =
        record::read(&path).map_err(GuestError::io(format!("cannot read {}", path.display())));
    Ok(read?.unwrap_or_default())
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
    if vm.name != memory.name || vm.max_memory != memory.size || vm.backing != Backing::Region {
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
    await_place(&files, &Record::of(vm, Some(awaited)))?;
    let started = admit(&files, vm, Some(memory), &arrival.limits)
        .and_then(|()| Ok(regions::create_foreign(program, &run_dir.join("regions"), memory)?))
        .and_then(|_| keeper(program, &files).inspect_err(|_| _ = remove_region(&files)))
        .and_then(|address| {
            address.ok_or_else(|| GuestError::Keeper("its keeper does not wait for it".to_owned()))
        });
    started.inspect_err(|_| forget(&files))
}

/// Makes the record of a VM that is to come. An attempt to move it here that has ended may still be
/// on its way out: its QEMU and its region take a moment.
fn await_place(files: &Files, record: &Record) -> Result<(), GuestError> {
    let deadline = Instant::now() + LONGEST_CLEANUP;
    loop {
        let made = files.create(record);
        let is_here =
            || files.read().is_ok_and(|before| before.awaited.is_none_or(|it| it.prepared));
        if !matches!(made, Err(GuestError::Exists(_))) || is_here() || Instant::now() >= deadline {
            return made;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Starts a VM's keeper; says where it waits for the VM, if it does.
fn keeper(program: &Path, files: &Files) -> Result<Option<SocketAddr>, GuestError> {
    let fail = || GuestError::io(format!("cannot start {}", program.display()));
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(files.log())
        .map_err(fail())?;
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
    let Some(vm) = in_a_region(&record.origin).cloned() else {
        let why = "only a VM whose memory is in the pool can be moved: it was started without --lender, or adopted";
        return Err(GuestError::Misuse(why.to_owned()));
    };
    if !vm.cached_disks.is_empty() {
        let why = "a VM with cached disks cannot be moved: the cache of the other host would read them while they are written here";
        return Err(GuestError::Misuse(why.to_owned()));
    }
    let memory = regions::record(&files.region())?;
    Ok(Arrival { migration: MigrationId::random(), vm, memory, limits: files.limits()? })
}

/// A VM whose memory is in the pool.
fn in_a_region(origin: &Origin) -> Option<&VmSpec> {
    match origin {
        Origin::Started(vm) if vm.backing == Backing::Region => Some(vm),
        _ => None,
    }
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
    let mut answers = Answers::to(files, &Request::Migrate(Box::new(order.clone())), SILENCE)?;
    loop {
        match answers.next()? {
            Told::Progress(progress) => {
                if !tell(&progress) {
                    // From some moment on it goes on without who asked.
                    return Err(match files.read()?.given {
                        Some(given) => {
                            GuestError::Given { name: files.name().clone(), to: given.to }
                        }
                        None => GuestError::Cancelled,
                    });
                }
            }
            Told::Moved(report) => {
                // So that it can come back at once.
                let _ =
                    wait_until(CLEARING, || matches!(files.read(), Err(GuestError::Unknown(_))));
                return Ok(report);
            }
            Told::Cancelled => return Err(GuestError::Cancelled),
            other => return Err(unexpected(other)),
        }
    }
}

/// Has a VM stay that is being moved; returns when it is as it was.
///
/// # Errors
/// It is not being moved, or is the other host's already.
pub fn cancel(files: &Files) -> Result<(), GuestError> {
    // It may take a while.
    match answer(files, &Request::Cancel, SILENCE)? {
        Told::Cancelled => Ok(()),
        other => Err(unexpected(other)),
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
                return wait_until(PATIENCE, || runs(files)).map(|()| Resumed::Runs).map_err(
                    |()| GuestError::Keeper(format!("VM '{}' does not go on", files.name())),
                );
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
    Files::all(run_dir)
        .map_err(GuestError::io(format!("cannot list the VMs in {}", run_dir.display())))
}

/// A VM's name, and how it is or why that cannot be told.
pub type NamedStatus = (RegionName, Result<Status, GuestError>);

/// How the VMs under `run_dir` are, each asked beside the others.
///
/// # Errors
/// Where they cannot be listed.
pub fn statuses(run_dir: &Path) -> Result<Vec<NamedStatus>, GuestError> {
    Ok(side_by_side(list(run_dir)?, |files| (files.name().clone(), status(&files))))
}

/// How a VM is.
///
/// # Errors
/// [`GuestError`].
pub fn status(files: &Files) -> Result<Status, GuestError> {
    let Record { origin, pid, ended, awaited, given, coming } = files.read()?;
    let asked = Qmp::connect(&files.control(), ANSWERING)
        .and_then(|mut qmp| qmp.execute("query-status", json!({})));
    let state = match asked {
        Ok(answer) => State::Qemu(answer["status"].as_str().unwrap_or("unknown").to_owned()),
        Err(_) if pid.is_none() && files.is_kept() => State::Qemu("starting".to_owned()),
        // It may wait for a page of the guest's memory.
        Err(_) if files.is_running() => State::Qemu("unresponsive".to_owned()),
        Err(error) => State::Ended(ended.unwrap_or_else(|| error.to_string())),
    };
    let region = regions::status(&files.region()).ok();
    let (qmp, serial, console) = match &origin {
        Origin::Started(_) => (files.qmp(), Some(files.serial()), Some(files.console())),
        Origin::Adopted { qmp, .. } => (qmp.clone(), None, None),
    };
    let log = files.log();
    let share = Budget::of(files.run_dir()).accounts()?.vms.remove(files.name());
    let (name, limits, host) = (files.name().clone(), files.limits()?, memory::resident(files));
    Ok(Status {
        name,
        origin,
        share,
        limits,
        host,
        state,
        pid,
        qmp,
        serial,
        console,
        log,
        awaited,
        given,
        coming,
        region,
    })
}

pub(super) fn wait_until(patience: Duration, condition: impl Fn() -> bool) -> Result<(), ()> {
    let deadline = Instant::now() + patience;
    while !condition() {
        if Instant::now() > deadline {
            return Err(());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
