//! The supervisor process of a VM: it starts QEMU or adopts a running one, waits for its end, and
//! cleans up.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, ExitCode, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use aquifer_control_socket::first_word::{self, say};
use aquifer_page::RegionName;
use aquifer_procfs::end_oom_exemption;
use aquifer_region::RegionError;
use aquifer_region::process::client as regions;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::control_server::ControlServer;
use super::disks;
use super::ended::Found;
use super::files::Files;
use super::logs::Bounding;
use super::message::{Origin, Record, Response};
use crate::definition::{self, Definitions};
use crate::error::VmError;
use crate::memory::Budget;
use crate::migrate::{self, Incoming, Outcome, Wire};
use crate::node::{Need, start_on};
use crate::qmp::Qmp;
use crate::spec::{Backing, Place, VmSpec};

/// The signal for a system call that the seccomp filter forbids (signal(7), x86).
const SIGSYS: i32 = 31;

/// The hidden subcommand that runs a VM's supervisor: the program's `main` must pass its arguments
/// to [`run()`].
pub const SUBCOMMAND: [&str; 2] = ["serve", "vm"];

/// How long QEMU may take until it answers.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How long the engine may take to notice that QEMU is gone and has unmapped the region.
const RELEASE: Duration = Duration::from_secs(30);

/// Runs the hidden subcommand: starts QEMU, waits for its end, and then removes the region.
pub fn run(run_dir: &Path, name: &RegionName) -> ExitCode {
    let files = Files::new(run_dir, name);
    match supervise(&files) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            let _ = say(&Response::Failed { error: error.to_string() });
            ExitCode::FAILURE
        }
    }
}

fn supervise(files: &Files) -> Result<(), VmError> {
    let fail = || VmError::io("cannot start QEMU");
    rustix::process::setsid().map_err(io::Error::from).map_err(fail())?;
    end_oom_exemption().map_err(fail())?;
    let _lock = files.lock_supervision().map_err(fail())?;
    // 'vm forget' removes the record only while it has the lock.
    let record = files.read()?;
    if let Some(pid) = record.pid {
        return adopt(files, pid);
    }
    let bounding = Bounding::start(files).map_err(fail())?;
    let (mut qemu, node) = start(files, &record)?;
    if let Err(error) = wait_until_it_answers(files, &mut qemu) {
        let _ = qemu.kill();
        let _ = qemu.wait();
        return Err(error);
    }
    let record = Record { pid: Some(qemu.id()), node, ..record };
    files.write(&record)?;
    let mut fetching = None;
    match &record.incoming {
        None => {
            let _ = say(&Response::Started);
            first_word::is_said().map_err(fail())?;
        }
        Some(incoming) => {
            let fail = || VmError::io(format!("cannot listen at {}", incoming.listen));
            let listener = TcpListener::bind((incoming.listen, 0)).map_err(fail())?;
            let came = take_in(files, incoming, &listener, &mut qemu, &record);
            if !matches!(came, Ok(Outcome::Here(_))) {
                let _ = qemu.kill();
                let _ = qemu.wait();
                remove_region(files)?;
                if let Some(path) = &record.definition {
                    Definitions::beside(path).remove_expected(files.name(), incoming);
                }
                files.remove();
            }
            match came? {
                Outcome::Here(wire) => {
                    fetching = fetch(files, Some(listener), wire.map(|wire| *wire))?
                }
                Outcome::Stays(why) => {
                    tracing::warn!("VM '{}' did not arrive: {why}", files.name());
                    return Ok(());
                }
            }
        }
    }
    let control = ControlServer::serve(files).map_err(fail())?;
    if record.incoming.is_some() {
        // The VM has as much memory as it had at the source.
        control.settle();
    }
    let end = qemu.wait().map_err(VmError::io("cannot wait for QEMU"))?;
    drop(bounding);
    clean_up(files, &control, Some(end))?;
    wait_for_fetch(fetching);
    Ok(())
}

/// Starts a thread that fetches the memory left at the source, if there is any. The thread uses
/// `listener`, or a new one at the noted address.
fn fetch(
    files: &Files,
    listener: Option<TcpListener>,
    wire: Option<Wire>,
) -> Result<Option<JoinHandle<()>>, VmError> {
    let Some(link) = files.read()?.awaiting_source else { return Ok(None) };
    let fail = || VmError::io(format!("cannot listen at {}", link.address));
    let listener = listener.map_or_else(|| TcpListener::bind(link.address), Ok).map_err(fail())?;
    listener.set_nonblocking(true).map_err(fail())?;
    let files = files.clone();
    let fetching = thread::Builder::new().name("fetch".to_owned());
    let fetching = fetching.spawn(move || migrate::fetch_all(&files, &link, &listener, wire));
    fetching.map(Some).map_err(VmError::io("cannot start a thread"))
}

/// Waits, up to `RELEASE`, until the source knows that nothing more is to be fetched.
fn wait_for_fetch(fetching: Option<JoinHandle<()>>) {
    let deadline = Instant::now() + RELEASE;
    while fetching.as_ref().is_some_and(|fetching| !fetching.is_finished())
        && Instant::now() < deadline
    {
        thread::sleep(Duration::from_millis(10));
    }
}

/// Supervises a QEMU that another supervisor started.
fn adopt(files: &Files, pid: u32) -> Result<(), VmError> {
    let fail = || VmError::io(format!("cannot wait for QEMU, process {pid}"));
    let process = Pid::from_raw(pid as i32).ok_or(io::ErrorKind::InvalidInput);
    let process = process.map_err(io::Error::from).map_err(fail())?;
    let process =
        pidfd_open(process, PidfdFlags::empty()).map_err(io::Error::from).map_err(fail())?;
    let control = ControlServer::serve(files).map_err(fail())?;
    // QEMU may block on pages that were left behind.
    let fetching = fetch(files, None, None)?;
    // The process id may have been reused; only QEMU answers here.
    Qmp::connect(&files.control(), TIMEOUT)?;
    if files.is_handed_over() {
        disks::release(files);
    }
    control.serve_postcopy();
    control.settle();
    let bounding = Bounding::start(files).map_err(fail())?;
    let _ = say(&Response::Started);
    first_word::is_said().map_err(fail())?;
    let mut ends = [PollFd::new(&process, PollFlags::IN)];
    while poll(&mut ends, None) == Err(rustix::io::Errno::INTR) {}
    tracing::info!("QEMU exited; its exit status is unknown");
    drop(bounding);
    clean_up(files, &control, None)?;
    wait_for_fetch(fetching);
    Ok(())
}

/// Waits until the VM arrives from another host.
fn take_in(
    files: &Files,
    incoming: &Incoming,
    listener: &TcpListener,
    qemu: &mut Child,
    record: &Record,
) -> Result<Outcome, VmError> {
    let fail = || VmError::io(format!("cannot listen at {}", incoming.listen));
    migrate::check_cpu(files, incoming)?;
    let _ = say(&Response::Awaits { address: listener.local_addr().map_err(fail())? });
    first_word::is_said().map_err(fail())?;
    let mut note = |incoming: &Incoming| {
        files.write(&Record { incoming: Some(incoming.clone()), ..record.clone() })
    };
    migrate::take_in(files, incoming, listener, qemu, &mut note)
}

/// Starts QEMU. Returns it with its NUMA node, if one was chosen.
fn start(files: &Files, record: &Record) -> Result<(Child, Option<u32>), VmError> {
    let log = first_word::open_log(&files.log()).map_err(VmError::io("cannot start QEMU"))?;
    let copy = log.try_clone().map_err(VmError::io("cannot open the log twice"))?;
    let Origin::Started(spec) = &record.origin else {
        return Err(VmError::Misuse("Aquifer did not start the VM".to_owned()));
    };
    let region = files.region().region();
    if let Some(window) = spec.window(&region) {
        fs::hard_link(&region, &window)
            .map_err(VmError::io(format!("cannot make {}", window.display())))?;
    }
    let cache = disks::cache_of(files, spec)?;
    let comes = record.incoming.is_some();
    let choice = if comes { spec.processors.node.elsewhere() } else { spec.processors.node };
    let node = choice.choose(need(files, spec)?)?;
    let number = node.as_ref().map(|node| node.number);
    let place = Place { region: &region, cache: &cache, node: number, comes };
    let mut qemu = spec.command(files, &place);
    qemu.stdin(Stdio::null()).stdout(log).stderr(copy);
    let started = start_on(node.as_ref(), || qemu.spawn());
    let qemu = started.map_err(VmError::io(format!("cannot run {}", spec.qemu.display())))?;
    Ok((qemu, number))
}

/// Returns what a VM takes of this host.
fn need(files: &Files, spec: &VmSpec) -> Result<Need, VmError> {
    let (memory, huge_pages) = match spec.backing {
        Backing::Region => (regions::record(&files.region())?.cache.min(spec.memory), None),
        Backing::Local { huge } => (spec.memory, huge),
    };
    let mut others = BTreeMap::new();
    for vm in Files::all(files.run_dir()).unwrap_or_default() {
        let Ok(Record { origin: Origin::Started(spec), node: Some(node), ended: None, .. }) =
            vm.read()
        else {
            continue;
        };
        *others.entry(node).or_default() += u64::from(spec.processors.cpus);
    }
    Ok(Need { memory, huge_pages, cpus: spec.processors.cpus, others })
}

fn wait_until_it_answers(files: &Files, qemu: &mut Child) -> Result<(), VmError> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(end) = qemu.try_wait().map_err(VmError::io("cannot wait for QEMU"))? {
            return Err(VmError::NotStarted(last_words(files, end)));
        }
        match Qmp::connect(&files.control(), TIMEOUT) {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Records a VM's end, with QEMU's exit status if it is known.
pub(super) fn note_end(files: &Files, record: &Record, status: Option<ExitStatus>) {
    let found = Found {
        name: files.name(),
        pid: record.pid,
        status,
        moved: record.handed_over.as_ref().map(|handed_over| handed_over.to.clone()),
        order: files.ordered_end(),
        words: log_end(files),
    };
    found.note(files.run_dir());
}

/// Returns the last five lines of the log.
fn log_end(files: &Files) -> String {
    let log = fs::read_to_string(files.log()).unwrap_or_default();
    let words: Vec<_> = log.lines().filter(|line| !line.trim().is_empty()).collect();
    words[words.len().saturating_sub(5)..].join("; ")
}

/// Returns the last lines of the log, or the exit status if the log is empty.
fn last_words(files: &Files, end: ExitStatus) -> String {
    let words = log_end(files);
    if end.signal() == Some(SIGSYS) {
        return format!(
            "{words} (QEMU's sandbox killed it for a forbidden system call; if an option needs \
             that call, such as a script of -netdev, add '-- -sandbox off')"
        );
    }
    if words.is_empty() { end.to_string() } else { words }
}

/// Cleans up after QEMU's end: records it, removes the region and the share, and keeps the log if
/// QEMU failed.
fn clean_up(
    files: &Files,
    control: &ControlServer,
    status: Option<ExitStatus>,
) -> Result<(), VmError> {
    // Wait until a migration has reported its outcome.
    let _busy = control.busy();
    let record = files.read()?;
    note_end(files, &record, status);
    let disorder = status.filter(|status| !status.success()).map(|status| status.to_string());
    remove_region(files)?;
    record.handed_over.iter().for_each(|it| definition::remove_moved(files, it));
    Budget::of(files.run_dir()).forget(files.name())?;
    if disorder.is_none() || record.handed_over.is_some() {
        files.remove();
        return Ok(());
    }
    files.write(&Record { ended: disorder, ..record })
}

/// Removes the region of a VM without a QEMU, if it exists.
pub(super) fn remove_region(files: &Files) -> Result<(), VmError> {
    let deadline = Instant::now() + RELEASE;
    loop {
        match regions::remove(&files.region()) {
            Ok(()) | Err(RegionError::Unknown(_)) => return Ok(()),
            // The engine notices QEMU's end after a moment.
            Err(RegionError::InUse { .. }) if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(20));
            }
            Err(error) => return Err(error.into()),
        }
    }
}
