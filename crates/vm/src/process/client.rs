//! Client functions that start, query, move and stop VMs. All of them block.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_control_socket::{ControlCall, first_word};
use aquifer_page::{Bytes, MigrationId, RegionName};
use aquifer_region::process::client::By;
use aquifer_region::process::{Files as RegionFiles, RegionSpec, client as regions, record};
use rustix::net::sockopt::socket_peercred;
use serde_json::json;

use super::files::Files;
use super::message::{Access, Origin, Record, Request, Response, State, Told, Transit, VmStatus};
pub use super::receiving::receive;
pub use super::release::release;
use super::run::{SUBCOMMAND, remove_region};
use super::side_by_side;
use super::standing;
pub use super::stop::{clear, stop, withdraw};
use super::supervisor_call::{ANSWERING, SILENCE, answer, answers, unexpected};
use crate::definition;
use crate::error::VmError;
use crate::memory::{self, Ballooned, Budget, Limits, Reading, Resized, Share, Times};
use crate::migrate::{self, Arrival, Cpu, HandedOver, MigrationReport, Order, Progress};
use crate::qmp::Qmp;
use crate::spec::{Backing, VmSpec};

/// Timeout of an answer of QEMU, and of a supervisor that only has to exit.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);

/// How long a supervisor may take to clear away the remains of its QEMU.
pub(super) const CLEARING: Duration = Duration::from_secs(40);

/// A VM to start.
#[derive(Clone, Copy, Debug)]
pub struct NewVm<'a> {
    /// The VM.
    pub spec: &'a VmSpec,
    /// The region to make for the VM's memory; `None` if that is RAM of this host.
    pub memory: Option<&'a RegionSpec>,
    /// The limits of the memory.
    pub limits: &'a Limits,
    /// The file that defines the VM, which the caller holds meanwhile; `None` for a transient VM.
    pub definition: Option<&'a Path>,
}

/// Starts a VM whose files are under `run_dir`, and returns its status.
///
/// The supervisor is `program`, whose [`SUBCOMMAND`] must call [`super::run()`]. If this fails,
/// nothing of the VM remains.
///
/// # Errors
/// [`VmError`] if the specification is invalid, the name is in use, memory is short, or the
/// region or QEMU does not start.
pub fn start(
    program: &Path,
    run_dir: &Path,
    NewVm { spec, memory, limits, definition }: NewVm<'_>,
) -> Result<VmStatus, VmError> {
    spec.check()?;
    let files = Files::new(run_dir, &spec.name);
    files.create(&Record::of(spec, definition, None))?;
    let make_region = |memory: Option<&RegionSpec>| {
        memory.map(|memory| regions::create(program, &run_dir.join("regions"), memory)).transpose()
    };
    let started = admit(&files, spec, (memory, spec.memory), limits)
        .and_then(|()| Ok(make_region(memory)?))
        .and_then(|_| start_supervisor(program, &files).inspect_err(|_| _ = remove_region(&files)));
    started.inspect_err(|_| forget(&files))?;
    status(&files)
}

/// Notes the share of this host's memory that a VM of this size gets, which is about to run here.
pub(super) fn admit(
    files: &Files,
    spec: &VmSpec,
    (memory, size): (Option<&RegionSpec>, Bytes),
    limits: &Limits,
) -> Result<(), VmError> {
    files.set_limits(limits)?;
    let mut share = match memory {
        None => Share::local(size),
        Some(memory) if memory.auto => Share::auto(size, spec.max_memory, memory.cache),
        Some(memory) => Share::pool(size, spec.max_memory, memory.cache),
    };
    share.keep(limits.reserve)?;
    Budget::of(files.run_dir()).admit(files.name(), &share)
}

/// Removes the files of a VM that does not run, and its share of the budget.
pub(super) fn forget(files: &Files) {
    files.remove();
    // The budget drops the shares of vanished VMs by itself.
    let _ = Budget::of(files.run_dir()).forget(files.name());
}

/// Adopts a VM that another program started, so that Aquifer can resize it. `qmp` is its monitor,
/// which no other client may hold for long; `agent` is the port to its agent, if it has one.
///
/// # Errors
/// [`VmError`] if QEMU cannot be reached, the VM cannot be resized, or the VM has more memory
/// than is free for guests.
pub fn adopt(
    program: &Path,
    run_dir: &Path,
    name: &RegionName,
    (qmp, agent): (&Path, Option<&Path>),
    limits: &Limits,
) -> Result<VmStatus, VmError> {
    let pid = peer(qmp).map_err(VmError::io(format!("cannot reach QEMU at {}", qmp.display())))?;
    let reading = memory::look(qmp)?;
    let files = Files::new(run_dir, name);
    let origin = Origin::Adopted { qmp: qmp.to_owned(), agent: agent.map(Path::to_owned) };
    files.create(&Record { pid: Some(pid), ..Record::new(origin) })?;
    let links = [(files.control(), Some(qmp)), (files.mover(), Some(qmp)), (files.agent(), agent)];
    let adopted = links
        .iter()
        .try_for_each(|(here, there)| there.map_or(Ok(()), |there| symlink(there, here)))
        .map_err(VmError::io(format!("cannot create the files of VM '{name}'")))
        .and_then(|()| files.set_limits(limits))
        .and_then(|()| {
            let mut share = Share::local(reading.size);
            share.keep(limits.reserve)?;
            Budget::of(run_dir).admit(name, &share)
        })
        .and_then(|()| start_supervisor(program, &files));
    adopted.inspect_err(|_| forget(&files))?;
    status(&files)
}

/// Returns the process that listens at a socket.
fn peer(socket: &Path) -> io::Result<u32> {
    let stream = ControlCall::connect(socket, "connect", TIMEOUT)?.into_stream()?;
    let credentials = socket_peercred(&stream)?;
    Ok(credentials.pid.as_raw_nonzero().get() as u32)
}

/// Sets the limits of a VM's memory.
///
/// # Errors
/// [`VmError`] if the limits contradict each other, or the reserve is more than is free.
pub fn limit(files: &Files, limits: &Limits) -> Result<(), VmError> {
    files.read()?;
    limits.validate().map_err(|error| VmError::Misuse(error.to_string()))?;
    Budget::of(files.run_dir()).promise(files.name(), limits.reserve)?;
    files.set_limits(limits)
}

/// Resizes a VM's memory, and tells `tell` its size meanwhile. If the caller ends while it waits,
/// the VM stays at the size reached.
///
/// A VM whose supervisor was killed gets another one: `program`, as in [`start`].
///
/// # Errors
/// [`VmError`] if the VM belongs to another host, QEMU exits, or the supervisor refuses or does
/// not answer. A resize that stops short is not an error: [`Resized`] says so.
pub fn resize(
    program: &Path,
    files: &Files,
    order: &memory::Order,
    mut tell: impl FnMut(Bytes),
) -> Result<Resized, VmError> {
    let record = files.read()?;
    if let Some(handed_over) = record.handed_over {
        return Err(VmError::HandedOver { name: files.name().clone(), to: handed_over.to });
    }
    let request = Request::Resize(order.clone());
    let begin = || {
        if record.pid.is_some() && files.is_running() && !files.is_supervised() {
            start_supervisor(program, files)?;
        }
        let mut next = answers(files, &request, SILENCE + order.retry)?;
        next().map(|told| (told, next))
    };
    let ended = |error| match files.is_running() {
        true => error,
        false => VmError::Ended { name: files.name().clone(), log: files.log() },
    };
    let begun = match begin() {
        // It was about to end, and read no request any more.
        Err(VmError::Unsupervised { .. }) => {
            let _ = wait_until(TIMEOUT, || !files.is_supervised());
            begin()
        }
        begun => begun,
    };
    let (mut told, mut next) = begun.map_err(ended)?;
    loop {
        match told {
            Told::Has { size } => tell(size),
            Told::Resized(resized) => return Ok(*resized),
            other => return Err(unexpected(other)),
        }
        told = next().map_err(ended)?;
    }
}

/// Returns the VM whose memory is this region.
pub fn of_region(run_dir: &Path, region: &RegionName) -> Option<Files> {
    let files = Files::new(run_dir, region);
    let record = files.read().ok()?;
    in_a_region(&record.origin).is_some().then_some(files)
}

/// Sets the local cache of a VM whose memory is a region.
///
/// # Errors
/// [`VmError::NoRoom`]; [`VmError::Misuse`] if the VM's memory is no region.
pub fn resize_cache(files: &Files, cache: Bytes, by: By) -> Result<(), VmError> {
    let region = region_of(files)?;
    let budget = Budget::of(files.run_dir());
    let before = regions::record(&region)?.cache;
    // The budget never notes less than the VM has.
    budget.cache_and_before(files.name(), cache, by)?;
    let resized = regions::resize_cache(&region, cache, by);
    // An engine may keep a limit that it has not reached, and another party may have set one.
    let now = regions::record(&region)?;
    let most = if resized.is_ok() { now.cache } else { now.cache.max(before) };
    budget.cache(files.name(), most, if now.auto { By::Agent } else { By::Operator })?;
    Ok(resized?)
}

/// Lets the host's agent choose the local cache of a VM from now on.
///
/// # Errors
/// As [`resize_cache`].
pub fn adapt_cache(files: &Files) -> Result<(), VmError> {
    let region = region_of(files)?;
    regions::adapt_cache(&region)?;
    let cache = regions::record(&region)?.cache;
    Budget::of(files.run_dir()).cache(files.name(), cache, By::Agent)
}

fn region_of(files: &Files) -> Result<RegionFiles, VmError> {
    if in_a_region(&files.read()?.origin).is_none() {
        let why = "the VM has no cache: it has '--cache none' or huge pages";
        return Err(VmError::Misuse(why.to_owned()));
    }
    Ok(files.region())
}

/// Returns the state of a VM's memory, for a balancer.
///
/// # Errors
/// [`VmError`] if the supervisor reports an error or does not answer.
pub fn reading(files: &Files) -> Result<Reading, VmError> {
    match answer(files, &Request::Reading, ANSWERING)? {
        Told::Reading(reading) => Ok(reading),
        other => Err(unexpected(other)),
    }
}

/// Returns the state of a VM's balloon, after setting it to leave the guest `target` if given. A VM
/// in migration ignores `target`.
///
/// # Errors
/// [`VmError`] if the supervisor reports an error or does not answer.
pub fn balloon(files: &Files, target: Option<Bytes>) -> Result<Ballooned, VmError> {
    match answer(files, &Request::Balloon { target }, ANSWERING)? {
        Told::Balloon(ballooned) => Ok(ballooned),
        other => Err(unexpected(other)),
    }
}

/// Returns the most that a VM that does not answer may hold; `None` for an adopted VM.
///
/// # Errors
/// [`VmError`] if its record or its limits cannot be read.
pub fn ballooned_at_most(files: &Files) -> Result<Option<Ballooned>, VmError> {
    match files.read()?.origin {
        Origin::Started(spec) => Ok(Some(Ballooned::within(spec.max_memory, &files.limits()?))),
        Origin::Adopted { .. } => Ok(None),
    }
}

/// Returns how long the stages of a VM's resizes took.
///
/// # Errors
/// [`VmError::Io`] if the file cannot be read.
pub fn times(files: &Files) -> Result<Times, VmError> {
    let path = files.times();
    let read = record::read(&path).map_err(VmError::io(format!("cannot read {}", path.display())));
    Ok(read?.unwrap_or_default())
}

/// Starts another supervisor for a VM that runs without one.
///
/// # Errors
/// [`VmError::Reported`] if it does not start, and no other one did meanwhile.
pub fn supervise(program: &Path, files: &Files) -> Result<(), VmError> {
    start_supervisor(program, files).map(drop)
}

/// Starts a VM's supervisor; returns the address at which it waits for an arriving VM, if it does.
pub(super) fn start_supervisor(
    program: &Path,
    files: &Files,
) -> Result<Option<SocketAddr>, VmError> {
    let fail = || VmError::io(format!("cannot start {}", program.display()));
    let mut supervisor = Command::new(program);
    supervisor.args(SUBCOMMAND).stdin(Stdio::null());
    supervisor.args([files.run_dir().as_os_str(), files.name().as_str().as_ref()]);
    let mut supervisor = first_word::spawn(&mut supervisor, &files.log()).map_err(fail())?;
    let error = match first_word::heard(&mut supervisor, first_word::TIMEOUT).map_err(fail())? {
        Some(Response::Started) => return Ok(None),
        Some(Response::Awaits { address }) => return Ok(Some(address)),
        Some(Response::Failed { error }) => error,
        None => "the VM's supervisor exited before the VM ran".to_owned(),
    };
    let _ = supervisor.wait();
    if files.is_supervised() {
        // Another process has started one meanwhile.
        return Ok(None);
    }
    Err(VmError::Reported(error))
}

/// Describes a VM and its memory for another host.
///
/// # Errors
/// [`VmError::HandedOver`] if the VM belongs to another host; [`VmError::Misuse`] if it cannot
/// move.
pub fn offer(files: &Files) -> Result<Arrival, VmError> {
    let record = files.read()?;
    if let Some(handed_over) = record.handed_over {
        return Err(VmError::HandedOver { name: files.name().clone(), to: handed_over.to });
    }
    let vm = standing::movable(&record)
        .and_then(|vm| standing::dirty(files.run_dir(), files.name()).map(|_| vm.clone()))
        .map_err(|obstacle| VmError::Misuse(format!("cannot migrate the VM: {obstacle}")))?;
    let (memory, limits) = (regions::record(&files.region())?.for_another_host(), files.limits()?);
    let noted = Budget::of(files.run_dir()).accounts()?.vms.remove(files.name());
    let size = noted.map_or(vm.max_memory, |share| share.memory());
    let cpu = match vm.processors.whole_cpu() {
        Some(model) => Some(Cpu::of(&mut Qmp::connect(&files.control(), ANSWERING)?, model)?),
        None => None,
    };
    let (migration, definition) = (MigrationId::random(), definition::text(files)?);
    Ok(Arrival { migration, vm, memory, size, limits, cpu, definition })
}

/// Returns the specification of a VM whose memory is a region.
pub(super) fn in_a_region(origin: &Origin) -> Option<&VmSpec> {
    match origin {
        Origin::Started(vm) if vm.backing == Backing::Region => Some(vm),
        _ => None,
    }
}

/// Moves a VM to the host that awaits it, and tells `tell` the progress. The migration is cancelled
/// if the caller dies or `tell` returns false.
///
/// # Errors
/// [`VmError`] if the migration fails or is cancelled. The VM is here and unchanged, unless the
/// error says otherwise.
pub fn migrate(
    files: &Files,
    order: &Order,
    mut tell: impl FnMut(&Progress) -> bool,
) -> Result<MigrationReport, VmError> {
    let mut next = answers(files, &Request::Migrate(Box::new(order.clone())), SILENCE)?;
    loop {
        match next()? {
            Told::Progress(progress) => {
                if !tell(&progress) {
                    // Once the VM is handed over, the supervisor completes the migration without
                    // this caller.
                    return Err(match files.read()?.handed_over {
                        Some(handed_over) => {
                            VmError::HandedOver { name: files.name().clone(), to: handed_over.to }
                        }
                        None => VmError::Cancelled,
                    });
                }
            }
            Told::Moved(report) => {
                // Wait until its files are gone, so that the VM can come back at once.
                let _ = wait_until(CLEARING, || matches!(files.read(), Err(VmError::Unknown(_))));
                return Ok(report);
            }
            Told::Cancelled => return Err(VmError::Cancelled),
            other => return Err(unexpected(other)),
        }
    }
}

/// Cancels a VM's migration; returns when the VM runs here again.
///
/// # Errors
/// [`VmError::Reported`] if the VM is not in migration, or already belongs to the other host.
pub fn cancel(files: &Files) -> Result<(), VmError> {
    match answer(files, &Request::Cancel, SILENCE)? {
        Told::Cancelled => Ok(()),
        other => Err(unexpected(other)),
    }
}

/// The outcome of [`resume`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// The VM runs here.
    Runs,
    /// The VM belongs to another host; a supervisor here sends it the rest of its memory.
    Sends,
}

/// Resumes a VM that is paused, or whose migration was cut off. A VM whose supervisor was killed
/// gets another one: `program`, as in [`start`].
///
/// # Errors
/// [`VmError::Incoming`] or [`VmError::HandedOver`] if another host may own the VM and `force` is
/// not set; [`VmError::Misuse`] while the VM is still arriving.
pub fn resume(program: &Path, files: &Files, force: bool) -> Result<Resumed, VmError> {
    let record = files.read()?;
    match (record.incoming, record.handed_over) {
        (Some(incoming), _) if !incoming.prepared => {
            return Err(VmError::Misuse(format!(
                "the VM is still arriving from host {}. If that migration was cut off, remove its \
                 remains with 'aquifer vm stop {} --force'",
                incoming.from,
                files.name()
            )));
        }
        (Some(incoming), _) if !force => {
            return Err(VmError::Incoming { name: files.name().clone(), from: incoming.from });
        }
        (Some(_), _) => {
            files.take_over()?;
            if files.is_supervised() {
                // The supervisor sees the changed record and resumes the VM.
                return wait_until(TIMEOUT, || runs(files)).map(|()| Resumed::Runs).map_err(|()| {
                    VmError::Reported(format!("VM '{}' did not resume", files.name()))
                });
            }
        }
        (None, Some(HandedOver { left_at_source: Some(_), .. }))
            if !force && !files.is_supervised() =>
        {
            // The new supervisor sends the memory that was left behind.
            start_supervisor(program, files)?;
            return Ok(Resumed::Sends);
        }
        (None, Some(handed_over)) if !force => {
            return Err(VmError::HandedOver { name: files.name().clone(), to: handed_over.to });
        }
        (None, Some(_)) => files.set_handed_over(None)?,
        (None, None) => {}
    }
    let awaiting_source = files.read()?.awaiting_source;
    if awaiting_source.is_some() && !files.is_supervised() {
        // QEMU may block on pages that only a supervisor fetches.
        start_supervisor(program, files)?;
    }
    migrate::resume(files, true)?;
    definition::settle(files);
    if !files.is_supervised() {
        start_supervisor(program, files)?;
    }
    Ok(Resumed::Runs)
}

fn runs(files: &Files) -> bool {
    status(files).is_ok_and(|status| status.state == State::Qemu("running".to_owned()))
}

/// Lists the VMs under `run_dir`.
///
/// # Errors
/// [`VmError::Io`] if the directory cannot be read.
pub fn list(run_dir: &Path) -> Result<Vec<Files>, VmError> {
    Files::all(run_dir)
        .map_err(VmError::io(format!("cannot list the VMs in {}", run_dir.display())))
}

/// A VM's name, and its status or the error that prevents it.
pub type NamedStatus = (RegionName, Result<VmStatus, VmError>);

/// Returns the status of all VMs under `run_dir`, which are queried in parallel.
///
/// # Errors
/// [`VmError::Io`] if the directory cannot be read.
pub fn statuses(run_dir: &Path) -> Result<Vec<NamedStatus>, VmError> {
    Ok(side_by_side(list(run_dir)?, |files| (files.name().clone(), status(&files))))
}

/// Returns the status of a VM.
///
/// # Errors
/// [`VmError`] if its files cannot be read.
pub fn status(files: &Files) -> Result<VmStatus, VmError> {
    let Record { origin, pid, node, ended, incoming, handed_over, awaiting_source, .. } =
        files.read()?;
    let asked = Qmp::connect(&files.control(), ANSWERING)
        .and_then(|mut qmp| qmp.execute("query-status", json!({})));
    let state = match asked {
        Ok(answer) => State::Qemu(answer["status"].as_str().unwrap_or("unknown").to_owned()),
        Err(_) if pid.is_none() && files.is_supervised() => State::Qemu("starting".to_owned()),
        // QEMU may block on a page of the guest's memory.
        Err(_) if files.is_running() => State::Qemu("unresponsive".to_owned()),
        Err(error) => State::Ended(ended.unwrap_or_else(|| error.to_string())),
    };
    let region = regions::status(&files.region()).ok();
    let (qmp, serial, console) = match &origin {
        Origin::Started(_) => (files.qmp(), Some(files.serial()), Some(files.console())),
        Origin::Adopted { qmp, .. } => (qmp.clone(), None, None),
    };
    let access = Access { qmp, serial, console, log: files.log() };
    let transit = Transit { incoming, handed_over, awaiting_source };
    let share = Budget::of(files.run_dir()).accounts()?.vms.remove(files.name());
    let (name, limits, host) = (files.name().clone(), files.limits()?, memory::resident(files));
    Ok(VmStatus { name, origin, share, limits, host, state, pid, node, access, transit, region })
}

pub(super) fn wait_until(timeout: Duration, condition: impl Fn() -> bool) -> Result<(), ()> {
    let deadline = Instant::now() + timeout;
    while !condition() {
        if Instant::now() > deadline {
            return Err(());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
