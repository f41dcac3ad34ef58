//! A program that has the region mapped, as its engine sees it.

mod mapping;
mod prefetchers;
mod process;

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, PageIndex};
use aquifer_region_client::{Attach, Connection, Filled, Order, Reply, Run, Shared, Userfault};
use aquifer_transport::sleep::going_to_sleep;
use rustix::event::{PollFd, PollFlags, poll};

pub(crate) use self::mapping::{Mapping, each_present};
use self::prefetchers::Prefetchers;
pub use self::process::mappings_left;
use self::process::{Process, timespec};
use crate::prefetch::PrefetchKind;
use crate::{effect, lock};

/// The most runs in one order, which fit a message with room to spare.
const RUNS_PER_ORDER: usize = 512;

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
    pub(crate) process: Process,
    pub(crate) mapping: Mapping,
    pub(crate) userfault: Userfault,
    /// The userfaultfd that guards its shared pages.
    pub(crate) guard: Userfault,
    pub(crate) prefetchers: Prefetchers,
    orders: Connection,
    /// Held from an order until its answer.
    ordering: Mutex<()>,
    /// The program has nothing mapped any more.
    gone: AtomicBool,
    /// The program takes no orders.
    silent: AtomicBool,
    /// The mapping's faults come to the userfaultfd.
    watched: AtomicBool,
    /// Another `Program` has taken its place.
    replaced: AtomicBool,
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
        Ok(Self {
            id,
            process: Process::of(&orders)?,
            mapping: Mapping::new(attach, orders.peer()?, before.map(|before| &before.mapping))?,
            userfault,
            guard,
            prefetchers: Prefetchers::new(prefetch),
            orders,
            ordering: Mutex::new(()),
            gone: AtomicBool::new(false),
            silent: AtomicBool::new(false),
            watched: AtomicBool::new(attach.watched),
            replaced: AtomicBool::new(false),
        })
    }

    /// Returns the name that the kernel has for it, and its process id.
    pub(crate) fn name(&self) -> String {
        self.process.name()
    }

    /// Tells the program that the engine serves it, after `known`. No order goes out before `known`
    /// is done.
    pub(crate) fn accept(&self, known: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let _ordering = lock(&self.ordering);
        known()?;
        self.orders.send(&Reply::Done, &[])
    }

    /// Waits until the program has nothing mapped any more, or another `Program` has taken its
    /// place. While the connection is down, `is_mapped` tells.
    pub(crate) fn wait_for_end(&self, is_mapped: impl Fn() -> bool) {
        let is_over = || self.replaced.load(Ordering::Relaxed) || self.mapping.live().is_empty();
        while !is_over() {
            if !self.is_silent() {
                // With no events requested, only a hang-up ends the wait.
                let mut fds = [
                    PollFd::new(&self.orders, PollFlags::empty()),
                    PollFd::new(&self.process.pidfd, PollFlags::IN),
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
            } else if !is_mapped() || self.process.has_ended(SILENT_POLL_INTERVAL) {
                return;
            }
        }
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

    /// Returns whether the mapping's faults come to the engine.
    pub(crate) fn is_watched(&self) -> bool {
        self.watched.load(Ordering::Relaxed)
    }

    /// Orders the program to let its faults come to the engine.
    pub(crate) fn watch(&self) -> io::Result<()> {
        self.order(&Order::Watch, &[])?;
        self.watched.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Marks the connection as lost. The program's thread, if it lives, notices and connects again.
    fn is_lost(&self, why: &str) {
        if !self.silent.swap(true, Ordering::Relaxed) {
            self.orders.shut();
            if !self.process.has_ended(Duration::ZERO) {
                let program = self.name();
                tracing::info!(
                    program,
                    "the program does not answer, so its mapped pages stay in the cache: {why}"
                );
            }
        }
    }

    /// Returns whether all pages are unmapped, and shuts the connection in that case.
    pub(crate) fn has_released_all(&self) -> bool {
        let all = self.mapping.live().is_empty();
        if all {
            self.orders.shut();
        }
        all
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
        let live = self.mapping.live();
        if live.has(PageIndex(page)) && !self.is_gone() {
            put(self.mapping.addresses(&(page..page + 1)).start)
        } else {
            Ok(Filled::Gone)
        }
    }

    /// Makes the threads that wait for these pages fault again.
    pub(crate) fn wake(&self, pages: &Range<u64>) {
        let Range { start, end } = self.mapping.addresses(pages);
        if start < end {
            // A failure means that the program is gone, and no thread waits.
            let _ = self.userfault.wake(start, end - start);
            let _ = self.guard.wake(start, end - start);
        }
    }

    pub(crate) fn wake_all(&self) {
        self.wake(&self.mapping.pages());
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
        if self.mapping.live().is_empty() || self.process.has_ended(Duration::ZERO) {
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
                PollFd::new(&self.process.pidfd, PollFlags::IN),
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

    /// Adds the mapped pages with no mark of "not written since armed". The marks of a program that
    /// is gone prove nothing.
    pub(crate) fn unproven(&self, runs: &[Range<u64>], into: &mut HashSet<u64>) -> io::Result<()> {
        // A device's write leaves no mark.
        if self.is_gone() || self.process.pinned() > Bytes::ZERO {
            into.extend(runs.iter().cloned().flatten());
            return Ok(());
        }
        self.mapping.unwritten(runs, into)
    }
}
