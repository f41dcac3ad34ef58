//! VMs that other hosts move here, and the end of earlier attempts.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_procfs::available_memory;
use aquifer_region::process::client as regions;

use super::client::{admit, forget, list, start_supervisor};
use super::files::Files;
use super::message::Record;
use super::run::remove_region;
use super::stop::end;
use crate::definition::Definitions;
use crate::error::VmError;
use crate::migrate::{Arrival, Incoming};
use crate::spec::Backing;

/// How long [`receive`] waits until an ended attempt to move the same VM here is cleared away.
const LONGEST_CLEANUP: Duration = Duration::from_secs(5);

/// The order that ends a QEMU that waits for a VM.
const CUT_OFF: &str = "vm migrate, which was cut off";

/// Prepares this host for a VM that another host sends, and returns the address at which its
/// supervisor listens. The VM's definition joins `definitions`. If the VM does not arrive, the
/// supervisor removes everything again.
///
/// # Errors
/// [`VmError`] if this host lacks something that the VM needs.
pub fn receive(
    program: &Path,
    run_dir: &Path,
    arrival: &Arrival,
    incoming: Incoming,
    definitions: &Definitions,
) -> Result<SocketAddr, VmError> {
    let Arrival { vm, memory, .. } = arrival;
    vm.check()?;
    if vm.name != memory.name || vm.max_memory != memory.size || vm.backing != Backing::Region {
        return Err(VmError::Misuse("the offered region does not match the VM".to_owned()));
    }
    let spare =
        available_memory().map_err(VmError::io("cannot tell how much memory is available"))?;
    let room = arrival.room();
    if room > spare {
        return Err(VmError::Misuse(format!(
            "the VM may take {room} of RAM, but this host has only {spare} available: set a \
             smaller cache with --cache"
        )));
    }
    let files = Files::new(run_dir, &vm.name);
    // A spill file is of one host, and its path from another host must not be trusted.
    let memory = &memory.clone().for_another_host();
    let text = arrival.definition.as_deref();
    let path = text.map(|_| definitions.file(&vm.name));
    give_way(&files, &incoming)?;
    await_place(&files, &Record::of(vm, path.as_deref(), Some(incoming.clone())))?;
    let expect = |text| definitions.expect(&vm.name, &incoming, text);
    let started = admit(&files, vm, (Some(memory), arrival.size), &arrival.limits)
        .and_then(|()| Ok(text.map_or(Ok(()), expect)?))
        .and_then(|()| Ok(regions::create_foreign(program, &run_dir.join("regions"), memory)?))
        .and_then(|_| start_supervisor(program, &files).inspect_err(|_| _ = remove_region(&files)))
        .and_then(|address| {
            let silent = "the VM's supervisor does not wait for the migration";
            address.ok_or_else(|| VmError::Reported(silent.to_owned()))
        });
    started.inspect_err(|_| {
        text.iter().for_each(|_| definitions.remove_expected(&vm.name, &incoming));
        forget(&files);
    })
}

/// Creates the record of an arriving VM. An earlier attempt to move it here may need a moment to
/// remove its QEMU and its region.
fn await_place(files: &Files, record: &Record) -> Result<(), VmError> {
    let deadline = Instant::now() + LONGEST_CLEANUP;
    loop {
        let made = files.create(record);
        let is_here =
            || files.read().is_ok_and(|before| before.incoming.is_none_or(|it| it.prepared));
        if !matches!(made, Err(VmError::Exists(_))) || is_here() || Instant::now() >= deadline {
            return made;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Makes room for another attempt to move a VM here, which `incoming` describes. An earlier one
/// ends if its supervisor is gone, or if it still waits for the same host to connect. A VM that may
/// be this host's stays.
pub(super) fn give_way(files: &Files, incoming: &Incoming) -> Result<(), VmError> {
    let Some((record, earlier)) = unprepared(files) else { return Ok(()) };
    if !files.is_supervised() {
        return remove(files, &record, &earlier);
    }
    if earlier.from == incoming.from && earlier.migration != incoming.migration {
        // Without a mark the earlier attempt ends by itself, only later.
        let _ = fs::write(files.superseded(), incoming.migration.to_string());
    }
    Ok(())
}

/// Removes what is left of VMs that were to move here when all processes that receive them died,
/// and of VMs whose removal was cut off. No attempt may be in preparation.
///
/// # Errors
/// [`VmError`] if the VMs cannot be listed, or one cannot be removed.
pub fn clear_arrivals(run_dir: &Path) -> Result<(), VmError> {
    Files::clear_removed(run_dir).map_err(VmError::io("cannot list removed VMs"))?;
    for files in list(run_dir)? {
        if let Some((record, earlier)) = unprepared(&files).filter(|_| !files.is_supervised()) {
            tracing::info!("VM '{}' did not arrive: no process waits for it", files.name());
            remove(&files, &record, &earlier)?;
        }
    }
    Ok(())
}

/// Returns the record of a VM that cannot be this host's yet.
fn unprepared(files: &Files) -> Option<(Record, Incoming)> {
    let record = files.read().ok()?;
    let incoming = record.incoming.clone().filter(|incoming| !incoming.prepared)?;
    Some((record, incoming))
}

fn remove(files: &Files, record: &Record, earlier: &Incoming) -> Result<(), VmError> {
    end(files, true, Duration::ZERO, CUT_OFF)?;
    if let Some(path) = &record.definition {
        Definitions::beside(path).remove_expected(files.name(), earlier);
    }
    Ok(())
}
