//! The disk caches of a host's groups, which its agent keeps running while VMs need them.
//!
//! A cache is a process of its own, and outlives the agent. One that an agent started ends by
//! itself when no VM has needed it for a while; one that an operator started is left alone.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use aquifer_disk_cache as disk_cache;
use aquifer_page::Group;
use aquifer_vm::VmError;
use aquifer_vm::process::{cache_needed, client as vms};

use crate::News;
use crate::agreement::Agreements;
use crate::pause::Pause;

/// How long a cache may take to answer.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How long a cache that no agent started may be gone before the agent starts one: its
/// service may start it again, with options that the agent does not know.
const GRACE: Duration = Duration::from_secs(30);

/// A cache that an agent started ends when no VM has needed it for this time.
const UNUSED: &str = "1m";

/// The disk caches of this host's groups.
#[derive(Debug)]
pub struct Caching {
    exe: PathBuf,
    run_dir: PathBuf,
    agreements: Agreements,
    kept: BTreeMap<Group, Kept>,
}

/// The cache of a group.
#[derive(Debug, Default)]
struct Kept {
    child: Option<(Child, Instant)>,
    /// Whether a cache ran that no agent started.
    found: bool,
    pause: Pause,
}

impl Caching {
    /// Makes the keeper of disk caches on the host whose processes have their files in `run_dir`.
    /// `exe` is the program `aquifer`.
    pub fn new(exe: &Path, run_dir: &Path, agreements: Agreements) -> Self {
        let (exe, run_dir) = (exe.to_owned(), run_dir.to_owned());
        Self { exe, run_dir, agreements, kept: BTreeMap::new() }
    }

    /// Starts the caches that VMs need and do not have. The caller calls this about once a second.
    ///
    /// # Errors
    /// [`VmError`] if the VMs cannot be listed.
    pub fn step(&mut self) -> Result<Vec<News>, VmError> {
        let vms = vms::list(&self.run_dir)?;
        let needed: BTreeSet<_> = vms.iter().filter_map(cache_needed).collect();
        let mut news = Vec::new();
        for (group, kept) in &mut self.kept {
            news.extend(kept.reap(group));
        }
        self.kept.retain(|group, kept| kept.child.is_some() || needed.contains(group));
        for group in needed {
            let kept = self.kept.entry(group.clone()).or_default();
            if kept.child.is_some() || !kept.pause.is_over() {
                continue;
            }
            // A cache that does not answer in time exists.
            let regions = self.run_dir.join("regions");
            match disk_cache::status_within(&regions, &group, TIMEOUT) {
                Ok(None) => {}
                status => {
                    // An earlier agent started one that ends by itself.
                    kept.found = !matches!(status, Ok(Some(status)) if status.ends_unused);
                    continue;
                }
            }
            if std::mem::take(&mut kept.found) {
                kept.pause.hold(GRACE);
                continue;
            }
            // The cache itself could only say so to its log.
            let known = self.agreements.get(&group).map_err(io::Error::other);
            let started =
                known.and_then(|_| start(&self.exe, &self.run_dir, &self.agreements, &group));
            let (failed, what) = match started {
                Ok(child) => {
                    let pid = child.id();
                    kept.child = Some((child, Instant::now()));
                    (false, format!("starts a disk cache for group {group}: process {pid}"))
                }
                Err(error) => {
                    kept.pause.begin(Duration::ZERO);
                    (true, format!("cannot start a disk cache for group {group}: {error}"))
                }
            };
            news.push(News { group, what, failed });
        }
        Ok(news)
    }
}

impl Kept {
    /// Takes note of the end of the cache that this agent started.
    fn reap(&mut self, group: &Group) -> Option<News> {
        let (child, since) = self.child.as_mut()?;
        let lived = since.elapsed();
        let why = match child.try_wait() {
            Ok(None) => return None,
            Ok(Some(status)) if status.success() => None,
            Ok(Some(status)) => Some(status.to_string()),
            Err(error) => Some(error.to_string()),
        };
        self.child = None;
        let (failed, what) = match why {
            None => {
                self.pause.forget();
                (false, format!("the disk cache for group {group} has ended"))
            }
            Some(why) => {
                let pause = humantime::format_duration(self.pause.begin(lived));
                (true, format!("starts another disk cache for group {group} in {pause}: {why}"))
            }
        };
        Some(News { group: group.clone(), what, failed })
    }
}

/// Starts a cache in a process group of its own: a signal to the agent's does not reach it. Its log
/// goes where the agent's goes.
fn start(exe: &Path, run_dir: &Path, agreements: &Agreements, group: &Group) -> io::Result<Child> {
    let mut command = Command::new(exe);
    command.arg("--run-dir").arg(run_dir);
    command.args(["serve", "disk-cache", group.as_str(), "--until-unused", UNUSED]);
    command.env("AQUIFER_GROUPS", agreements.directory()).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()
}
