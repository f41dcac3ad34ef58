use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::{Child, ExitCode, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::RegionName;
use aquifer_region::RegionError;
use aquifer_region::process::client as regions;
use aquifer_region::process::first_word::{self, say};

use super::files::Files;
use super::message::{Record, Response};
use crate::error::GuestError;
use crate::qmp::Qmp;

/// The hidden subcommand of the program that a VM's keeper is: its `main` must hand what follows it to [`run()`].
pub const SUBCOMMAND: &str = "vm-serve";

/// How long QEMU may take until it answers.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long it may take until nobody has a region mapped whose QEMU is gone.
const RELEASE: Duration = Duration::from_secs(30);

/// The body of the hidden subcommand: starts QEMU, waits for its end, and takes the region away then.
pub fn run(run_dir: &Path, name: &RegionName) -> ExitCode {
    let files = Files::new(run_dir, name);
    match keep(&files) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            say(&Response::Failed { error: error.to_string() });
            ExitCode::FAILURE
        }
    }
}

fn keep(files: &Files) -> Result<(), GuestError> {
    let fail = || GuestError::io("cannot start QEMU");
    rustix::process::setsid().map_err(io::Error::from).map_err(fail())?;
    let record = files.read()?;
    let _lock = files.keep().map_err(fail())?;
    let mut qemu = start(files, &record)?;
    if let Err(error) = wait_until_it_answers(files, &mut qemu) {
        let _ = qemu.kill();
        let _ = qemu.wait();
        return Err(error);
    }
    let record = Record { pid: Some(qemu.id()), ..record };
    files.write(&record)?;
    say(&Response::Started);
    first_word::is_said().map_err(fail())?;
    let end = qemu.wait().map_err(GuestError::io("cannot wait for QEMU"))?;
    tracing::info!("QEMU has ended: {end}");
    clean_up(files, &record, end)
}

fn start(files: &Files, record: &Record) -> Result<Child, GuestError> {
    let log = files.log();
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&log)
        .map_err(GuestError::io(format!("cannot open {}", log.display())))?;
    let copy = log.try_clone().map_err(GuestError::io("cannot open the log twice"))?;
    let mut qemu = record.spec.command(files, &files.region().region());
    qemu.stdin(Stdio::null()).stdout(log).stderr(copy);
    qemu.spawn().map_err(GuestError::io(format!("cannot run {}", record.spec.qemu.display())))
}

fn wait_until_it_answers(files: &Files, qemu: &mut Child) -> Result<(), GuestError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(end) = qemu.try_wait().map_err(GuestError::io("cannot wait for QEMU"))? {
            return Err(GuestError::NotStarted(last_words(files, end)));
        }
        match Qmp::connect(&files.control(), PATIENCE) {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// What it has said, or how it has ended if that is nothing.
fn last_words(files: &Files, end: ExitStatus) -> String {
    let log = fs::read_to_string(files.log()).unwrap_or_default();
    let words: Vec<_> = log.lines().filter(|line| !line.trim().is_empty()).collect();
    let words = words[words.len().saturating_sub(5)..].join("; ");
    if words.is_empty() { end.to_string() } else { words }
}

/// What a QEMU that has ended leaves: nothing but why, if that was not in order.
fn clean_up(files: &Files, record: &Record, end: ExitStatus) -> Result<(), GuestError> {
    remove_region(files)?;
    if end.success() {
        files.remove();
        return Ok(());
    }
    files.write(&Record { ended: Some(end.to_string()), ..record.clone() })
}

/// Removes the region of a VM without a QEMU, if it is there.
pub(super) fn remove_region(files: &Files) -> Result<(), GuestError> {
    let deadline = Instant::now() + RELEASE;
    loop {
        match regions::remove(&files.region()) {
            Ok(()) | Err(RegionError::Unknown(_)) => return Ok(()),
            // That QEMU is gone is noticed after a moment.
            Err(RegionError::InUse { .. }) if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(20));
            }
            Err(error) => return Err(error.into()),
        }
    }
}
