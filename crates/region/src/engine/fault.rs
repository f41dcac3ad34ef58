//! Serving faults.

use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aquifer_mapping::{Fault, Filled};
use aquifer_page::PAGE_SIZE;
use rustix::event::{Timespec, epoll};

use super::Engine;
use crate::counters::add;
use crate::error::RegionError;
use crate::lock;
use crate::program::Program;
use crate::table::{Page, Place};

/// How often faults that could not be served are tried again.
const RETRY: Duration = Duration::from_millis(250);

/// How long a worker sleeps at most, so that it notices the end.
const LOOK_UP: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

impl Engine {
    /// Serves faults, as the worker of this number, until the end.
    pub(super) fn serve_faults(&self, worker: usize) {
        let mut buffer = vec![0; PAGE_SIZE];
        let mut events = Vec::with_capacity(1);
        while !self.has_ended() {
            events.clear();
            let waited =
                epoll::wait(&self.faults, rustix::buffer::spare_capacity(&mut events), Some(&LOOK_UP));
            if waited.is_err() {
                continue;
            }
            for event in &events {
                let Some(program) = self.program(event.data.u64()) else { continue };
                while let Ok(Some(fault)) = program.userfault.next() {
                    self.serve(worker, &program, fault, &mut buffer);
                }
            }
        }
    }

    fn serve(&self, worker: usize, program: &Program, fault: Fault, buffer: &mut [u8]) {
        let Some(page) = program.page(fault.address) else { return };
        if let Err(error) = self.try_serve(worker, program, page, fault, buffer) {
            add(&self.counters.stalled_faults, 1);
            tracing::warn!(page, "a fault waits: {error}");
            lock(&self.stalled).push((program.id, page));
        }
    }

    fn try_serve(
        &self,
        worker: usize,
        program: &Program,
        page: u64,
        fault: Fault,
        buffer: &mut [u8],
    ) -> Result<(), RegionError> {
        let began = Instant::now();
        loop {
            let mut cache = lock(&self.cache);
            let is = self.table.get(page);
            match is.place {
                // Who has it under way wakes whoever wants it.
                Place::Filling | Place::Leaving => {
                    add(&self.counters.late_faults, 1);
                    self.table.set(page, Page { wanted: true, ..is });
                    return Ok(());
                }
                Place::Resident | Place::Unmapped if !fault.minor => {
                    drop(cache);
                    add(&self.counters.late_faults, 1);
                    program.wake(&(page..page + 1));
                    return Ok(());
                }
                Place::Resident | Place::Unmapped => {
                    self.table.set(page, is.at(Place::Filling));
                    drop(cache);
                    return self.map(program, page, is, fault);
                }
                Place::Zero | Place::Remote if cache.frames < cache.limit => {
                    cache.frames += 1;
                    self.table.set(page, is.at(Place::Filling));
                    if self.is_short(&cache) {
                        self.short.notify_one();
                    }
                    drop(cache);
                    return self.fill(worker, program, page, is, fault, buffer, began);
                }
                Place::Zero | Place::Remote => drop(cache),
            }
            self.evict(worker, self.evicted_at_once())?;
        }
    }

    /// Puts a page that is in the file back into the page table.
    fn map(&self, program: &Program, page: u64, is: Page, fault: Fault) -> Result<(), RegionError> {
        let cooled = is.place == Place::Unmapped;
        // A page that was in a page table already, that of another mapping or one that is gone, may have been written to there.
        let dirty = is.dirty || fault.write || !cooled;
        let mapped = program.userfault.map(fault.address, is.stored && !dirty);
        let there = Page { dirty, wanted: false, ..is };
        match mapped {
            Ok(Filled::Now) => self.settle(page, there.at(Place::Resident), cooled),
            Ok(Filled::Before) => {
                self.settle(page, Page { dirty: true, ..there.at(Place::Resident) }, cooled);
                program.wake(&(page..page + 1));
            }
            Ok(Filled::Gone) => self.settle(page, is, false),
            Err(error) => {
                self.settle(page, is, false);
                return Err(cannot_map(page, error));
            }
        }
        if cooled {
            add(&self.counters.second_chances, 1);
        }
        Ok(())
    }

    /// Puts a page into the file and the page table; a frame is taken for it.
    #[expect(clippy::too_many_arguments)]
    fn fill(
        &self,
        worker: usize,
        program: &Program,
        page: u64,
        is: Page,
        fault: Fault,
        buffer: &mut [u8],
        began: Instant,
    ) -> Result<(), RegionError> {
        let remote = is.place == Place::Remote;
        let filled = if remote {
            self.fetching.fetch_add(1, Ordering::Relaxed);
            let fetched = self.volume.read(worker, page * PAGE_SIZE as u64, buffer);
            self.fetching.fetch_sub(1, Ordering::Relaxed);
            fetched.map_err(RegionError::from).and_then(|()| {
                program
                    .userfault
                    .fill(fault.address, buffer, !fault.write)
                    .map_err(|error| cannot_map(page, error))
            })
        } else {
            program.userfault.fill_zero(fault.address).map_err(|error| cannot_map(page, error))
        };
        let there =
            Page { place: Place::Resident, dirty: !remote || fault.write, wanted: false, stored: is.stored };
        match filled {
            Ok(Filled::Now) => self.settle(page, there, false),
            Ok(Filled::Before) => {
                self.settle(page, Page { dirty: true, ..there }, false);
                program.wake(&(page..page + 1));
            }
            Ok(Filled::Gone) => self.unsettle(page, is),
            Err(error) => {
                self.unsettle(page, is);
                return Err(error);
            }
        }
        if remote {
            self.counters.fetched(began.elapsed());
        } else {
            add(&self.counters.zero_faults, 1);
        }
        Ok(())
    }

    /// The page has arrived.
    fn settle(&self, page: u64, is: Page, touched: bool) {
        let mut cache = lock(&self.cache);
        let wanted = self.table.get(page).wanted;
        self.table.set(page, is);
        match is.place {
            Place::Resident if touched => cache.policy.touched(page),
            Place::Resident => cache.policy.came(page),
            _ => cache.cooling.push_back(page),
        }
        self.arrived(cache, page, wanted);
    }

    /// The page could not be brought, and is where it was.
    fn unsettle(&self, page: u64, is: Page) {
        let mut cache = lock(&self.cache);
        let wanted = self.table.get(page).wanted;
        self.table.set(page, is);
        cache.frames -= 1;
        self.arrived(cache, page, wanted);
    }

    fn arrived(&self, cache: std::sync::MutexGuard<'_, super::Cache>, page: u64, wanted: bool) {
        drop(cache);
        if wanted {
            self.wake(&[page]);
            self.settled.notify_all();
        }
    }

    /// Has faults that could not be served tried again, until the end.
    pub(super) fn retry_stalled(&self) {
        while !self.has_ended() {
            std::thread::sleep(RETRY);
            for (id, page) in std::mem::take(&mut *lock(&self.stalled)) {
                if let Some(program) = self.program(id) {
                    program.wake(&(page..page + 1));
                }
            }
        }
    }
}

fn cannot_map(page: u64, source: io::Error) -> RegionError {
    RegionError::Io { what: format!("cannot put page {page} into the program"), source }
}
