//! The local caches of regions, the pages that their groups share, and disk caches.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use aquifer_control::ledger::{
    AutoCache, CacheLimit, DiskCache, GroupMemory, OwnMemory, RegionMemory, Spilled,
};
use aquifer_disk_cache as disk_cache;
use aquifer_page::{Bytes, EXTENT_SIZE, Group};
use aquifer_region::process::{Files, GroupFiles, Limits, RegionSpec, RegionStatus, client};
use aquifer_vm::process::side_by_side;
use aquifer_volume::{LeaseState, VolumeStatus};

use super::{Members, TIMEOUT};

/// Returns the regions of this host, the limits that they share, and their groups.
pub(super) fn read(
    run_dir: &Path,
    members: &Members,
    last: &OwnMemory,
) -> (Vec<RegionMemory>, Vec<CacheLimit>, Vec<GroupMemory>) {
    let directory = run_dir.join("regions");
    let all = client::list(&directory).unwrap_or_else(|error| {
        tracing::debug!("the ledger counts no regions: {error}");
        Vec::new()
    });
    let regions = side_by_side(&all, |files| region(&directory, files, members, last));
    let regions: Vec<_> = regions.into_iter().flatten().collect();
    let limits = match regions.is_empty() {
        true => Vec::new(),
        false => client::limits(&directory).map(limits).unwrap_or(last.cache_limits.clone()),
    };
    let mut groups: BTreeSet<Group> = regions.iter().map(|region| region.group.clone()).collect();
    if members.is_whole_host() {
        groups.extend(with_files(&directory));
    }
    let groups = side_by_side(groups, |group| of_group(&directory, group, last));
    (regions, limits, groups.into_iter().flatten().collect())
}

fn limits(Limits { host, groups, .. }: Limits) -> Vec<CacheLimit> {
    let host = host.map(|bytes| CacheLimit { group: None, bytes });
    let groups = groups.into_iter().map(|(group, bytes)| CacheLimit { group: Some(group), bytes });
    host.into_iter().chain(groups).collect()
}

/// Returns a region's memory; `None` if it does not count, or is gone.
fn region(
    directory: &Path,
    files: &Files,
    members: &Members,
    last: &OwnMemory,
) -> Option<RegionMemory> {
    let spec = client::record(files).ok()?;
    let mut region = RegionMemory {
        name: spec.name.clone(),
        size: spec.size,
        vm_size: None,
        cache: spec.cache,
        resident: allocated(&files.region()),
        shared: Bytes::ZERO,
        auto: (spec.auto && !files.is_foreign()).then(|| auto(&spec)),
        spilled: None,
        group: spec.group,
    };
    // Its files tell the rest of a region that shares nothing.
    let shares = allocated(&GroupFiles::new(directory, &region.group).frames()) > Bytes::ZERO;
    // Only its engine knows what a region fetches, and what it has spilled.
    let fetches = region.auto.is_some() && region.cache < region.size || spec.spill.is_some();
    if !shares && !fetches && members.is_whole_host() {
        return Some(region);
    }
    match client::status_within(files, TIMEOUT) {
        Ok(RegionStatus { pid, processes, usage, counts, volume, .. }) => {
            (region.resident, region.shared) = (usage.resident, usage.shared);
            region.auto.iter_mut().for_each(|auto| auto.fetched = counts.remote_faults);
            // A region for experiments has such a file, too.
            region.spilled = spec.spill.and_then(|_| spilled(&volume));
            members.has(processes.into_iter().chain([pid])).then_some(region)
        }
        Err(error) => {
            tracing::debug!(region = %region.name, "a region keeps its last figures: {error}");
            match last.regions.iter().find(|known| known.name == region.name) {
                Some(known) => {
                    Some(RegionMemory { shared: known.shared, spilled: known.spilled, ..region })
                }
                None => members.is_whole_host().then_some(region),
            }
        }
    }
}

fn spilled(volume: &VolumeStatus) -> Option<Spilled> {
    let bytes = volume.spill?.bytes();
    let open = volume.leases.iter().filter(|lease| lease.state == LeaseState::Ok);
    let free: u64 = open.map(|lease| lease.extents.saturating_sub(lease.used_extents)).sum();
    let homeless = bytes.saturating_sub(Bytes(free * EXTENT_SIZE));
    Some(Spilled { volume: volume.id, bytes, homeless })
}

/// Returns what the record of a region says for the choice of its cache.
fn auto(spec: &RegionSpec) -> AutoCache {
    AutoCache { volume: spec.volume, leased: spec.leased(), fetched: 0 }
}

/// Returns the groups that have files here, such as those of a disk cache without regions.
fn with_files(directory: &Path) -> Vec<Group> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name());
    names.filter_map(|name| name.to_str()?.strip_prefix('@')?.parse().ok()).collect()
}

/// Returns what a group shares and caches here; `None` if nothing.
fn of_group(directory: &Path, group: Group, last: &OwnMemory) -> Option<GroupMemory> {
    let files = GroupFiles::new(directory, &group);
    let frames = allocated(&files.frames());
    let disk_cache = match files.cache_control().exists() {
        true => cache_of(directory, &group, last),
        false => None,
    };
    let is_there = frames > Bytes::ZERO || disk_cache.is_some();
    is_there.then_some(GroupMemory { group, frames, disk_cache })
}

fn cache_of(directory: &Path, group: &Group, last: &OwnMemory) -> Option<DiskCache> {
    match disk_cache::status_within(directory, group, TIMEOUT) {
        Ok(status) => {
            let status = status?;
            Some(DiskCache { size: status.size, used: status.used, fixed: status.fixed })
        }
        Err(error) => {
            tracing::debug!(%group, "a disk cache keeps its last figures: {error}");
            last.groups.iter().find(|known| known.group == *group)?.disk_cache
        }
    }
}

/// Returns the RAM that a file on a tmpfs takes. `st_blocks` counts units of 512 bytes
/// (stat(3type)).
fn allocated(file: &Path) -> Bytes {
    fs::metadata(file).map_or(Bytes::ZERO, |file| Bytes(file.blocks() * 512))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use aquifer_region::process::{RegionSpec, record};

    use super::*;

    /// Writes a region's record and its file, without an engine.
    fn make(run_dir: &Path, spec: &RegionSpec) {
        let beside = run_dir.join("regions").join(format!(".{}", spec.name));
        fs::create_dir_all(&beside).unwrap();
        record::write(&beside.join("record.json"), spec).unwrap();
        fs::write(run_dir.join("regions").join(spec.name.as_str()), [1; 8192]).unwrap();
    }

    fn spec(name: &str, cache: u64) -> RegionSpec {
        RegionSpec::new(name.parse().unwrap(), Bytes::gib(4), Bytes::gib(cache))
    }

    fn read_all(run_dir: &Path, members: &Members, last: &OwnMemory) -> OwnMemory {
        let (regions, cache_limits, groups) = read(run_dir, members, last);
        OwnMemory { regions, cache_limits, groups, ..OwnMemory::default() }
    }

    #[test]
    fn a_region_without_an_engine_counts_by_its_record() {
        let dir = tempfile::tempdir().unwrap();
        let (whole, last) = (Members(None), OwnMemory::default());
        assert_eq!(read_all(dir.path(), &whole, &last), last);
        make(dir.path(), &spec("items", 1));
        let own = read_all(dir.path(), &whole, &last);
        let [region] = &own.regions[..] else { panic!("{own:?}") };
        assert_eq!((region.size, region.cache), (Bytes::gib(4), Bytes::gib(1)));
        assert!(region.resident > Bytes::ZERO);
        // In a cgroup, only its engine can tell that it counts.
        let none = Members(Some(BTreeSet::new()));
        assert_eq!(read_all(dir.path(), &none, &last).regions, []);
    }

    #[test]
    fn a_silent_engine_of_a_sharing_group_keeps_its_last_figures() {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), &spec("items", 1));
        let files = GroupFiles::new(&dir.path().join("regions"), &Group::default());
        fs::create_dir_all(files.directory()).unwrap();
        fs::write(files.frames(), [1; 4096]).unwrap();
        let whole = Members(None);
        let mut own = read_all(dir.path(), &whole, &OwnMemory::default());
        assert_eq!(own.regions[0].shared, Bytes::ZERO);
        assert!(own.groups[0].frames > Bytes::ZERO);
        own.regions[0].shared = Bytes::mib(3);
        assert_eq!(read_all(dir.path(), &whole, &own).regions[0].shared, Bytes::mib(3));
    }

    #[test]
    fn limits_that_caches_share_are_read() {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), &spec("items", 1));
        let group: Group = "blue".parse().unwrap();
        let limits = Limits {
            host: Some(Bytes::gib(2)),
            groups: [(group.clone(), Bytes::gib(1))].into(),
            ..Limits::default()
        };
        record::write(&dir.path().join("regions.limits"), &limits).unwrap();
        let own = read_all(dir.path(), &Members(None), &OwnMemory::default());
        let host = CacheLimit { group: None, bytes: Bytes::gib(2) };
        let blue = CacheLimit { group: Some(group), bytes: Bytes::gib(1) };
        assert_eq!(own.cache_limits, [host, blue]);
    }
}
