use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::VolumeId;

use super::ProcessError;
use super::spec::{Files, Locked, VolumeRecord, label};
use crate::{BackendKind, backend, swap};

/// How long the kernel may take to let go of a device that nobody uses any more.
const PATIENCE: Duration = Duration::from_secs(5);

/// Removes what the process of a volume left when it was killed: swap, device and files. Pages that were swapped out are
/// lost; the kernel ends processes that touch one.
///
/// [`ProcessError::Served`] while it lives, [`ProcessError::Left`] when something stays. Harmless where nothing is left.
pub fn clean_up(state: &Path, volume: VolumeId) -> Result<(), ProcessError> {
    Files::new(state, volume).clean_up()
}

impl Files {
    /// As [`clean_up`].
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
    // Without a record that can be read, the mark on the device tells.
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

/// Turns swap off and waits until the device is gone; otherwise says what is left.
fn release(device: &Path, kind: BackendKind, label: &str) -> Result<(), String> {
    // The kernel may have given the device to somebody else since.
    let ours = || backend::is_marked(device, label);
    if !ours() {
        return Ok(());
    }
    let failing = backend::release_dead(device, kind).map_err(|error| error.to_string())?;
    if let Some(lost) =
        swap::usage(device).map_err(|error| format!("cannot read /proc/swaps: {error}"))?
    {
        tracing::warn!(device = %device.display(), %lost, "swap on a volume that nobody serves any more: turning it off");
        swap::off(device, |_| ()).map_err(|error| error.to_string())?;
    }
    drop(failing);
    let deadline = Instant::now() + PATIENCE;
    while ours() {
        if Instant::now() > deadline {
            let device = device.display();
            return Err(format!(
                "{device} is still held by a mount or a program ('fuser -v {device}'); end that first"
            ));
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
