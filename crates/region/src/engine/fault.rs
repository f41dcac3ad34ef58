//! The fault workers, which serve the page faults of programs.

use std::collections::HashMap;
use std::io;
use std::mem;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use aquifer_page::{PAGE_SIZE, WorkerId};
use aquifer_region_client::{Fault, Filled, Run};
use aquifer_transport::poll_token::PollToken;
use aquifer_volume::VolumeError;
use rustix::event::epoll;

use super::stalled::Stalled;
use super::{Engine, EngineConfig, bytes};
use crate::counters::{add, took};
use crate::error::RegionError;
use crate::lock;
use crate::program::Program;
use crate::sys;
use crate::table::{Page, Place};

/// The id that no program has.
const NO_PROGRAM: u64 = u64::MAX;

/// The bit that, with a program's id, names its guard.
pub(super) const GUARD: u64 = 1 << 63;

/// The faults of all programs.
#[derive(Debug)]
pub(super) struct Faults {
    /// How many faults the engine serves at a time.
    pub(super) workers: usize,
    /// How long a thread waits for a page that cannot be fetched.
    pub(super) timeout: Option<Duration>,
    /// The epoll of the programs' userfaultfds, and the eventfd that ends the wait.
    pub(super) epoll: OwnedFd,
    pub(super) end: OwnedFd,
    /// Lets one worker at a time wait for faults. A fault that a lender answers at once needs no
    /// other thread.
    pub(super) poll_token: Arc<PollToken>,
    /// The faults that the kernel has reported and no worker has taken yet. Only the worker that
    /// holds the token takes some.
    pub(super) queue: Mutex<Vec<FaultRequest>>,
    /// Faults that could not be served, by program and page.
    pub(super) stalled: Mutex<HashMap<(u64, u64), Stalled>>,
    /// Signalled when a stalled fault is to be retried.
    pub(super) retry: Condvar,
    /// A fetch or a write has failed, and the log says so.
    pub(super) trouble: AtomicBool,
    /// The number of faults with a fetch in flight.
    pub(super) fetching: AtomicUsize,
}

impl Faults {
    /// Makes the epoll on which workers wait for faults, and the eventfd that wakes all of them.
    pub(super) fn new(config: &EngineConfig) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let end = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
        epoll::add(&epoll, &end, epoll::EventData::new_u64(NO_PROGRAM), epoll::EventFlags::IN)?;
        Ok(Self {
            workers: config.paging.workers,
            timeout: config.paging.fault_timeout,
            epoll,
            end,
            poll_token: Arc::default(),
            queue: Mutex::default(),
            stalled: Mutex::default(),
            retry: Condvar::new(),
            trouble: AtomicBool::new(false),
            fetching: AtomicUsize::new(0),
        })
    }
}

/// A page that a thread of a program waits for.
#[derive(Debug)]
pub(super) struct FaultRequest {
    pub(super) program: Arc<Program>,
    pub(super) fault: Fault,
    pub(super) page: u64,
    pub(super) began: Instant,
}

impl FaultRequest {
    /// Returns the request of a fault, or `None` if it is outside the mapping.
    pub(super) fn new(program: &Arc<Program>, fault: Fault) -> Option<Self> {
        let page = program.mapping.page(fault.address)?;
        Some(Self { program: program.clone(), fault, page, began: Instant::now() })
    }
}

impl Engine {
    /// Serves faults as this worker, until the engine ends.
    pub(super) fn serve_faults(&self, worker: WorkerId) {
        let mut buffer = super::prefetch::buffer();
        self.faults.poll_token.join();
        sys::be_short();
        while !self.has_ended() {
            self.faults.poll_token.take();
            match &self.next_faults()[..] {
                [request] => self.serve(worker, request, &mut buffer),
                requests => self.serve_together(worker, requests, &mut buffer),
            }
        }
    }

    /// Serves a fault on a page that is not in the page table, or a write to a shared page.
    pub(super) fn serve(&self, worker: WorkerId, request: &FaultRequest, buffer: &mut [u8]) {
        match self.try_serve(worker, request, buffer) {
            Ok(()) if self.faults.trouble.load(Ordering::Relaxed) => {
                _ = lock(&self.faults.stalled).remove(&(request.program.id, request.page))
            }
            Ok(()) => {}
            Err(error) => self.stall(request, &error),
        }
    }

    pub(super) fn try_serve(
        &self,
        worker: WorkerId,
        request: &FaultRequest,
        buffer: &mut [u8],
    ) -> Result<(), RegionError> {
        let (program, page) = (&request.program, request.page);
        loop {
            let mut cache = lock(&self.cache);
            let is = self.table.get(page);
            match is.place {
                // The thread that moves the page wakes the threads that want it.
                Place::Filling | Place::Leaving => {
                    add(&self.counters.late_faults, 1);
                    self.table.set(page, Page { wanted: true, ..is });
                    return Ok(());
                }
                Place::Lost => return Err(RegionError::Lost(page)),
                Place::Zero | Place::Remote if is.awaiting_source => {
                    add(&self.counters.late_faults, 1);
                    self.table.set(page, Page { wanted: true, ..is });
                    cache.awaiting_source.push_back(page);
                    return Ok(());
                }
                Place::Resident | Place::Unmapped if self.group.sharers.get(page).is_some() => {
                    self.take(&mut cache, page, is, Place::Filling);
                    drop(cache);
                    return self.finish_unshare(request);
                }
                Place::Resident | Place::Unmapped if !request.fault.minor => {
                    // Asked under the lock, as the page may leave as soon as the lock is free.
                    let is_here = self.file.has(page);
                    drop(cache);
                    add(&self.counters.late_faults, 1);
                    if !is_here {
                        self.is_removed(page)?;
                        continue;
                    }
                    program.wake(&(page..page + 1));
                    return Ok(());
                }
                Place::Resident | Place::Unmapped => {
                    self.table.set(page, is.at(Place::Filling));
                    drop(cache);
                    return self.map(request, is);
                }
                Place::Shared if cache.has_room() || self.is_frozen() => {
                    drop(cache);
                    return self.break_cow(request);
                }
                // While the region is frozen, nothing can leave, so the cache may exceed its limit
                // for that moment.
                Place::Zero | Place::Remote if cache.has_room() || self.is_frozen() => {
                    self.take(&mut cache, page, is, Place::Filling);
                    self.see_to_room(&mut cache);
                    drop(cache);
                    self.fill(worker, request, is, &mut buffer[..PAGE_SIZE])?;
                    if is.place == Place::Remote {
                        self.prefetch(worker, request, buffer);
                    }
                    return Ok(());
                }
                Place::Zero | Place::Remote | Place::Shared => {
                    self.see_to_room(&mut cache);
                    let count = cache.evicted_at_once();
                    drop(cache);
                    let began = Instant::now();
                    self.evict(worker, count)?;
                    if is.place == Place::Remote {
                        took(&self.counters.room_ns, began.elapsed());
                    }
                }
            }
        }
    }

    /// Discards a page that a program removed from the region's file without the engine. It must
    /// read as zeroes.
    fn is_removed(&self, page: u64) -> Result<(), RegionError> {
        tracing::warn!(
            page,
            "a program removed the page from the region's file; the engine discards the page"
        );
        self.discard(Run { first: page, count: 1 })
    }

    /// Puts a page that is in the file back into the page table.
    fn map(&self, request: &FaultRequest, is: Page) -> Result<(), RegionError> {
        let &FaultRequest { ref program, fault, page, .. } = request;
        let cooled = is.place == Place::Unmapped;
        // Another mapping, or a program that is gone, may have had the page in its page table, and
        // written to it.
        let dirty = is.dirty || fault.write || !cooled;
        let mapped = program.map(page, is.stored && !dirty);
        let there = Page { dirty, wanted: false, ..is };
        match mapped {
            Ok(Filled::Now) => self.complete_fill(page, there.at(Place::Resident), cooled),
            Ok(Filled::Before) => {
                self.complete_fill(page, Page { dirty: true, ..there.at(Place::Resident) }, cooled);
                program.wake(&(page..page + 1));
            }
            Ok(Filled::Gone) => self.complete_fill(page, is, false),
            Err(error) => {
                self.complete_fill(page, is, false);
                return Err(cannot_map(page, error));
            }
        }
        if cooled {
            add(&self.counters.second_chances, 1);
            self.were_used([page]);
        }
        Ok(())
    }

    /// Puts a page, which has a frame, into the file and the page table.
    fn fill(
        &self,
        worker: WorkerId,
        request: &FaultRequest,
        is: Page,
        buffer: &mut [u8],
    ) -> Result<(), RegionError> {
        if is.place == Place::Remote {
            let run = request.page..request.page + 1;
            let fetched = self.fetch(worker, slice::from_ref(&run), buffer);
            return self.has_fetched(request, is, fetched.map(|()| &*buffer));
        }
        self.zero_ahead(request);
        let there = Page { dirty: true, wanted: false, ..is.at(Place::Resident) };
        match request.program.fill_zero(request.page) {
            Ok(Filled::Gone) => self.abort_fill(request.page, is),
            Ok(filled) => {
                self.complete_fill(request.page, there, false);
                if filled == Filled::Before {
                    request.program.wake(&(request.page..request.page + 1));
                }
            }
            Err(error) => {
                self.abort_fill(request.page, is);
                return Err(cannot_map(request.page, error));
            }
        }
        add(&self.counters.zero_faults, 1);
        Ok(())
    }

    /// Puts a page, which was remote as `is` and has a frame, into the file and the page table, if
    /// the fetch succeeded.
    pub(super) fn has_fetched(
        &self,
        request: &FaultRequest,
        is: Page,
        fetched: Result<&[u8], RegionError>,
    ) -> Result<(), RegionError> {
        let &FaultRequest { ref program, fault, page, began } = request;
        let filled = fetched.and_then(|data| {
            program.fill(page, data, !fault.write).map_err(|error| cannot_map(page, error))
        });
        match filled {
            Ok(Filled::Now) => {
                let there = Page { dirty: fault.write, wanted: false, ..is.at(Place::Resident) };
                self.complete_fill(page, there, false);
                self.counters.fetched(began.elapsed());
                Ok(())
            }
            // Only an engine puts pages into the file, so the content is of unknown origin.
            Ok(Filled::Before) => {
                self.abort_fill(page, is);
                let other = "the region's file already holds other content for it";
                Err(cannot_map(page, io::Error::other(other)))
            }
            Ok(Filled::Gone) => {
                self.abort_fill(page, is);
                Ok(())
            }
            Err(error) => {
                self.abort_fill(page, is);
                Err(error)
            }
        }
    }

    /// Fetches runs of pages together into the start of `into`, one after the other, for threads
    /// that wait.
    pub(super) fn fetch(
        &self,
        worker: WorkerId,
        runs: &[Range<u64>],
        into: &mut [u8],
    ) -> Result<(), RegionError> {
        let (fetching, count) = (&self.faults.fetching, count(runs));
        fetching.fetch_add(count, Ordering::Relaxed);
        let fetched = self.read_many(worker, runs, into);
        fetching.fetch_sub(count, Ordering::Relaxed);
        // Each of the faults waited for that long.
        took(&self.counters.link_ns, fetched? * count as u32);
        self.is_out_of_trouble();
        Ok(())
    }

    /// Fetches runs of pages together into the start of `into`, one after the other. Returns how
    /// long they were in flight.
    pub(super) fn read_many(
        &self,
        worker: WorkerId,
        runs: &[Range<u64>],
        into: &mut [u8],
    ) -> Result<Duration, VolumeError> {
        let sent = Instant::now();
        let length = |run: &Range<u64>| (run.end - run.start) as usize * PAGE_SIZE;
        if let [run] = runs {
            let into = &mut into[..length(run)];
            self.lenders.volume.read(worker, bytes(run).start, into)?;
        } else {
            let mut rest = into;
            let piece = |run: &Range<u64>| {
                let (now, later) = mem::take(&mut rest).split_at_mut(length(run));
                rest = later;
                (bytes(run).start, now)
            };
            let mut pieces: Vec<_> = runs.iter().map(piece).collect();
            self.lenders.volume.read_many(worker, &mut pieces)?;
        }
        Ok(self.carried(count(runs), sent))
    }

    /// Waits as long as the modelled link, if there is one, takes. Returns the time since `sent`.
    fn carried(&self, pages: usize, sent: Instant) -> Duration {
        let Some(link) = &self.lenders.link else { return sent.elapsed() };
        let took = link.carry(pages, sent) - sent;
        link.note(took);
        took
    }

    /// Completes a fill: the page is at its place.
    pub(super) fn complete_fill(&self, page: u64, is: Page, touched: bool) {
        let mut cache = lock(&self.cache);
        let now = self.table.get(page);
        // A scan may have found the page written as soon as it was mapped. Its mark is gone since.
        let (is, wanted) = (Page { dirty: is.dirty || now.dirty, ..is }, now.wanted);
        self.table.set(page, is);
        match is.place {
            Place::Resident if touched => cache.policy.touched(page),
            Place::Resident => cache.policy.came(page),
            _ => cache.cold_list.push_back(page),
        }
        drop(cache);
        if wanted {
            self.arrived(&[page]);
        }
    }

    /// Aborts a fill: the page is back at its place, and its frame is free.
    pub(super) fn abort_fill(&self, page: u64, is: Page) {
        let mut cache = lock(&self.cache);
        let wanted = self.table.get(page).wanted;
        self.table.set(page, Page { dirty: false, ..is });
        cache.frames -= 1;
        drop(cache);
        if wanted {
            self.arrived(&[page]);
        }
    }
}

/// Returns the number of pages of all runs.
fn count(runs: &[Range<u64>]) -> usize {
    runs.iter().map(|run| (run.end - run.start) as usize).sum()
}

fn cannot_map(page: u64, source: io::Error) -> RegionError {
    RegionError::Io { what: format!("cannot put page {page} into the program"), source }
}
