//! Earlier attempts to move a VM here, which ended without a trace or were given up.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::client::list;
use super::files::Files;
use super::message::Record;
use super::stop::end;
use crate::definition::Definitions;
use crate::error::VmError;
use crate::migrate::Incoming;

/// The order that ends a QEMU that waits for a VM.
const CUT_OFF: &str = "vm migrate, which was cut off";

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

/// Removes what is left of VMs that were to move here when all processes that receive them died.
/// No attempt may be in preparation.
///
/// # Errors
/// [`VmError`] if the VMs cannot be listed, or one cannot be removed.
pub fn clear_arrivals(run_dir: &Path) -> Result<(), VmError> {
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
