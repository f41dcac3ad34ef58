//! The limits that caches share and the quotas of regions, in a file beside the regions.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use aquifer_page::{Bytes, Group, PAGE_SIZE, RegionName};
use serde::{Deserialize, Serialize};

use crate::engine::Engine;
use crate::error::RegionError;
use crate::process::{Files, RegionSpec, lock_file, record};

/// The smallest quota.
pub(super) const LEAST: Bytes = Bytes(Engine::LEAST_FRAMES * PAGE_SIZE as u64);

/// How long a measured stay of pages in a cache remains valid.
const FRESH: Duration = Duration::from_secs(1);

/// How much longer pages must stay in another cache before this one takes a part of its quota.
/// Below that, the part would soon go back.
const WORTH: f64 = 1.25;

/// The limits that caches share, and each region's quota.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// The limit of all regions of this host.
    pub host: Option<Bytes>,
    /// The limits of all regions of a group, by group.
    pub groups: BTreeMap<Group, Bytes>,
    /// The quotas of the regions under a limit.
    pub quotas: BTreeMap<RegionName, Quota>,
}

/// The quota of a region's cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quota {
    /// The region's group.
    pub group: Group,
    /// The size of the quota.
    pub bytes: Bytes,
    /// When the region was last short of room, since the Unix epoch. Also how long a page stayed in
    /// its cache then.
    pub short: Option<(Duration, Duration)>,
}

impl Quota {
    /// Returns how long a page stays in the cache, in seconds. Infinite if the region was not short
    /// of room lately.
    fn stay(&self, now: Duration) -> f64 {
        match self.short {
            Some((at, stay)) if now.saturating_sub(at) < FRESH => stay.as_secs_f64(),
            _ => f64::INFINITY,
        }
    }
}

/// The answer to a region that is short of room.
#[derive(Debug, PartialEq)]
pub(super) enum More {
    /// Its quota is now this large.
    Quota(Bytes),
    /// This region may give up a part, and keep this much at most.
    Ask(RegionName, Bytes),
    Nothing,
}

impl Limits {
    /// Returns whether a limit covers the regions of this group.
    pub(super) fn is_over(&self, group: &Group) -> bool {
        self.host.is_some() || self.groups.contains_key(group)
    }

    /// Returns the free part of each limit over this group, with the limit's group; the least free
    /// first.
    fn free(&self, group: &Group) -> Vec<(u64, Option<Group>)> {
        let taken = |of: Option<&Group>| {
            let quotas =
                self.quotas.values().filter(|quota| of.is_none_or(|group| quota.group == *group));
            quotas.map(|quota| quota.bytes.0).sum::<u64>()
        };
        let host = self.host.map(|limit| (limit.0.saturating_sub(taken(None)), None));
        let own = self.groups.get(group);
        let own =
            own.map(|limit| (limit.0.saturating_sub(taken(Some(group))), Some(group.clone())));
        let mut all: Vec<_> = host.into_iter().chain(own).collect();
        all.sort_by_key(|(free, _)| *free);
        all
    }

    /// Gives a region its first quota: the free part of `wanted`. Returns `None` if no limit covers
    /// the region, and less than [`LEAST`] if the room is short.
    pub(super) fn join(
        &mut self,
        name: &RegionName,
        group: &Group,
        wanted: Bytes,
    ) -> Option<Bytes> {
        let (free, _) = self.free(group).first().cloned()?;
        let quota = Quota { group: group.clone(), bytes: Bytes(wanted.0.min(free)), short: None };
        Some(self.quotas.entry(name.clone()).or_insert(quota).bytes)
    }

    /// Finds more quota for a region in which pages stay this long, up to `wanted` in total.
    pub(super) fn more(
        &mut self,
        name: &RegionName,
        wanted: Bytes,
        stay: Duration,
        now: Duration,
    ) -> More {
        let Some(quota) = self.quotas.get_mut(name) else { return More::Nothing };
        quota.short = Some((now, stay));
        let (has, group) = (quota.bytes.0, quota.group.clone());
        let want = whole_pages((has / 8).max(1 << 20).min(wanted.0.saturating_sub(has)));
        let Some((free, limit)) = self.free(&group).first().cloned() else { return More::Nothing };
        if want == 0 {
            return More::Nothing;
        }
        if whole_pages(free) > 0 {
            let quota = Bytes(has + want.min(whole_pages(free)));
            self.set(name, quota);
            return More::Quota(quota);
        }
        let others = self.quotas.iter().filter(|(other, quota)| {
            *other != name
                && quota.bytes > LEAST
                && limit.as_ref().is_none_or(|group| quota.group == *group)
        });
        let longest = others.map(|(other, quota)| (quota.stay(now), quota.bytes, other)).max_by(
            |(stay, bytes, _), (longest, most, _)| stay.total_cmp(longest).then(bytes.cmp(most)),
        );
        match longest {
            Some((other_stay, bytes, other)) if other_stay > WORTH * stay.as_secs_f64() => {
                let part =
                    if other_stay.is_infinite() { bytes.0 / 4 } else { want.min(bytes.0 / 8) };
                More::Ask(
                    other.clone(),
                    Bytes(bytes.0.saturating_sub(part.max(1 << 20)).max(LEAST.0)),
                )
            }
            _ => More::Nothing,
        }
    }

    pub(super) fn set(&mut self, name: &RegionName, bytes: Bytes) {
        if let Some(quota) = self.quotas.get_mut(name) {
            quota.bytes = bytes;
        }
    }

    /// Sets or removes the limit over these regions, which are all of the group, or all. Returns
    /// the new quota of each. Changes nothing and returns `None` if one would be too small.
    pub(in crate::process) fn change(
        &mut self,
        group: Option<&Group>,
        limit: Option<Bytes>,
        regions: &[RegionSpec],
    ) -> Option<Vec<(RegionName, Bytes)>> {
        let mut new = self.clone();
        match (group, limit) {
            (None, limit) => new.host = limit,
            (Some(group), None) => _ = new.groups.remove(group),
            (Some(group), Some(limit)) => _ = new.groups.insert(group.clone(), limit),
        }
        for spec in regions {
            let quota = || Quota { group: spec.group.clone(), bytes: spec.cache, short: None };
            if new.is_over(&spec.group) {
                new.quotas.entry(spec.name.clone()).or_insert_with(quota);
            }
        }
        let wanted = match limit {
            Some(limit) => new.divide(group, limit)?,
            None => regions.iter().map(|spec| (spec.name.clone(), spec.cache)).collect(),
        };
        *self = new;
        Some(wanted)
    }

    /// Divides a limit among the regions of a group, or all, in proportion to their quotas. Returns
    /// `None` if one would be too small.
    fn divide(&self, group: Option<&Group>, limit: Bytes) -> Option<Vec<(RegionName, Bytes)>> {
        let of = |quota: &Quota| group.is_none_or(|group| quota.group == *group);
        let members: Vec<_> = self.quotas.iter().filter(|(_, quota)| of(quota)).collect();
        let all: u64 = members.iter().map(|(_, quota)| quota.bytes.0).sum();
        if limit.0 < LEAST.0 * members.len() as u64 {
            return None;
        }
        // Each gets the least quota, and a share of the rest in proportion to its present quota.
        let rest = limit.0 - LEAST.0 * members.len() as u64;
        let share = (rest as f64
            / all.saturating_sub(LEAST.0 * members.len() as u64).max(1) as f64)
            .min(1.0);
        let part = |bytes: Bytes| LEAST.0 + (bytes.0.saturating_sub(LEAST.0) as f64 * share) as u64;
        Some(
            members
                .into_iter()
                .map(|(name, quota)| (name.clone(), Bytes(whole_pages(part(quota.bytes)))))
                .collect(),
        )
    }
}

fn whole_pages(bytes: u64) -> u64 {
    bytes / PAGE_SIZE as u64 * PAGE_SIZE as u64
}

/// Returns the time since the Unix epoch. After a step of the clock, regions ask too often or too
/// rarely for a second.
pub(super) fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// The limits of a directory of regions: a file beside it, which one process at a time reads and
/// changes.
#[derive(Clone, Debug)]
pub(in crate::process) struct Book {
    regions: PathBuf,
}

impl Book {
    pub(in crate::process) fn of(regions: &Path) -> Self {
        Self { regions: regions.to_owned() }
    }

    fn file(&self) -> PathBuf {
        self.regions.with_extension("limits")
    }

    /// Reads the file, calls `change`, and writes the file if it changed.
    pub(in crate::process) fn with<T>(
        &self,
        change: impl FnOnce(&mut Limits) -> T,
    ) -> Result<T, RegionError> {
        let path = self.file();
        let fail = || RegionError::io(format!("cannot read or write {}", path.display()));
        let lock = path.with_extension("lock");
        fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).map_err(fail())?;
        let _lock = lock_file(&lock).map_err(fail())?;
        let before: Limits = record::read(&path).map_err(fail())?.unwrap_or_default();
        let mut limits = before.clone();
        // Drops the quotas of regions that are gone.
        limits.quotas.retain(|name, _| Files::new(&self.regions, name).record().exists());
        let result = change(&mut limits);
        if limits != before {
            record::write(&path, &limits).map_err(fail())?;
        }
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    const MIB: u64 = 1 << 20;
    const NOW: Duration = Duration::from_secs(1000);

    fn limits(host: Option<u64>, blue: Option<u64>, quotas: &[(&str, &str, u64)]) -> Limits {
        let quota = |(name, group, mib): &(&str, &str, u64)| {
            let quota =
                Quota { group: group.parse().unwrap(), bytes: Bytes::mib(*mib), short: None };
            (name.parse().unwrap(), quota)
        };
        Limits {
            host: host.map(Bytes::mib),
            groups: blue
                .map(|limit| ("blue".parse().unwrap(), Bytes::mib(limit)))
                .into_iter()
                .collect(),
            quotas: quotas.iter().map(quota).collect(),
        }
    }

    fn more(limits: &mut Limits, name: &str, stay_ms: u64) -> More {
        limits.more(&name.parse().unwrap(), Bytes::mib(64), Duration::from_millis(stay_ms), NOW)
    }

    fn ask(name: &str, mib: u64) -> More {
        More::Ask(name.parse().unwrap(), Bytes::mib(mib))
    }

    #[test]
    fn a_region_takes_only_the_free_quota() {
        let mut limits = limits(Some(20), None, &[("a", "blue", 16), ("b", "red", 3)]);
        assert_eq!(more(&mut limits, "a", 10), More::Quota(Bytes::mib(17)));
        assert_eq!(more(&mut limits, "a", 10), ask("b", 2), "how long pages stay in b is unknown");
        limits.set(&"b".parse().unwrap(), LEAST);
        // An eighth of its quota, and then the rest.
        assert_eq!(more(&mut limits, "a", 10), More::Quota(Bytes(17 * MIB + 17 * MIB / 8)));
        let left = 20 * MIB - 17 * MIB - 17 * MIB / 8 - LEAST.0;
        let joined = limits.join(&"c".parse().unwrap(), &"green".parse().unwrap(), Bytes::mib(8));
        assert_eq!(joined, Some(Bytes(left)));
    }

    #[test]
    fn the_cache_where_pages_stay_longest_yields_quota() {
        let mut limits = limits(
            None,
            Some(48),
            &[("a", "blue", 16), ("b", "blue", 16), ("c", "blue", 16), ("d", "red", 99)],
        );
        for (name, stay) in [("a", 100), ("b", 200), ("c", 110)] {
            limits.quotas.get_mut(&name.parse().unwrap()).unwrap().short =
                Some((NOW, Duration::from_millis(stay)));
        }
        assert_eq!(more(&mut limits, "a", 100), ask("b", 14));
        assert_eq!(more(&mut limits, "c", 110), ask("b", 14));
        assert_eq!(more(&mut limits, "b", 200), More::Nothing);
        assert_eq!(more(&mut limits, "b", 90), More::Nothing, "a little longer is not worth it");
        // A region that was not short of room lately counts as idle.
        limits.quotas.get_mut(&"c".parse().unwrap()).unwrap().short =
            Some((NOW - FRESH, Duration::ZERO));
        assert_eq!(more(&mut limits, "a", 100), ask("c", 12));
        // No limit covers d.
        assert_eq!(more(&mut limits, "d", 1), More::Nothing);
    }

    #[test]
    fn a_new_limit_is_divided_as_what_there_is() {
        let limits =
            limits(Some(99), None, &[("a", "blue", 32), ("b", "blue", 16), ("c", "red", 16)]);
        let of = |group: Option<&str>, limit: u64| -> Vec<u64> {
            let group = group.map(|group| group.parse().unwrap());
            let parts = limits.divide(group.as_ref(), Bytes(limit)).unwrap();
            assert!(parts.iter().map(|(_, bytes)| bytes.0).sum::<u64>() <= limit);
            parts.iter().map(|(_, bytes)| bytes.0 / MIB).collect()
        };
        assert_eq!(of(None, 64 * MIB), [32, 16, 16]);
        assert_eq!(of(None, 32 * MIB), [15, 8, 8]);
        assert_eq!(of(Some("blue"), 24 * MIB), [15, 8]);
        assert_eq!(of(Some("blue"), 999 * MIB), [32, 16]);
        assert_eq!(of(None, 3 * LEAST.0), [0, 0, 0]);
        assert_eq!(limits.divide(None, Bytes(3 * LEAST.0 - 1)), None);
    }
}
