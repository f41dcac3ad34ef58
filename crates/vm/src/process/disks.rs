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
const CACHE_TIMEOUT: Duration = Duration::from_secs(5);

/// Pause between two looks at the cache.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Pause between two requests to unlock a disk.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Returns the group whose disk cache a VM needs; `None` if it needs none, or has no region yet.
pub fn cache_needed(files: &Files) -> Option<Group> {
    let record = files.read().ok().filter(|record| record.ended.is_none())?;
    let needs = record.origin.has_cached_disks();
    needs.then(|| Some(regions::record(&files.region()).ok()?.group))?
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
    let deadline = Instant::now() + CACHE_TIMEOUT;
    while !has_cache(&cache) {
        if Instant::now() > deadline {
            return Err(VmError::Misuse(format!(
                "no disk cache of group '{group}' runs on this host: start it with 'aquifer serve \
                 disk-cache {group}', or start an agent, which does that by itself"
            )));
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(cache.cache_disks())
}

/// Starts a thread that makes the disk cache unlock the disks of a VM that belongs to another host
/// now. It tries until QEMU ends, which unlocks them too. The other host locks them before it
/// writes.
pub(crate) fn release(files: &Files) {
    let Some(group) = cache_needed(files) else { return };
    let Ok(Origin::Started(spec)) = files.read().map(|record| record.origin) else { return };
    let (files, regions) = (files.clone(), files.run_dir().join("regions"));
    let unlock = move || {
        for disk in &spec.cached_disks {
            let mut warns = true;
            // Without a cache nothing is locked.
            while let Err(error) = disk_cache::release(&regions, &group, disk) {
                if std::mem::take(&mut warns) {
                    tracing::warn!("{error}: the VM cannot write to it on the other host yet");
                }
                if !files.is_running() {
                    return;
                }
                thread::sleep(RETRY_INTERVAL);
            }
        }
    };
    if let Err(error) = thread::Builder::new().name("unlock".to_owned()).spawn(unlock) {
        tracing::error!("the disks stay locked until QEMU ends: {error}");
    }
}
