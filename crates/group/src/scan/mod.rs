//! Looking for equal pages of a group's regions on a host (Groups, section 4.1).
//!
//! One scanner a group, which sees no other group's pages, goes over all pages that are in the local caches of the group's regions, again and
//! again. Pages of zeroes are to take nothing. A page that is what it was when it was last looked at is compared with those that are shared
//! already (the stable set), and then with others that may not stay as they are (the unstable set, forgotten after each pass). One that stays as it is
//! and is like no other is looked at less and less often (`seen`). What it finds it proposes to the regions' engines, which compare the pages themselves, byte by byte, when nobody can write to them.
//!
//! What is shared is on record in files of the engines: a scanner that ends leaves it as it is, and the next one goes on.

mod frames;
pub mod payer;
mod report;
mod run;
mod seen;
mod totals;

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::path::{Path, PathBuf};

use aquifer_control::group::scan_rate::Verdict;
use aquifer_page::{Group, PAGE_SIZE, is_zero};
use aquifer_region::RegionError;
use aquifer_region::process::{GroupFiles, client};
use twox_hash::XxHash3_64;

use self::frames::Frames;
pub use self::report::{Report, Sharing, sharing};
pub use self::run::join_cgroup;
pub(crate) use self::seen::Seen;
use crate::member::{Looked, Member, Members};

/// Pages that are read together.
const RUN: u64 = 64;

/// So many times as many pages are passed over as are looked at, at most, before there is a rest.
const PASSED: u64 = 16;

/// Why there can be no scanner, or it cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// A file.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another one is at work.
    #[error(
        "the pages of group '{0}' are being looked at already, by another 'aquifer group scan'"
    )]
    Busy(Group),
    /// A region.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// What is found by a fingerprint, which needs no hashing any more: nobody knows what it is made with.
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

/// Pages since the scanner started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Looked at, or passed over as they are shared: as the kernel's KSM counts them.
    pub scanned: u64,
    /// Proposed, and shared.
    pub merged: u64,
    /// Of zeroes, that take nothing since.
    pub zero: u64,
    /// Proposed, and different by then.
    pub differ: u64,
    /// Passes over all pages.
    pub passes: u64,
}

/// The scanner of a group.
#[derive(Debug)]
pub struct Scanner {
    group: Group,
    directory: PathBuf,
    /// None of another scanner is alike: what a page's fingerprint is cannot be known, and equal fingerprints not be made.
    seed: u64,
    frames: Option<Frames>,
    members: Members,
    /// Frames by the fingerprints of their content.
    stable: ByFingerprint<u64>,
    /// Pages that were as they are a pass ago, by theirs: the member and the page.
    unstable: ByFingerprint<(usize, u64)>,
    /// Where the pass is: the member and the page.
    at: (usize, u64),
    counts: Counts,
}

impl Scanner {
    /// That of a group whose regions are in `directory`. There need not be any yet.
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

    /// What it has done.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Finds regions that have come and forgets those that are gone, and gives back frames that nobody shares any more. To be called now and then, such
    /// as once a second.
    ///
    /// # Errors
    /// [`ScanError`].
    pub fn look(&mut self) -> Result<(), ScanError> {
        let Looked { changed, all_known } = self.members.look()?;
        if changed {
            // Numbers of members are others now.
            self.unstable.clear();
            self.at = (0, 0);
        }
        if self.members.all.is_empty() || self.frames.as_ref().is_some_and(Frames::is_gone) {
            // Where there is no region there is no directory either.
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

    /// Looks at so many pages, or at fewer if that takes to pass over many that need not be looked at. Says at how many.
    ///
    /// # Errors
    /// [`ScanError`].
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
            if member.read(run.start, data).is_err() {
                continue;
            }
            looked += run.end - run.start;
            for (page, data) in run.zip(data.chunks_exact(PAGE_SIZE)) {
                self.look_at(which, page, data)?;
            }
        }
        self.counts.scanned += looked;
        for which in 0..self.members.all.len() {
            self.propose(which);
        }
        Ok(looked)
    }

    fn look_at(&mut self, which: usize, page: u64, data: &[u8]) -> Result<(), ScanError> {
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
            // This one stands for both from now on.
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

    fn offer(&mut self, which: usize, page: u64, frame: Option<u64>) {
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
                tracing::warn!(region = %self.members.all[which].name(), "shares nothing now: {error}")
            }
        }
    }

    /// What its members share now.
    fn sharing(&self) -> Sharing {
        Sharing::of(&self.members, &self.members.sharers())
    }

    /// How things are, for people.
    fn report(
        &self,
        sharing: Sharing,
        verdict: Verdict,
        payer: Option<&Group>,
        cpu_percent: f64,
    ) -> Report {
        let payer = payer.unwrap_or(&self.group);
        Report::new((&self.group, payer), sharing, &self.counts, verdict, cpu_percent)
    }

    /// Has nothing of the group be shared any more.
    ///
    /// # Errors
    /// [`ScanError`].
    pub fn undo(directory: &Path, group: &Group) -> Result<(), ScanError> {
        for files in client::list(directory)? {
            if client::record(&files).is_ok_and(|spec| spec.group == *group) {
                client::unshare(&files)?;
            }
        }
        Ok(())
    }
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ScanError {
    let path = path.to_owned();
    move |source| ScanError::Io { what, path, source }
}
