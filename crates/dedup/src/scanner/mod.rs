//! The scanner of a group.

mod frames;
mod run;
mod totals;

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use std::path::{Path, PathBuf};

use aquifer_control::group::scan_rate::RateDecision;
use aquifer_page::{FrameIndex, Group, PAGE_SIZE, PageIndex, is_zero};
use aquifer_region::process::{GroupFiles, client};
use twox_hash::XxHash3_64;

use self::frames::Frames;
pub use self::run::join_cgroup;
use crate::member::{Looked, Member, Members};
use crate::{ScanError, ScanReport, Sharing};

/// Pages that are read together.
const RUN: u64 = 64;

/// Pages that may be skipped for each page looked at, before [`Scanner::scan`] returns.
const PASSED: u64 = 16;

/// A map by fingerprint. Fingerprints need no further hashing, because their seed is secret.
type ByFingerprint<T> = HashMap<u64, T, BuildHasherDefault<AsItIs>>;

#[derive(Clone, Copy, Debug, Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, fingerprint: u64) {
        self.0 = fingerprint;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Numbers of pages since the scanner started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages looked at, or skipped because they are shared, as the kernel's KSM counts them.
    pub scanned: u64,
    /// Proposed pages that became shared.
    pub merged: u64,
    /// Pages of zeroes whose memory was freed.
    pub zero: u64,
    /// Proposed pages that had changed meanwhile.
    pub differ: u64,
    /// Passes over all pages.
    pub passes: u64,
}

/// The scanner of a group.
#[derive(Debug)]
pub struct Scanner {
    group: Group,
    directory: PathBuf,
    /// A random seed of the fingerprints, so that tenants can neither predict nor collide them.
    seed: u64,
    frames: Option<Frames>,
    members: Members,
    /// The frames by fingerprint.
    stable: ByFingerprint<FrameIndex>,
    /// Unchanged pages (member and page) by fingerprint.
    unstable: ByFingerprint<(usize, PageIndex)>,
    /// Position of the current pass (member and page).
    at: (usize, u64),
    counts: Counts,
}

impl Scanner {
    /// Makes the scanner of a group whose regions are in `directory`. There need not be any yet.
    pub fn new(directory: &Path, group: Group) -> Self {
        Self {
            members: Members::new(directory, &group),
            group,
            directory: directory.to_owned(),
            seed: getrandom::u64().expect("the kernel gives random numbers"),
            frames: None,
            stable: ByFingerprint::default(),
            unstable: ByFingerprint::default(),
            at: (0, 0),
            counts: Counts::default(),
        }
    }

    /// Returns the counts.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Adds new regions, drops vanished ones, and frees frames that no page shares any more. The
    /// caller calls this about once a second.
    ///
    /// # Errors
    /// [`ScanError`] if regions cannot be listed, the frames' file fails, or another scanner is at
    /// work.
    pub fn look(&mut self) -> Result<(), ScanError> {
        let Looked { changed, all_known } = self.members.look()?;
        if changed {
            // The numbers of the members have changed.
            self.unstable.clear();
            self.at = (0, 0);
        }
        if self.members.all.is_empty() || self.frames.as_ref().is_some_and(Frames::is_gone) {
            // The group's directory goes with its last region.
            self.frames = None;
            self.stable.clear();
            return Ok(());
        }
        if !all_known {
            return Ok(());
        }
        let shared = self.members.all.iter().flat_map(Member::shared);
        match &mut self.frames {
            Some(frames) => {
                let gone: HashSet<_> = frames.give_back_all_but(shared)?.into_iter().collect();
                if !gone.is_empty() {
                    self.stable.retain(|_, frame| !gone.contains(frame));
                }
            }
            None => {
                let files = GroupFiles::new(&self.directory, &self.group);
                let frames = Frames::open(&files, &self.group, shared)?;
                let mut page = vec![0; PAGE_SIZE];
                for frame in frames.used() {
                    frames.read(frame, &mut page)?;
                    self.stable.insert(XxHash3_64::oneshot_with_seed(self.seed, &page), frame);
                }
                self.frames = Some(frames);
            }
        }
        Ok(())
    }

    /// Looks at up to `most` pages, and at fewer if too many must be skipped. Returns the number of
    /// pages looked at.
    ///
    /// # Errors
    /// [`ScanError`] if the frames' file fails.
    pub fn scan(&mut self, most: u64) -> Result<u64, ScanError> {
        let all: u64 = self.members.all.iter().map(Member::pages).sum();
        let passes = all.min(most.saturating_mul(PASSED));
        let (mut looked, mut passed) = (0, 0);
        let mut buffer = vec![0; RUN as usize * PAGE_SIZE];
        while looked < most && passed < passes {
            let (which, page) = self.at;
            let Some(member) = self.members.all.get(which) else {
                self.at = (0, 0);
                self.unstable.clear();
                self.counts.passes += 1;
                continue;
            };
            let (run, next, shared) =
                member.next_run(page, RUN.min(most - looked), self.counts.passes);
            passed += next - page;
            self.counts.scanned += shared;
            self.at = if next < member.pages() { (which, next) } else { (which + 1, 0) };
            if run.is_empty() {
                continue;
            }
            let data = &mut buffer[..(run.end - run.start) as usize * PAGE_SIZE];
            if member.read(PageIndex(run.start), data).is_err() {
                continue;
            }
            looked += run.end - run.start;
            for (page, data) in run.zip(data.chunks_exact(PAGE_SIZE)) {
                self.look_at(which, PageIndex(page), data)?;
            }
        }
        self.counts.scanned += looked;
        for which in 0..self.members.all.len() {
            self.propose(which);
        }
        Ok(looked)
    }

    fn look_at(&mut self, which: usize, page: PageIndex, data: &[u8]) -> Result<(), ScanError> {
        if is_zero(data) {
            self.offer(which, page, None);
            return Ok(());
        }
        let fingerprint = XxHash3_64::oneshot_with_seed(self.seed, data);
        if !self.members.all[which].is_calm(page, fingerprint) {
            return Ok(());
        }
        if let Some(frame) = self.stable.get(&fingerprint) {
            let frame = *frame;
            self.offer(which, page, Some(frame));
            return Ok(());
        }
        let Some((other, at)) = self.unstable.get(&fingerprint).copied() else {
            self.unstable.insert(fingerprint, (which, page));
            return Ok(());
        };
        let mut there = vec![0; PAGE_SIZE];
        let is_there = self.members.all[other].is_here(at)
            && self.members.all[other].read(at, &mut there).is_ok();
        if !is_there || there != data {
            // This page stands for both from now on.
            self.unstable.insert(fingerprint, (which, page));
            return Ok(());
        }
        let Some(frames) = &mut self.frames else { return Ok(()) };
        let frame = frames.put(data)?;
        self.stable.insert(fingerprint, frame);
        self.unstable.remove(&fingerprint);
        self.offer(other, at, Some(frame));
        self.offer(which, page, Some(frame));
        Ok(())
    }

    fn offer(&mut self, which: usize, page: PageIndex, frame: Option<FrameIndex>) {
        if self.members.all[which].offer(page, frame) {
            self.propose(which);
        }
    }

    fn propose(&mut self, which: usize) {
        match self.members.all[which].propose() {
            Ok(merged) => {
                self.counts.merged += merged.shared;
                self.counts.zero += merged.zero;
                self.counts.differ += merged.differ;
            }
            Err(error) => {
                let region = self.members.all[which].name();
                tracing::warn!(%region, "cannot share the region's pages: {error}");
            }
        }
    }

    /// Returns the members' sharing.
    fn sharing(&self) -> Sharing {
        Sharing::of(&self.members, &self.members.sharers())
    }

    /// Makes the report of a period.
    fn report(
        &self,
        sharing: Sharing,
        decision: RateDecision,
        payer: Option<&Group>,
        cpu_percent: f64,
    ) -> ScanReport {
        let payer = payer.unwrap_or(&self.group);
        ScanReport::new((&self.group, payer), sharing, &self.counts, decision, cpu_percent)
    }

    /// Unshares all pages of the group.
    ///
    /// # Errors
    /// [`ScanError`] if regions cannot be listed, or an engine fails.
    pub fn undo(directory: &Path, group: &Group) -> Result<(), ScanError> {
        for files in client::list(directory)? {
            if client::record(&files).is_ok_and(|spec| spec.group == *group) {
                client::unshare(&files)?;
            }
        }
        Ok(())
    }
}
