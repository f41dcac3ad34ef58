//! Cleaning up after the process of a volume that was killed.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::VolumeId;

use super::ProcessError;
use super::spec::{Files, Locked, VolumeRecord, label};
use crate::{BackendKind, backend, swap};

/// Time that the kernel may take to release an unused device.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Removes the leftovers of a killed volume process: swap, device and files. Swapped-out pages are
/// lost; the kernel kills programs that touch one. Nothing left is no error.
///
/// # Errors
/// Returns [`ProcessError::Served`] while the process lives, and [`ProcessError::Left`] if a part
/// cannot be removed.
pub fn clean_up(state: &Path, volume: VolumeId) -> Result<(), ProcessError> {
    Files::new(state, volume).clean_up()
}

impl Files {
    /// Does the same as [`clean_up`].
    pub(super) fn clean_up(&self) -> Result<(), ProcessError> {
        clean_up_after(self)
    }
}

fn clean_up_after(files: &Files) -> Result<(), ProcessError> {
    let volume = files.id;
    if !files.record().exists() {
        return Ok(());
    }
    let _lock = Locked::take(files)?;
    let path = files.record();
    let record =
        files.read().map_err(ProcessError::io(format!("cannot read {}", path.display())))?;
    let known = record.map(|VolumeRecord { device, backend, .. }| (device, backend));
    // Without a readable record, the mark on the device identifies it.
    let found = match known {
        Some(known) => Some(known),
        None => backend::find(&label(volume)).map_err(ProcessError::io(
            "cannot look for the device of a dead volume in /sys/block",
        ))?,
    };
    if let Some((device, backend)) = found {
        release(&device, backend, &label(volume))
            .map_err(|why| ProcessError::Left { volume, why })?;
    }
    files.remove();
    Ok(())
}

/// Turns swap off and waits until the device is gone; otherwise says why it stays.
fn release(device: &Path, kind: BackendKind, label: &str) -> Result<(), String> {
    // The kernel may have assigned the device to another process since.
    let ours = || backend::is_marked(device, label);
    if !ours() {
        return Ok(());
    }
    let failing = backend::release_dead(device, kind).map_err(|error| error.to_string())?;
    if let Some(lost) =
        swap::usage(device).map_err(|error| format!("cannot read /proc/swaps: {error}"))?
    {
        tracing::warn!(
            device = %device.display(),
            %lost,
            "no process serves this volume: turning its swap off"
        );
        swap::off(device, |_| ()).map_err(|error| error.to_string())?;
    }
    drop(failing);
    let deadline = Instant::now() + TIMEOUT;
    while ours() {
        if Instant::now() > deadline {
            let device = device.display();
            return Err(format!(
                "a mount or a program still holds {device} ('fuser -v {device}' shows it); \
                 end that first"
            ));
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
