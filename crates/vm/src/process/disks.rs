//! The disks of a VM that its group's disk cache serves.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_control_socket::is_listening;
use aquifer_disk_cache as disk_cache;
use aquifer_page::Group;
use aquifer_region::process::{GroupFiles, client as regions};

use super::files::Files;
use super::message::Origin;
use crate::error::VmError;
use crate::spec::VmSpec;

/// How long a VM that starts waits for the cache that an agent starts for it.
const STARTING: Duration = Duration::from_secs(5);

/// Pause between two looks at the cache.
const LOOK: Duration = Duration::from_millis(20);

/// Returns the group whose disk cache a VM needs; `None` if it needs none, or has no region yet.
pub fn cache_needed(files: &Files) -> Option<Group> {
    let record = files.read().ok().filter(|record| record.ended.is_none())?;
    match record.origin {
        Origin::Started(spec) if !spec.cached_disks.is_empty() => {
            Some(regions::record(&files.region()).ok()?.group)
        }
        _ => None,
    }
}

/// Returns whether a group's disk cache serves disks.
pub fn has_cache(files: &GroupFiles) -> bool {
    is_listening(&files.cache_disks())
}

/// Returns the socket of the group's disk cache, if the VM needs that. An agent starts the cache
/// once it finds the VM's record.
pub(super) fn cache_of(files: &Files, spec: &VmSpec) -> Result<PathBuf, VmError> {
    if spec.cached_disks.is_empty() {
        return Ok(PathBuf::new());
    }
    let group = regions::record(&files.region())?.group;
    let cache = files.group(&group);
    let deadline = Instant::now() + STARTING;
    while !has_cache(&cache) {
        if Instant::now() > deadline {
            return Err(VmError::Misuse(format!(
                "no disk cache of group '{group}' runs on this host: start it with 'aquifer serve \
                 disk-cache {group}', or start an agent, which does that by itself"
            )));
        }
        thread::sleep(LOOK);
    }
    Ok(cache.cache_disks())
}

/// Lets the disk cache unlock the disks of a VM that belongs to another host now. The other host
/// locks them before it writes.
pub(crate) fn release(files: &Files) {
    let Some(group) = cache_needed(files) else { return };
    let Ok(Origin::Started(spec)) = files.read().map(|record| record.origin) else { return };
    for disk in &spec.cached_disks {
        // Without a cache nothing is locked.
        if let Err(error) = disk_cache::release(&files.run_dir().join("regions"), &group, disk) {
            tracing::warn!("{error}: the VM cannot write to it elsewhere until QEMU ends here");
        }
    }
}
