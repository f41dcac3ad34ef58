//! The regions of a group on a host, as its scanner and the balancer see them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, FrameIndex, Group, PAGE_SIZE, PageIndex, RegionName};
use aquifer_procfs::process::cpu_seconds;
use aquifer_region::process::{Files, View, client};
use aquifer_region::{Merged, Proposal, RegionError, mappings_left};
use aquifer_vm::process::client as vms;

use crate::scan_history::ScanHistory;

/// Proposals that are sent together.
const BATCH: usize = 256;

/// Greatest share of its permitted mappings that sharing may bring a program to: beyond all, the
/// program's own mappings fail.
const ROOM: f64 = 0.75;

/// How often a program's mappings are counted.
const LOOK: Duration = Duration::from_secs(1);

/// The group's regions on this host.
#[derive(Debug)]
pub struct Members {
    directory: PathBuf,
    group: Group,
    pub(crate) all: Vec<Member>,
}

/// The outcome of a search for regions.
#[derive(Clone, Copy, Debug)]
pub struct Looked {
    /// Whether the members or their order have changed.
    pub changed: bool,
    /// Whether all regions could be opened. The frames of one that could not are unknown.
    pub all_known: bool,
}

impl Members {
    /// Makes the list of the group's regions in `directory`, which is empty until [`Self::look`].
    pub fn new(directory: &Path, group: &Group) -> Self {
        Self { directory: directory.to_owned(), group: group.clone(), all: Vec::new() }
    }

    /// Adds new regions, and drops vanished ones.
    ///
    /// # Errors
    /// If the directory cannot be listed.
    pub fn look(&mut self) -> Result<Looked, RegionError> {
        let before: Vec<_> = self.all.iter().map(|member| member.name().clone()).collect();
        self.all.retain_mut(Member::is_there);
        let mut all_known = true;
        for files in client::list(&self.directory)? {
            if self.all.iter().any(|member| member.name() == files.name()) {
                continue;
            }
            match Member::of(&files, &self.group) {
                Ok(member) => self.all.extend(member),
                Err(error) => {
                    tracing::debug!(region = %files.name(), "cannot read the region yet: {error}");
                    all_known = false;
                }
            }
        }
        let changed = !self.all.iter().map(Member::name).eq(&before);
        Ok(Looked { changed, all_known })
    }

    /// Returns the VMs whose memory the regions are.
    pub fn vms(&self) -> Vec<aquifer_vm::process::Files> {
        self.all.iter().filter_map(Member::vm).collect()
    }

    /// Counts the pages of each frame.
    pub fn sharers(&self) -> HashMap<FrameIndex, u64> {
        let mut sharers = HashMap::new();
        for frame in self.all.iter().flat_map(Member::shared) {
            *sharers.entry(frame).or_default() += 1;
        }
        sharers
    }

    /// Returns the contribution of each region to the saved memory: the saving of each frame is
    /// divided equally among its pages.
    pub fn contributed(&self, sharers: &HashMap<FrameIndex, u64>) -> BTreeMap<RegionName, Bytes> {
        let part = |frame| {
            let pages = sharers.get(&frame).copied().unwrap_or(1);
            PAGE_SIZE as f64 * (pages - 1) as f64 / pages as f64
        };
        let of = |member: &Member| Bytes(member.shared().map(part).sum::<f64>() as u64);
        self.all.iter().map(|member| (member.name().clone(), of(member))).collect()
    }
}

#[derive(Debug)]
pub(crate) struct Member {
    files: Files,
    view: View,
    history: ScanHistory,
    proposals: Vec<Proposal>,
    /// Pages that can be proposed before mappings are counted again.
    room: u64,
    looked: Option<Instant>,
}

impl Member {
    /// Opens a region, if it belongs to this group.
    pub(crate) fn of(files: &Files, group: &Group) -> Result<Option<Self>, RegionError> {
        if client::record(files)?.group != *group {
            return Ok(None);
        }
        let view = View::open(files)?;
        if !view.is_of(files) || client::record(files)?.group != *group {
            return Ok(None);
        }
        let (files, history) = (files.clone(), ScanHistory::new(view.pages()));
        Ok(Some(Self { files, view, history, proposals: Vec::new(), room: 0, looked: None }))
    }

    pub(crate) fn name(&self) -> &RegionName {
        self.files.name()
    }

    /// Looks at the region again; returns whether it still exists.
    pub(crate) fn is_there(&mut self) -> bool {
        self.view.look();
        self.view.is_of(&self.files)
    }

    pub(crate) fn pages(&self) -> u64 {
        self.view.pages()
    }

    /// Returns the frame of each shared page.
    pub(crate) fn shared(&self) -> impl Iterator<Item = FrameIndex> {
        self.view.shared().map(|(_, frame)| frame)
    }

    pub(crate) fn runs(&self) -> u64 {
        let mut runs = 0;
        let mut next = None;
        for (page, frame) in self.view.shared() {
            runs += u64::from(next != Some((page, frame)));
            next = Some((PageIndex(page.0 + 1), FrameIndex(frame.0 + 1)));
        }
        runs
    }

    pub(crate) fn is_here(&self, page: PageIndex) -> bool {
        self.view.is_here(page)
    }

    pub(crate) fn read(&self, first: PageIndex, into: &mut [u8]) -> Result<(), RegionError> {
        self.view.read(first, into)
    }

    /// Returns the next run of consecutive pages from `from` that this pass must look at, at most
    /// `most` long. Also returns the page to continue at, and the number of shared pages skipped.
    pub(crate) fn next_run(&self, from: u64, most: u64, pass: u64) -> (Range<u64>, u64, u64) {
        let end = self.pages().min(from + 16 * most.max(1));
        let is_meant =
            |page: &u64| self.view.is_here(PageIndex(*page)) && self.history.is_due(*page, pass);
        let first = (from..end).find(is_meant);
        let shared = (from..first.unwrap_or(end))
            .filter(|page| self.view.is_shared(PageIndex(*page)))
            .count() as u64;
        let Some(first) = first else { return (0..0, end, shared) };
        let last = end.min(first + most);
        let run = first..(first..last).find(|page| !is_meant(page)).unwrap_or(last);
        (run.clone(), run.end, shared)
    }

    /// Returns whether the page has the same content as at the last look.
    pub(crate) fn is_calm(&mut self, page: PageIndex, fingerprint: u64) -> bool {
        self.history.is_calm(page.0, fingerprint)
    }

    /// Notes a proposal; returns whether a batch is complete.
    pub(crate) fn offer(&mut self, page: PageIndex, frame: Option<FrameIndex>) -> bool {
        self.proposals.push(Proposal { page, frame });
        self.proposals.len() >= BATCH
    }

    /// Sends the noted proposals to the region's engine.
    pub(crate) fn propose(&mut self) -> Result<Merged, RegionError> {
        let mut proposals = std::mem::take(&mut self.proposals);
        if proposals.is_empty() {
            return Ok(Merged::default());
        }
        if self.looked.is_none_or(|looked| looked.elapsed() > LOOK) {
            self.room = room(&client::status(&self.files)?.processes);
            self.looked = Some(Instant::now());
        }
        let mut room = self.room;
        // Sharing a page in the middle of a mapping adds two mappings.
        proposals.retain(|proposal| {
            let fits = proposal.frame.is_none() || room >= 2;
            room = room.saturating_sub(if proposal.frame.is_some() { 2 } else { 0 });
            fits
        });
        self.room = room;
        client::share(&self.files, proposals)
    }

    /// Returns the CPU seconds of the engine and its programs, and the bytes fetched, written back,
    /// and swapped by the guest.
    pub(crate) fn activity(&self) -> (f64, Bytes) {
        let Ok(status) = client::status(&self.files) else { return (0.0, Bytes::ZERO) };
        let processes = status.processes.iter().chain([&status.pid]);
        let pages =
            status.counts.remote_faults + status.counts.prefetched + status.counts.written_back;
        let guest = self.vm().and_then(|vm| vms::balloon(&vm, None).ok()?.figures);
        let swapped = guest.map_or(0, |guest| guest.swap_in + guest.swap_out);
        (processes.map(|pid| cpu_seconds(*pid)).sum(), Bytes(pages * PAGE_SIZE as u64 + swapped))
    }

    /// Returns the VM whose memory the region is, if there is one.
    fn vm(&self) -> Option<aquifer_vm::process::Files> {
        vms::of_region(self.files.run_dir()?, self.files.name())
    }

    pub(crate) fn broken(&self) -> u64 {
        client::status(&self.files).map_or(0, |status| status.counts.cow_breaks)
    }
}

/// Returns how many more mappings each of these processes may have.
fn room(processes: &[u32]) -> u64 {
    processes.iter().map(|pid| mappings_left(*pid, ROOM)).min().unwrap_or(0)
}
