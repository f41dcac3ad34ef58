//! The disk caches of a host's groups, which its agent keeps running while VMs need them.
//!
//! A cache is a process of its own, and outlives the agent. One that an agent started ends by
//! itself when no VM has needed it for a while; one that an operator started is left alone.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::time::Duration;

use aquifer_disk_cache as disk_cache;
use aquifer_page::Group;
use aquifer_vm::VmError;
use aquifer_vm::process::{cache_needed, client as vms};

use crate::News;
use crate::agreement::Agreements;
use crate::helper::{Helper, Programs};

/// How long a cache may take to answer.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How long a cache that no agent started may be gone before the agent starts one: its
/// service may start it again, with options that the agent does not know.
const RESTART_GRACE: Duration = Duration::from_secs(30);

/// A cache that an agent started ends when no VM has needed it for this time.
const UNUSED_TIME: &str = "1m";

/// The disk caches of this host's groups.
#[derive(Debug)]
pub struct Caching {
    programs: Programs,
    kept: BTreeMap<Group, Kept>,
}

/// The cache of a group.
#[derive(Debug, Default)]
struct Kept {
    cache: Helper,
    /// Whether a cache ran that no agent started.
    found: bool,
}

impl Caching {
    /// Makes the keeper of disk caches on the host whose processes have their files in `run_dir`.
    /// `exe` is the program `aquifer`.
    pub fn new(exe: &Path, run_dir: &Path, agreements: Agreements) -> Self {
        Self { programs: Programs::new(exe, run_dir, agreements), kept: BTreeMap::new() }
    }

    /// Starts the caches that VMs need and do not have. The caller calls this about once a second.
    ///
    /// # Errors
    /// [`VmError`] if the VMs cannot be listed.
    pub fn step(&mut self) -> Result<Vec<News>, VmError> {
        let vms = vms::list(&self.programs.run_dir)?;
        let needed: BTreeSet<_> = vms.iter().filter_map(cache_needed).collect();
        let mut news = Vec::new();
        for (group, kept) in &mut self.kept {
            news.extend(kept.reap(group));
        }
        self.kept.retain(|group, kept| kept.cache.runs() || needed.contains(group));
        for group in needed {
            let kept = self.kept.entry(group.clone()).or_default();
            news.extend(kept.step(group, &self.programs));
        }
        Ok(news)
    }
}

impl Kept {
    /// Takes note of the end of the cache that this agent started.
    fn reap(&mut self, group: &Group) -> Option<News> {
        let end = self.cache.reap()?;
        let failed = !end.is_success();
        let what = if failed {
            let pause = humantime::format_duration(self.cache.fail(end.lived));
            let status = end.status.map_or_else(String::new, |status| format!(": {status}"));
            format!("starts another disk cache for group {group} in {pause}{status}")
        } else {
            self.cache.forget_failures();
            format!("the disk cache for group {group} has ended")
        };
        Some(News { group: group.clone(), what, failed })
    }

    /// Starts the cache that a VM needs, unless there is one.
    fn step(&mut self, group: Group, programs: &Programs) -> Option<News> {
        if !self.cache.may_start() {
            return None;
        }
        // A cache that does not answer in time exists.
        let regions = programs.run_dir.join("regions");
        match disk_cache::status_within(&regions, &group, TIMEOUT) {
            Ok(None) => {}
            status => {
                // An earlier agent started one that ends by itself.
                self.found = !matches!(status, Ok(Some(status)) if status.ends_unused);
                return None;
            }
        }
        if std::mem::take(&mut self.found) {
            self.cache.hold(RESTART_GRACE);
            return None;
        }
        let started = self.cache.start(|| {
            // The cache itself could only say so to its log, which is the agent's.
            programs.agreements.get(&group).map_err(io::Error::other)?;
            let words = ["serve", "disk-cache", group.as_str(), "--until-unused", UNUSED_TIME];
            programs.command(&words).spawn()
        });
        let failed = started.is_err();
        let what = match started {
            Ok(pid) => format!("starts a disk cache for group {group}: process {pid}"),
            Err(error) => format!("cannot start a disk cache for group {group}: {error}"),
        };
        Some(News { group, what, failed })
    }
}
