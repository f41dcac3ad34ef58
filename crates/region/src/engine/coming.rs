//! Pages that were left behind with the engine before this one, on another host, where the program runs here already (post-copy): they are asked
//! for, and first of all those that are waited for.

use aquifer_mapping::Run;
use aquifer_page::PAGE_SIZE;

use super::Engine;
use super::evict::BATCH;
use super::outgoing::{Sink, as_runs};
use crate::error::RegionError;
use crate::file::runs;
use crate::handover::{Frame, PAGES};
use crate::lock;
use crate::table::{Page, Place};

impl Engine {
    /// Which pages are to be asked for next: some of those that are waited for, or else the next after the `cursor`, if there is one. There is room for
    /// them then.
    ///
    /// # Errors
    /// When no room can be made.
    pub fn next_left(&self, cursor: Option<&mut u64>) -> Result<Vec<Run>, RegionError> {
        let mut pages = Vec::new();
        let mut cache = lock(&self.cache);
        let comes = |page: &u64| self.table.get(*page).coming;
        while pages.len() < PAGES as usize {
            let Some(page) = cache.coming.pop_front() else { break };
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
        let made = self.make_room_for(pages.len() as u64);
        // Whoever waits for them waits on.
        made.inspect_err(|_| lock(&self.cache).coming.extend(&pages))?;
        Ok(as_runs(&pages))
    }

    fn make_room_for(&self, pages: u64) -> Result<(), RegionError> {
        let lacks = || {
            let cache = lock(&self.cache);
            cache.frames + pages > cache.limit.max(pages)
        };
        // While nothing may leave there is always room: it is but a moment.
        while lacks() && !self.is_frozen() && !self.has_ended() {
            self.evict(self.control_worker(), BATCH)?;
        }
        Ok(())
    }

    /// Takes pages that were left behind and have come now; such as were discarded since, or came before, are of no account.
    pub(super) fn take_left(&self, run: Run, data: &[u8]) -> Result<(), RegionError> {
        self.check_contents(run, data)?;
        let mut cache = lock(&self.cache);
        let is_due = |page: &u64| {
            let is = self.table.get(*page);
            is.coming && matches!(is.place, Place::Zero | Place::Remote)
        };
        let due: Vec<u64> = (run.first..run.end()).filter(is_due).collect();
        for page in &due {
            self.table.set(*page, self.table.get(*page).at(Place::Filling));
        }
        cache.frames += due.len() as u64;
        drop(cache);
        let mut failed = Ok(());
        for run_of_due in runs(due) {
            let at = |page: u64| (page - run.first) as usize * PAGE_SIZE;
            let content = &data[at(run_of_due.start)..at(run_of_due.end)];
            let put = self.file.put(run_of_due.start, content);
            self.are_put(run_of_due, put.is_ok(), |is| Page { dirty: true, coming: false, ..is });
            failed =
                failed.and(put.map_err(RegionError::io("cannot put pages into the region's file")));
        }
        failed
    }

    /// Sends pages that were left behind here.
    ///
    /// # Errors
    /// Pages that are not here, or a region that was not given away.
    pub fn send_left(&self, pages: &[Run], sink: &mut Sink<'_>) -> Result<(), RegionError> {
        if !self.is_frozen() {
            return Err(RegionError::Misuse(
                "the region is this host's: nothing was left behind".to_owned(),
            ));
        }
        let mut buffer = vec![0; PAGES as usize * PAGE_SIZE];
        for run in pages {
            self.check(*run)?;
            if run.count > PAGES
                || !(run.first..run.end()).all(|page| self.table.get(page).has_frame())
            {
                return Err(RegionError::Misuse("pages that were not left behind here".to_owned()));
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
