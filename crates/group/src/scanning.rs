//! The scanners of a host's groups, which its agent keeps running.
//!
//! A scanner is a process of its own: it outlives the agent, and the next agent finds it by the
//! lock that it holds. An operator may also start one. This module lets that one run, and never
//! ends it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Child, ExitStatus};

use aquifer_dedup::{RunningScanner, ScannerFiles, ScannerTerms};
use aquifer_page::Group;
use aquifer_region::process::{GroupFiles, client as regions};
use rustix::process::Pid;

use crate::News;
use crate::agreement::{Agreement, Agreements, GroupError};
use crate::helper::{Helper, Programs};

pub use aquifer_dedup::RunningScanner as Found;

/// The number of regions that may share pages with each other.
const SOME: usize = 2;

/// Returns the running scanners of the host whose processes have their files in `run_dir`.
///
/// # Errors
/// The system's.
pub fn all(run_dir: &Path) -> io::Result<Vec<(Group, RunningScanner)>> {
    let directory = run_dir.join("regions");
    let mut all = Vec::new();
    for group in ScannerFiles::all(&directory)? {
        let running = ScannerFiles::new(&directory, &group).running()?;
        all.extend(running.map(|running| (group, running)));
    }
    Ok(all)
}

/// The scanners of this host's groups.
#[derive(Debug)]
pub struct Scanning {
    programs: Programs,
    /// Whether groups get scanners; if not, those of an earlier agent end.
    scans: bool,
    kept: BTreeMap<Group, Kept>,
}

/// The scanner of a group.
#[derive(Debug, Default)]
struct Kept {
    scanner: Helper,
    /// A scanner that an operator or an earlier agent started.
    found: Option<Pid>,
    /// The scanner that was told to end.
    ends: Option<Pid>,
}

/// What a group needs now.
#[derive(Clone, Debug, PartialEq)]
enum Need {
    Scanner(ScannerTerms),
    /// None, for this reason.
    None(&'static str),
    /// The agreement or a region cannot be read: all stays as it is.
    Unknown,
}

impl Scanning {
    /// Makes the keeper of scanners on the host whose processes have their files in `run_dir`.
    /// `exe` is the program `aquifer`.
    pub fn new(exe: &Path, run_dir: &Path, agreements: Agreements, scans: bool) -> Self {
        Self { programs: Programs::new(exe, run_dir, agreements), scans, kept: BTreeMap::new() }
    }

    /// Looks at all groups: starts and ends scanners. The caller calls this about once a second.
    ///
    /// # Errors
    /// [`GroupError`] if the agreements or the regions cannot be listed. No scanner ends then.
    pub fn step(&mut self) -> Result<Vec<News>, GroupError> {
        let directory = self.programs.run_dir.join("regions");
        let agreements: BTreeMap<_, _> = self.programs.agreements.each()?.into_iter().collect();
        let members = Members::count(&directory)?;
        let left = ScannerFiles::all(&directory).map_err(|source| GroupError::Io {
            what: "listing the scanners beside",
            path: directory.clone(),
            source,
        })?;
        let mut groups: BTreeSet<_> = left.into_iter().chain(self.kept.keys().cloned()).collect();
        groups.extend(agreements.keys().cloned());
        let mut news = Vec::new();
        for group in groups {
            let files = ScannerFiles::new(&directory, &group);
            let running = match files.running() {
                Ok(running) => running,
                Err(error) => {
                    tracing::warn!(%group, "cannot find the group's scanner: {error}");
                    continue;
                }
            };
            let shares = running.is_some() || has_frames(&directory, &group);
            let agreement = agreements.get(&group).map(Result::as_ref);
            let need = self.need(agreement, members.of(&group), shares);
            let kept = self.kept.entry(group.clone()).or_default();
            kept.reap(&group, &files, &mut news);
            let start = || start(&self.programs, &group, &files);
            kept.step(&group, (&files, running, need), start, &mut news);
        }
        self.kept.retain(|group, kept| kept.is_of_use() || agreements.contains_key(group));
        Ok(news)
    }

    /// Returns what a group with so many regions needs; `None` if their number is unknown.
    fn need(
        &self,
        agreement: Option<Result<&Agreement, &GroupError>>,
        regions: Option<usize>,
        shares: bool,
    ) -> Need {
        match (agreement, regions) {
            _ if !self.scans => Need::None("the agent's configuration says scan = false"),
            (None, _) => Need::None("its agreement is gone"),
            (Some(Err(_)), _) | (_, None) => Need::Unknown,
            (_, Some(0)) => Need::None("it has no region here"),
            // What one region shares with itself pays for no scanner. But frames that no other
            // region shares any more must become free.
            (Some(Ok(agreement)), Some(regions)) if regions >= SOME || shares => {
                Need::Scanner(ScannerTerms {
                    by_agent: true,
                    scan: agreement.scan.clone(),
                    cgroup: agreement.cgroup.clone(),
                })
            }
            _ => Need::None("it has one region here, which shares nothing"),
        }
    }
}

impl Kept {
    fn is_of_use(&self) -> bool {
        self.scanner.runs() || self.found.is_some() || self.ends.is_some()
    }

    /// Takes note of the end of the scanner that this agent started.
    fn reap(&mut self, group: &Group, files: &ScannerFiles, news: &mut Vec<News>) {
        let Some(end) = self.scanner.reap() else { return };
        let was_told = self.ends.is_some_and(|pid| end.is_of(pid));
        if was_told || end.is_success() {
            // It also ends by itself when the group has no region left.
            self.scanner.forget_failures();
            return;
        }
        let pause = self.scanner.fail(end.lived);
        let why = end.status.map_or_else(String::new, |status| last_words(files, status));
        let pause = humantime::format_duration(pause);
        news.push(News {
            group: group.clone(),
            what: format!("starts another scanner for group {group} in {pause}: {why}"),
            failed: true,
        });
    }

    fn step(
        &mut self,
        group: &Group,
        (files, running, need): (&ScannerFiles, Option<RunningScanner>, Need),
        start: impl FnOnce() -> io::Result<Child>,
        news: &mut Vec<News>,
    ) {
        let mut tell = |what: String, failed: bool| {
            news.push(News { group: group.clone(), what, failed });
        };
        match (need, running) {
            (Need::Unknown, _) => {}
            (Need::Scanner(terms), Some(running)) => {
                if running.terms.as_ref().is_some_and(|now| now.by_agent && *now != terms) {
                    let why = "its terms have changed, and another one follows";
                    self.end(group, (files, running.pid, why), &mut tell);
                    return;
                }
                let is_own = self.scanner.is(running.pid);
                if !is_own && self.found.replace(running.pid) != Some(running.pid) {
                    let by = match running.terms {
                        Some(ScannerTerms { by_agent: true, .. }) => "an earlier agent",
                        _ => "an operator",
                    };
                    let pid = running.pid.as_raw_nonzero();
                    tell(
                        format!("keeps scanner {pid} of group {group}, which {by} started"),
                        false,
                    );
                }
            }
            (Need::Scanner(_), None) => {
                self.found = None;
                if !self.scanner.may_start() {
                    return;
                }
                match self.scanner.start(start) {
                    Ok(pid) => {
                        tell(format!("starts a scanner for group {group}: process {pid}"), false);
                    }
                    Err(error) => {
                        tell(format!("cannot start a scanner for group {group}: {error}"), true);
                    }
                }
            }
            (Need::None(why), Some(running)) => {
                let is_own = self.scanner.is(running.pid);
                // A scanner with unknown terms may be an operator's.
                if running.terms.as_ref().map_or(is_own, |terms| terms.by_agent) {
                    self.end(group, (files, running.pid, why), &mut tell);
                }
            }
            (Need::None(_), None) => {
                (self.found, self.ends) = (None, None);
                self.scanner.forget_failures();
            }
        }
    }

    fn end(
        &mut self,
        group: &Group,
        (files, pid, why): (&ScannerFiles, Pid, &str),
        tell: &mut impl FnMut(String, bool),
    ) {
        let ended = files.end(pid);
        if self.ends.replace(pid) == Some(pid) {
            return;
        }
        let pid = pid.as_raw_nonzero();
        match ended {
            Ok(()) => tell(format!("ends scanner {pid} of group {group}: {why}"), false),
            Err(error) => tell(format!("cannot end scanner {pid} of group {group}: {error}"), true),
        }
    }
}

fn start(programs: &Programs, group: &Group, files: &ScannerFiles) -> io::Result<Child> {
    files.create()?;
    let mut command = programs.command(&["serve", "dedup", group.as_str(), "--by-agent"]);
    command.stderr(File::create(files.log())?).spawn()
}

/// Returns why a scanner ended: the last line of its log, or its status.
fn last_words(files: &ScannerFiles, status: ExitStatus) -> String {
    let log = fs::read_to_string(files.log()).unwrap_or_default();
    let last = log.lines().rfind(|line| !line.trim().is_empty());
    let said = last.map(|line| format!(" and said: {}", line.trim())).unwrap_or_default();
    format!("the last one ended with {status}{said}")
}

fn has_frames(directory: &Path, group: &Group) -> bool {
    GroupFiles::new(directory, group).frames().exists()
}

/// The number of each group's regions on this host.
#[derive(Debug, Default)]
struct Members {
    regions: BTreeMap<Group, usize>,
    /// Whether the record of a region cannot be read.
    is_partial: bool,
}

impl Members {
    fn count(directory: &Path) -> Result<Self, GroupError> {
        let mut members = Self::default();
        for files in regions::list(directory)? {
            match regions::record(&files) {
                Ok(spec) => *members.regions.entry(spec.group).or_default() += 1,
                Err(error) => {
                    tracing::debug!(region = %files.name(), "cannot read the region: {error}");
                    members.is_partial = true;
                }
            }
        }
        Ok(members)
    }

    /// Returns the number; `None` if a region that cannot be read may be another one of the group.
    fn of(&self, group: &Group) -> Option<usize> {
        let known = self.regions.get(group).copied().unwrap_or(0);
        (known >= SOME || !self.is_partial).then_some(known)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;
    use crate::agreement::GroupEncryption;

    #[test]
    fn a_group_has_a_scanner_while_its_regions_may_share() {
        let dir = tempfile::tempdir().unwrap();
        let all = Agreements::of(dir.path());
        let mut scanning = Scanning::new(Path::new("aquifer"), dir.path(), all, true);
        let blue = Agreement::new("blue".parse().unwrap(), GroupEncryption::Off);
        let wrong = GroupError::Unknown(blue.name.clone());
        let gets = |scanning: &Scanning, regions, shares| {
            matches!(scanning.need(Some(Ok(&blue)), regions, shares), Need::Scanner(_))
        };
        for (regions, shares, scanner) in
            [(0, true, false), (1, false, false), (1, true, true), (2, false, true)]
        {
            assert_eq!(gets(&scanning, Some(regions), shares), scanner, "{regions} {shares}");
        }
        assert_eq!(scanning.need(Some(Ok(&blue)), None, false), Need::Unknown);
        assert_eq!(scanning.need(Some(Err(&wrong)), Some(2), true), Need::Unknown);
        let gone = scanning.need(None, Some(2), true);
        assert!(matches!(gone, Need::None(why) if why.contains("agreement")), "{gone:?}");
        scanning.scans = false;
        assert!(!gets(&scanning, Some(2), true));
    }
}
