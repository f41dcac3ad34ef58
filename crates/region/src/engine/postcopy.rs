//! Post-copy: the pages that were left behind at the source host, while the program already runs
//! here. This engine asks for them, and first for those that threads wait for.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aquifer_page::PAGE_SIZE;
use aquifer_region_client::Run;

use super::Engine;
use super::evict::BATCH;
use super::outgoing::{Sink, as_runs};
use crate::error::RegionError;
use crate::file::runs;
use crate::handover::{Frame, PAGES};
use crate::lock;
use crate::table::{Page, Place};

impl Engine {
    /// Returns the pages to ask for next: pages that threads wait for, or else the next ones after
    /// `cursor`. Makes room for them first.
    ///
    /// # Errors
    /// No room can be made.
    pub fn next_postcopy(&self, cursor: Option<&mut u64>) -> Result<Vec<Run>, RegionError> {
        let mut pages = Vec::new();
        let mut cache = lock(&self.cache);
        let comes = |page: &u64| self.table.get(*page).awaiting_source;
        while pages.len() < PAGES as usize {
            let Some(page) = cache.awaiting_source.pop_front() else { break };
            if comes(&page) {
                pages.push(page);
            }
        }
        drop(cache);
        if let (true, Some(cursor)) = (pages.is_empty(), cursor) {
            let all = self.table.pages();
            let from = std::mem::take(cursor).min(all);
            pages.extend((from..all).chain(0..from).filter(comes).take(PAGES as usize));
            *cursor = pages.last().map_or(0, |last| last + 1);
        }
        pages.sort_unstable();
        pages.dedup();
        let made = self.make_room_for(pages.len() as u64, None);
        // The threads that wait for them continue to wait.
        made.inspect_err(|_| lock(&self.cache).awaiting_source.extend(&pages))?;
        Ok(as_runs(&pages))
    }

    /// Evicts pages until as many as this have room within the limit. Fails once no page has left
    /// for as long as `patience`.
    pub(super) fn make_room_for(
        &self,
        pages: u64,
        patience: Option<Duration>,
    ) -> Result<(), RegionError> {
        let evicted = || self.counters.evicted.load(Ordering::Relaxed);
        let mut progress = (evicted(), Instant::now());
        let lacks = || {
            let cache = lock(&self.cache);
            cache.frames + pages > cache.limit.max(pages)
        };
        // While the region is frozen, nothing can leave, so the cache may exceed its limit for that
        // moment.
        while lacks() && !self.is_frozen() && !self.has_ended() {
            if evicted() > progress.0 {
                progress = (evicted(), Instant::now());
            } else if patience.is_some_and(|patience| progress.1.elapsed() > patience) {
                let why = "no page can leave the cache to make room for pages of the lease";
                return Err(RegionError::Refused(why.to_owned()));
            }
            self.evict(self.control_worker(), BATCH)?;
        }
        Ok(())
    }

    /// Takes pages that were left behind and have arrived. Ignores pages that were discarded or
    /// came since.
    ///
    /// # Errors
    /// The pages are not in the region, or cannot be put into its file.
    pub(super) fn accept_postcopy(&self, run: Run, data: &[u8]) -> Result<(), RegionError> {
        self.check_contents(run, data)?;
        let mut cache = lock(&self.cache);
        let is_due = |page: &u64| {
            let is = self.table.get(*page);
            is.awaiting_source && matches!(is.place, Place::Zero | Place::Remote)
        };
        let due: Vec<u64> = (run.first..run.end()).filter(is_due).collect();
        for page in &due {
            self.take(&mut cache, *page, self.table.get(*page), Place::Filling);
        }
        drop(cache);
        let mut failed = Ok(());
        for run_of_due in runs(due) {
            let at = |page: u64| (page - run.first) as usize * PAGE_SIZE;
            let content = &data[at(run_of_due.start)..at(run_of_due.end)];
            let put = self.file.put(run_of_due.start, content);
            self.are_put(run_of_due, put.is_ok(), |is| Page {
                dirty: true,
                awaiting_source: false,
                ..is
            });
            failed =
                failed.and(put.map_err(RegionError::io("cannot put pages into the region's file")));
        }
        failed
    }

    /// Sends pages that were left behind here.
    ///
    /// # Errors
    /// A page is not here, the region is still this host's, or `sink` fails.
    pub fn send_postcopy(&self, pages: &[Run], sink: &mut Sink<'_>) -> Result<(), RegionError> {
        if !self.is_frozen() {
            return Err(RegionError::Misuse(
                "the region belongs to this host, so no page was left behind".to_owned(),
            ));
        }
        let mut buffer = vec![0; PAGES as usize * PAGE_SIZE];
        for run in pages {
            self.check(*run)?;
            if run.count > PAGES
                || !(run.first..run.end()).all(|page| self.table.get(page).has_frame())
            {
                let why = "the destination asks for pages that were not left behind here";
                return Err(RegionError::Misuse(why.to_owned()));
            }
            let data = &mut buffer[..run.count as usize * PAGE_SIZE];
            self.file
                .read(run.first, data)
                .map_err(RegionError::io("cannot read the region's file"))?;
            let sent = sink(&Frame::Pages(*run), data);
            sent.map_err(RegionError::io("cannot send to the other host"))?;
        }
        Ok(())
    }
}
