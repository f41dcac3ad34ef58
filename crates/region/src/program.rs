//! A program that has the region mapped, as its engine sees it.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use aquifer_fabric::sleep::going_to_sleep;
use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_procfs::process;
use aquifer_region_client::{
    Attach, Connection, Filled, Live, Order, Reply, Run, Shared, Userfault,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::prefetch::{Guess, PrefetchKind, Prefetcher, Proven};
use crate::{effect, lock, sys};

/// The most runs in one order, which fit a message with room to spare.
const RUNS_PER_ORDER: usize = 512;

/// The most runs of pages that one scan of a pagemap returns.
const SCANNED: usize = if cfg!(test) { 4 } else { 64 };

/// The number of a program's threads for which a prefetcher is kept.
const THREADS: usize = 64;

/// How long a program may take to carry out an order. The mapping's thread does nothing else, so a
/// program that takes longer is stopped, or its host is.
const ORDER_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the engine checks whether a program that takes no orders still has the region mapped.
const SILENT_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The result of sharing pages.
#[derive(Debug)]
pub(crate) enum Sharing {
    /// The program shares the pages, except for these.
    Done(HashSet<u64>),
    /// The program or its mapping is gone.
    Gone,
}

/// One mapping of the region in one program.
///
/// It lives as long as the program has the region mapped, even without its connection. Children
/// that the program forks hold the other end, too, and may shut it. Without a connection the
/// program is silent: its faults are served, and the pages in its page table stay. Once its thread
/// has connected again, another `Program` takes its place.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) id: u64,
    pub(crate) pid: u32,
    pub(crate) userfault: Userfault,
    /// The userfaultfd that guards its shared pages.
    pub(crate) guard: Userfault,
    address: u64,
    pages: Run,
    /// The pages that are still mapped. Read-locked while a page is put there, and write-locked
    /// before an unmap.
    live: Arc<RwLock<Live>>,
    pagemap: File,
    orders: Connection,
    /// A pidfd, readable once the process has ended.
    process: OwnedFd,
    /// The prefetchers of its threads, by thread id, the most recently used last.
    prefetchers: Mutex<Vec<(u32, Box<dyn Prefetcher>)>>,
    prefetch: PrefetchKind,
    /// Held from an order until its answer.
    ordering: Mutex<()>,
    /// The program has nothing mapped any more.
    gone: AtomicBool,
    /// The program takes no orders.
    silent: AtomicBool,
    /// Another `Program` has taken its place.
    replaced: AtomicBool,
    /// The shared pages that it has unshared by writes, and whether it had too many mappings at the
    /// last check.
    cow_breaks: AtomicU64,
    crowded: AtomicBool,
}

/// The interval between checks of the number of mappings, in unshared pages.
const LOOK: u64 = 256;

/// Returns how many mappings a process may add before it reaches `share` of the kernel's limit
/// (`vm.max_map_count`). Beyond the limit, each mmap(2) of the program fails.
pub fn mappings_left(pid: u32, share: f64) -> u64 {
    let most = aquifer_procfs::number("/proc/sys/vm/max_map_count").unwrap_or(65_530);
    let have = process::read(pid, "maps").map_or(0, |maps| maps.lines().count() as u64);
    ((most as f64 * share) as u64).saturating_sub(have)
}

impl Program {
    /// Makes the engine's view of a new mapping. `before` is the same mapping by an earlier
    /// connection.
    pub(crate) fn new(
        id: u64,
        attach: &Attach,
        [userfault, guard]: [Userfault; 2],
        orders: Connection,
        prefetch: PrefetchKind,
        before: Option<&Self>,
    ) -> io::Result<Self> {
        let (pid, process) = (orders.peer()?, orders.peer_process()?);
        let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
        // Both share one list, as a worker may be about to put a page there for the other.
        let live = before.map(|before| before.live.clone()).unwrap_or_default();
        *live.write().unwrap_or_else(PoisonError::into_inner) = Live::new(&attach.live);
        let (address, pages) = (attach.address, attach.pages);
        let (ordering, prefetchers) = (Mutex::new(()), Mutex::default());
        let [gone, silent, replaced, crowded] = std::array::from_fn(|_| AtomicBool::new(false));
        let cow_breaks = AtomicU64::new(0);
        Ok(Self {
            id,
            pid,
            userfault,
            guard,
            address,
            pages,
            live,
            pagemap,
            orders,
            process,
            prefetchers,
            prefetch,
            ordering,
            gone,
            silent,
            replaced,
            cow_breaks,
            crowded,
        })
    }

    /// Counts a write to a shared page, and returns whether the program should get no more
    /// mappings.
    pub(crate) fn is_crowded(&self) -> bool {
        if self.cow_breaks.fetch_add(1, Ordering::Relaxed) % LOOK == LOOK - 1 {
            self.crowded.store(mappings_left(self.pid, 0.85) == 0, Ordering::Relaxed);
        }
        self.crowded.load(Ordering::Relaxed)
    }

    /// Tells the program that the engine serves it, after `known`. No order goes out before `known`
    /// is done.
    pub(crate) fn accept(&self, known: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let _ordering = lock(&self.ordering);
        known()?;
        self.orders.send(&Reply::Done, &[])
    }

    /// Returns the name that the kernel has for it, and its process id.
    pub(crate) fn name(&self) -> String {
        format!("{} (process {})", process::name(self.pid), self.pid)
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Waits until the program has nothing mapped any more, or another `Program` has taken its
    /// place. While the connection is down, `is_mapped` tells.
    pub(crate) fn wait_for_end(&self, is_mapped: impl Fn() -> bool) {
        let is_over = || self.replaced.load(Ordering::Relaxed) || self.live().is_empty();
        while !is_over() {
            if !self.is_silent() {
                // With no events requested, only a hang-up ends the wait.
                let mut fds = [
                    PollFd::new(&self.orders, PollFlags::empty()),
                    PollFd::new(&self.process, PollFlags::IN),
                ];
                if poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {
                    continue;
                }
                let [hung_up, ended] = fds.map(|fd| !fd.revents().is_empty());
                if ended || is_over() {
                    return;
                }
                if hung_up {
                    self.is_lost("its connection closed");
                }
            } else if !is_mapped() || self.has_ended(SILENT_POLL_INTERVAL) {
                return;
            }
        }
    }

    /// Returns whether its process has ended, or ends within this time.
    fn has_ended(&self, within: Duration) -> bool {
        let mut fds = [PollFd::new(&self.process, PollFlags::IN)];
        poll(&mut fds, Some(&timespec(within))).is_ok_and(|ready| ready > 0)
    }

    /// Notes that the program has nothing mapped any more. Its marks prove nothing from now on.
    pub(crate) fn end(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    pub(crate) fn is_replaced(&self) -> bool {
        self.replaced.load(Ordering::Relaxed)
    }

    /// Notes that another `Program` has taken its place.
    pub(crate) fn replace(&self) {
        self.replaced.store(true, Ordering::Relaxed);
        self.silent.store(true, Ordering::Relaxed);
        self.orders.shut();
    }

    /// Returns whether the program takes no orders.
    pub(crate) fn is_silent(&self) -> bool {
        self.silent.load(Ordering::Relaxed)
    }

    /// Marks the connection as lost. The program's thread, if it lives, notices and connects again.
    fn is_lost(&self, why: &str) {
        if !self.silent.swap(true, Ordering::Relaxed) {
            self.orders.shut();
            if !self.has_ended(Duration::ZERO) {
                let program = self.name();
                tracing::info!(
                    program,
                    "the program does not answer, so its mapped pages stay in the cache: {why}"
                );
            }
        }
    }

    fn live(&self) -> RwLockReadGuard<'_, Live> {
        self.live.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn live_mut(&self) -> RwLockWriteGuard<'_, Live> {
        self.live.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the program is about to unmap these pages. The engine puts nothing there any
    /// more.
    pub(crate) fn release(&self, pages: &Range<u64>) {
        self.live_mut().remove(pages);
    }

    /// Returns whether all pages are unmapped, and shuts the connection in that case.
    pub(crate) fn has_released_all(&self) -> bool {
        let all = self.live().is_empty();
        if all {
            self.orders.shut();
        }
        all
    }

    /// Returns the page of the region at an address, or `None` outside the mapping.
    pub(crate) fn page(&self, address: u64) -> Option<u64> {
        let page = address.checked_sub(self.address)? / PAGE_SIZE as u64;
        (page < self.pages.count).then_some(self.pages.first + page)
    }

    /// Returns the addresses of these pages, as far as they are in the mapping.
    fn addresses(&self, pages: &Range<u64>) -> Range<u64> {
        let at = |page: u64| {
            let page = page.clamp(self.pages.first, self.pages.end()) - self.pages.first;
            self.address + page * PAGE_SIZE as u64
        };
        at(pages.start)..at(pages.end)
    }

    /// Guesses what a thread that waits for a page may touch next. A proven pattern gives `most()`
    /// pages at most. Calls `used` with the last guess if this fault proves it right.
    pub(crate) fn guess(
        &self,
        thread: u32,
        page: u64,
        used: &dyn Fn(Proven),
        most: &dyn Fn() -> u64,
    ) -> Option<Guess> {
        if self.prefetch == PrefetchKind::Off {
            return None;
        }
        let mut prefetchers = lock(&self.prefetchers);
        let known = prefetchers.iter().position(|(id, _)| *id == thread);
        let mut own = match known {
            Some(at) => prefetchers.remove(at),
            None => (thread, self.prefetch.make()?),
        };
        own.1.proven(page).into_iter().for_each(used);
        let guess = own.1.after(page, most);
        if prefetchers.len() == THREADS {
            prefetchers.remove(0);
        }
        prefetchers.push(own);
        guess
    }

    /// Puts a page into the program's memory. With `clean` the kernel marks the next write.
    pub(crate) fn fill(&self, page: u64, data: &[u8], clean: bool) -> io::Result<Filled> {
        self.put(page, |address| self.userfault.fill(address, data, clean))
    }

    /// Puts a page of zeroes into the program's memory.
    pub(crate) fn fill_zero(&self, page: u64) -> io::Result<Filled> {
        self.put(page, |address| self.userfault.fill_zero(address))
    }

    /// Puts the page from the region's file into the page table. With `clean` the kernel marks the
    /// next write.
    pub(crate) fn map(&self, page: u64, clean: bool) -> io::Result<Filled> {
        self.put(page, |address| self.userfault.map(address, clean))
    }

    /// Poisons the page: each touch raises `SIGBUS`.
    pub(crate) fn poison(&self, page: u64) -> io::Result<Filled> {
        self.put(page, |address| self.userfault.poison(address))
    }

    /// Calls `put` with the page's address, if the page is still mapped. Otherwise the kernel could
    /// put it into another mapping.
    fn put(&self, page: u64, put: impl FnOnce(u64) -> io::Result<Filled>) -> io::Result<Filled> {
        let live = self.live();
        if live.has(page) && !self.is_gone() {
            put(self.addresses(&(page..page + 1)).start)
        } else {
            Ok(Filled::Gone)
        }
    }

    /// Makes the threads that wait for these pages fault again.
    pub(crate) fn wake(&self, pages: &Range<u64>) {
        let Range { start, end } = self.addresses(pages);
        if start < end {
            // A failure means that the program is gone, and no thread waits.
            let _ = self.userfault.wake(start, end - start);
            let _ = self.guard.wake(start, end - start);
        }
    }

    pub(crate) fn wake_all(&self) {
        self.wake(&(self.pages.first..self.pages.end()));
    }

    /// Orders the program to unmap the pages. A program that is gone has no page table.
    pub(crate) fn unmap(&self, runs: &[Range<u64>]) -> io::Result<()> {
        self.order_runs(runs, Order::Unmap, &[])
    }

    /// Orders the program to map these pages, none of which is in its page table, from `frames`.
    pub(crate) fn share(
        &self,
        all: &[Shared],
        frames: &File,
        region: &File,
    ) -> io::Result<Sharing> {
        let mut written = HashSet::new();
        for some in all.chunks(RUNS_PER_ORDER) {
            match self.order(&Order::Share(some.to_vec()), &[frames, region])? {
                Some(Reply::DoneBut(pages)) => {
                    written.extend(pages.iter().flat_map(|run| run.first..run.end()));
                }
                Some(_) => {}
                None => return Ok(Sharing::Gone),
            }
        }
        Ok(Sharing::Done(written))
    }

    /// Orders the program to map these pages from the region's file again.
    pub(crate) fn restore(&self, runs: &[Range<u64>], region: &File) -> io::Result<()> {
        self.order_runs(runs, Order::Restore, &[region])
    }

    fn order_runs(
        &self,
        runs: &[Range<u64>],
        order: impl Fn(Vec<Run>) -> Order,
        files: &[&File],
    ) -> io::Result<()> {
        for runs in runs.chunks(RUNS_PER_ORDER) {
            let runs = runs
                .iter()
                .map(|run| Run { first: run.start, count: run.end - run.start })
                .collect();
            self.order(&order(runs), files)?;
        }
        Ok(())
    }

    /// Sends an order and returns the answer, or `None` if the program is gone.
    fn order(&self, order: &Order, files: &[&File]) -> io::Result<Option<Reply>> {
        let _ordering = lock(&self.ordering);
        if self.is_gone() {
            return Ok(None);
        }
        if !self.is_silent() {
            let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
            going_to_sleep();
            effect::at("order");
            let sent = self.orders.send(order, &files);
            effect::at("ordered");
            match sent.and_then(|()| self.answer()) {
                Ok(Some(Reply::Refused(why))) => return Err(io::Error::other(why)),
                Ok(Some(reply)) => return Ok(Some(reply)),
                Ok(None) => self.is_lost("its connection closed"),
                Err(error) => self.is_lost(&error.to_string()),
            }
        }
        // A program that is gone or has unmapped everything has the pages in no page table.
        if self.live().is_empty() || self.has_ended(Duration::ZERO) {
            return Ok(None);
        }
        Err(io::Error::other(format!("{} is not answering", self.name())))
    }

    /// Waits for the answer, until the process ends or the timeout passes.
    fn answer(&self) -> io::Result<Option<Reply>> {
        let deadline = Instant::now() + ORDER_TIMEOUT;
        loop {
            let left = timespec(deadline.saturating_duration_since(Instant::now()));
            let mut fds = [
                PollFd::new(&self.orders, PollFlags::IN),
                PollFd::new(&self.process, PollFlags::IN),
            ];
            match poll(&mut fds, Some(&left)) {
                Err(rustix::io::Errno::INTR) => continue,
                Ok(0) => {
                    let why = format!("no answer within {ORDER_TIMEOUT:?}; it may be stopped");
                    return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                }
                polled => polled?,
            };
            // The answer counts even if the process has ended since.
            if !fds[0].revents().is_empty() {
                return Ok(self.orders.receive()?.map(|(reply, _)| reply));
            }
            if !fds[1].revents().is_empty() {
                return Ok(None);
            }
        }
    }

    /// Returns the size of its pinned memory, to which devices may write regardless of its page
    /// table: fixed buffers of io_uring, RDMA. The memory may be the region's.
    pub(crate) fn pinned(&self) -> Bytes {
        process::size(self.pid, "VmPin")
    }

    /// Adds the mapped pages with no mark of "not written since armed". The marks of a program that
    /// is gone prove nothing.
    pub(crate) fn unproven(&self, runs: &[Range<u64>], into: &mut HashSet<u64>) -> io::Result<()> {
        // A device's write leaves no mark.
        if self.is_gone() || self.pinned() > Bytes::ZERO {
            into.extend(runs.iter().cloned().flatten());
            return Ok(());
        }
        let live = self.live();
        runs.iter()
            .flat_map(|run| live.parts(run))
            .try_for_each(|part| self.unproven_in(&part, into))
    }

    fn unproven_in(&self, pages: &Range<u64>, into: &mut HashSet<u64>) -> io::Result<()> {
        let mut found = [sys::page_region { start: 0, end: 0, categories: 0 }; SCANNED];
        let Range { mut start, end } = self.addresses(pages);
        while start < end {
            effect::at("scan");
            let (count, walked) = match sys::scan_unwritten(&self.pagemap, start..end, &mut found) {
                // The process has ended, and its page table with it.
                Err(error) if has_ended(&error) => (0, end),
                looked => looked?,
            };
            for region in &found[..count] {
                into.extend(self.pages_at(start..region.start));
                start = region.end;
            }
            // A scan ends early when `found` is full.
            let walked = if walked <= start && count == 0 { end } else { walked };
            into.extend(self.pages_at(start..walked));
            start = start.max(walked);
        }
        Ok(())
    }

    /// Adds those of the pages that are in its page table.
    pub(crate) fn present(&self, runs: &[Range<u64>], into: &mut HashSet<u64>) -> io::Result<()> {
        let live = self.live();
        let mut found = |found: Range<u64>| into.extend(self.pages_at(found));
        let mut parts = runs.iter().flat_map(|run| live.parts(run));
        parts.try_for_each(|part| each_present(&self.pagemap, self.addresses(&part), &mut found))
    }

    /// Arms the marks of these pages, so that the kernel marks the next write to each.
    pub(crate) fn notice_writes(&self, runs: &[Range<u64>]) -> io::Result<()> {
        let live = self.live();
        for part in runs.iter().flat_map(|run| live.parts(run)) {
            let Range { mut start, end } = self.addresses(&part);
            while start < end {
                effect::at("notice writes");
                let walked = match sys::notice_writes(&self.pagemap, start..end) {
                    // The process has ended and writes no more.
                    Err(error) if has_ended(&error) => return Ok(()),
                    noticed => noticed?,
                };
                if walked <= start {
                    break;
                }
                start = walked;
            }
        }
        Ok(())
    }

    /// Returns the pages at these addresses, which are in its mapping.
    fn pages_at(&self, addresses: Range<u64>) -> Range<u64> {
        let page = |address: u64| self.pages.first + (address - self.address) / PAGE_SIZE as u64;
        page(addresses.start)..page(addresses.end.max(addresses.start))
    }
}

fn has_ended(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESRCH)
}

/// Calls `each` for the ranges of these addresses that are in the process's page table.
pub(crate) fn each_present(
    pagemap: &File,
    Range { mut start, end }: Range<u64>,
    mut each: impl FnMut(Range<u64>),
) -> io::Result<()> {
    let mut found = [sys::page_region { start: 0, end: 0, categories: 0 }; SCANNED];
    while start < end {
        let (count, walked) = match sys::scan_present(pagemap, start..end, &mut found) {
            // The process has ended.
            Err(error) if has_ended(&error) => return Ok(()),
            looked => looked?,
        };
        found[..count].iter().for_each(|region| each(region.start..region.end));
        if walked <= start {
            break;
        }
        start = walked;
    }
    Ok(())
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) }
}
