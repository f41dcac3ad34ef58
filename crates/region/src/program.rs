//! A program that has the region mapped, as its engine sees it.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer_fabric::sleep::going_to_sleep;
use aquifer_mapping::{Attach, Connection, Filled, Order, Reply, Run, Shared, Userfault};
use aquifer_page::{Bytes, PAGE_SIZE};

use crate::prefetch::{Guess, PrefetchKind, Prefetcher};
use crate::{effect, lock, sys};

/// Runs in one order: what fits a message with room to spare.
const RUNS_PER_ORDER: usize = 512;

/// Runs of pages that one call finds.
const SCANNED: usize = if cfg!(test) { 4 } else { 64 };

/// Threads of a program that are told apart.
const THREADS: usize = 64;

/// What came of pages that were to be shared.
#[derive(Debug)]
pub(crate) enum Sharing {
    /// They are, but for these.
    Done(HashSet<u64>),
    /// The program is gone, or its mapping.
    Gone,
}

/// One mapping of the region in one program.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) id: u64,
    pub(crate) pid: u32,
    pub(crate) userfault: Userfault,
    /// Of the pages that it shares.
    pub(crate) guard: Userfault,
    address: u64,
    pages: Run,
    pagemap: File,
    orders: Connection,
    /// What each of its threads has been waiting for, those that did last the last.
    prefetchers: Mutex<Vec<(u32, Box<dyn Prefetcher>)>>,
    prefetch: PrefetchKind,
    /// Held from an order until its answer.
    ordering: Mutex<()>,
    gone: AtomicBool,
    /// Shared pages that it has written to, and whether it had too many mappings when that was looked at.
    broken: AtomicU64,
    crowded: AtomicBool,
}

/// How many shared pages a program writes to until it is looked how many mappings it has.
const LOOK: u64 = 256;

/// How many more mappings a process may have, before it has this share of what the kernel allows (`vm.max_map_count`): whatever a program maps fails
/// beyond that.
pub fn mappings_left(pid: u32, share: f64) -> u64 {
    let most = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let most = most.and_then(|most| most.trim().parse().ok()).unwrap_or(65_530.0);
    let have = fs::read_to_string(format!("/proc/{pid}/maps")).map_or(0, |maps| maps.lines().count() as u64);
    ((most * share) as u64).saturating_sub(have)
}

impl Program {
    pub(crate) fn new(
        id: u64,
        attach: &Attach,
        [userfault, guard]: [Userfault; 2],
        orders: Connection,
        prefetch: PrefetchKind,
    ) -> io::Result<Self> {
        let pid = orders.peer()?;
        let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
        let (address, pages) = (attach.address, attach.pages);
        let (ordering, gone, prefetchers) = (Mutex::new(()), AtomicBool::new(false), Mutex::default());
        let (broken, crowded) = (AtomicU64::new(0), AtomicBool::new(false));
        Ok(Self {
            id,
            pid,
            userfault,
            guard,
            address,
            pages,
            pagemap,
            orders,
            prefetchers,
            prefetch,
            ordering,
            gone,
            broken,
            crowded,
        })
    }

    /// Whether it has so many mappings that it should not have more. To be asked when it writes to a shared page.
    pub(crate) fn is_crowded(&self) -> bool {
        if self.broken.fetch_add(1, Ordering::Relaxed) % LOOK == LOOK - 1 {
            self.crowded.store(mappings_left(self.pid, 0.85) == 0, Ordering::Relaxed);
        }
        self.crowded.load(Ordering::Relaxed)
    }

    /// Tells it that it is taken care of, and has `known` be done before anything is asked of it.
    pub(crate) fn accept(&self, known: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let _ordering = lock(&self.ordering);
        known()?;
        self.orders.send(&Reply::Done, &[])
    }

    /// Its name, as the kernel has it.
    pub(crate) fn name(&self) -> String {
        let name = fs::read_to_string(format!("/proc/{}/comm", self.pid)).unwrap_or_default();
        format!("{} (process {})", name.trim(), self.pid)
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.orders
    }

    /// The page of the region at an address; none where that is not the region.
    pub(crate) fn page(&self, address: u64) -> Option<u64> {
        let page = address.checked_sub(self.address)? / PAGE_SIZE as u64;
        (page < self.pages.count).then_some(self.pages.first + page)
    }

    /// Where these pages are in the program, as far as they are in its mapping.
    fn addresses(&self, pages: &Range<u64>) -> Range<u64> {
        let at = |page: u64| {
            let page = page.clamp(self.pages.first, self.pages.end()) - self.pages.first;
            self.address + page * PAGE_SIZE as u64
        };
        at(pages.start)..at(pages.end)
    }

    /// What this thread, which waits for a page that is fetched or was nowhere, may touch next.
    pub(crate) fn guess(&self, thread: u32, page: u64, most: u64) -> Option<Guess> {
        let mut prefetchers = lock(&self.prefetchers);
        let known = prefetchers.iter().position(|(id, _)| *id == thread);
        let mut own = match known {
            Some(at) => prefetchers.remove(at),
            None => (thread, self.prefetch.make()?),
        };
        let guess = own.1.after(page, most);
        if prefetchers.len() == THREADS {
            prefetchers.remove(0);
        }
        prefetchers.push(own);
        guess
    }

    /// Puts a page, of which the volume has the same, into its memory. False where that cannot be.
    pub(crate) fn fill_clean(&self, page: u64, data: &[u8]) -> bool {
        let Range { start, end } = self.addresses(&(page..page + 1));
        start < end && matches!(self.userfault.fill(start, data, true), Ok(Filled::Now))
    }

    /// Puts a page of zeroes into its memory.
    pub(crate) fn fill_zero(&self, page: u64) -> io::Result<Filled> {
        let Range { start, end } = self.addresses(&(page..page + 1));
        if start < end { self.userfault.fill_zero(start) } else { Ok(Filled::Gone) }
    }

    /// Has whoever waits for these pages try again.
    pub(crate) fn wake(&self, pages: &Range<u64>) {
        let Range { start, end } = self.addresses(pages);
        if start < end {
            // Nobody waits in a program that is gone.
            let _ = self.userfault.wake(start, end - start);
            let _ = self.guard.wake(start, end - start);
        }
    }

    pub(crate) fn wake_all(&self) {
        self.wake(&(self.pages.first..self.pages.end()));
    }

    /// Takes the pages out of its page table. A program that is gone has no page table.
    pub(crate) fn unmap(&self, runs: &[Range<u64>]) -> io::Result<()> {
        self.order_runs(runs, Order::Unmap, &[])
    }

    /// Has it map these pages, none of which is in its page table, from `frames`.
    pub(crate) fn share(&self, all: &[Shared], frames: &File, region: &File) -> io::Result<Sharing> {
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

    /// Has it map these pages from the region's file again, in which they are.
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
            let runs = runs.iter().map(|run| Run { first: run.start, count: run.end - run.start }).collect();
            self.order(&order(runs), files)?;
        }
        Ok(())
    }

    /// Its answer; none from one that is gone.
    fn order(&self, order: &Order, files: &[&File]) -> io::Result<Option<Reply>> {
        let _ordering = lock(&self.ordering);
        if self.gone.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        going_to_sleep();
        effect::at("order");
        let sent = self.orders.send(order, &files);
        effect::at("ordered");
        match sent.and_then(|()| self.orders.receive()) {
            Ok(Some((Reply::Refused(why), _))) => Err(io::Error::other(why)),
            Ok(Some((reply, _))) => Ok(Some(reply)),
            // It ended, or let go of the mapping: both have taken the pages out.
            Ok(None) | Err(_) => {
                self.gone.store(true, Ordering::Relaxed);
                Ok(None)
            }
        }
    }

    /// Memory that devices may write to whatever its page table says: fixed buffers of io_uring, RDMA.
    /// It may be the region's.
    pub(crate) fn pinned(&self) -> Bytes {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let pinned = status.lines().find_map(|line| line.strip_prefix("VmPin:")?.strip_suffix("kB"));
        Bytes(pinned.and_then(|pinned| pinned.trim().parse::<u64>().ok()).unwrap_or(0) << 10)
    }

    /// Adds the pages of its mapping that have no mark of "not written since it was armed".
    pub(crate) fn unproven(&self, runs: &[Range<u64>], into: &mut HashSet<u64>) -> io::Result<()> {
        // A device's write leaves no mark.
        if self.pinned() > Bytes::ZERO {
            let all = runs.iter().map(|run| self.addresses(run));
            into.extend(all.flat_map(|addresses| self.pages_at(addresses)));
            return Ok(());
        }
        let mut found = [sys::page_region { start: 0, end: 0, categories: 0 }; SCANNED];
        for run in runs {
            let Range { mut start, end } = self.addresses(run);
            while start < end {
                effect::at("scan");
                let (count, walked) = match sys::scan_unwritten(&self.pagemap, start..end, &mut found) {
                    // It has ended, and its page table with it.
                    Err(error) if has_ended(&error) => (0, end),
                    looked => looked?,
                };
                for region in &found[..count] {
                    into.extend(self.pages_at(start..region.start));
                    start = region.end;
                }
                // A scan ends early where `found` is full.
                let walked = if walked <= start && count == 0 { end } else { walked };
                into.extend(self.pages_at(start..walked));
                start = start.max(walked);
            }
        }
        Ok(())
    }

    /// Arms the marks of these pages: the next write to each is noticed.
    pub(crate) fn notice_writes(&self, runs: &[Range<u64>]) -> io::Result<()> {
        for run in runs {
            let Range { mut start, end } = self.addresses(run);
            while start < end {
                effect::at("notice writes");
                let walked = match sys::notice_writes(&self.pagemap, start..end) {
                    // It writes no more.
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

    /// The pages at these addresses, which are in its mapping.
    fn pages_at(&self, addresses: Range<u64>) -> Range<u64> {
        let page = |address: u64| self.pages.first + (address - self.address) / PAGE_SIZE as u64;
        page(addresses.start)..page(addresses.end.max(addresses.start))
    }
}

fn has_ended(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESRCH)
}
