//! A program that maps the region, simulated in the thread of its engine.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_page::PAGE_SIZE;
use aquifer_region_client::{
    Attach, Connection, Listener, Order, Reply, Run, Shared, Userfault, VERSION,
};
use rustix::mm::MapFlags;

use super::super::Engine;
use super::super::surviving_mappings::Mapped;
use crate::program;
use crate::sys::test::{Ended, Mapping};

/// The number of cells in a page. Writes and checks cover whole cells.
pub(super) const CELLS: u64 = 2;
const WORDS: usize = PAGE_SIZE / 8 / CELLS as usize;

/// Returns the word at this index of a cell, for a version.
fn word(cell: u64, version: u64, at: usize) -> u64 {
    if version == 0 {
        0
    } else {
        (cell << 32 | version).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at as u64
    }
}

pub(super) struct Program {
    memory: Mapping,
    pages: u64,
    userfault: Userfault,
    guard: Userfault,
    pagemap: File,
    /// The connection for orders, and whether the engine has accepted the mapping.
    orders: RefCell<Option<(Connection, bool)>>,
    /// Pages that are mapped from frames; the kernel holds writes to them.
    shared: RefCell<BTreeSet<u64>>,
    served: RefCell<Option<(Arc<program::Program>, Mapped)>>,
}

impl Program {
    pub(super) fn new(region: &File, pages: u64) -> io::Result<Self> {
        let memory = Mapping::new(region, pages as usize * PAGE_SIZE)?;
        let (userfault, guard) = (Userfault::new()?, Userfault::guard()?);
        // SAFETY: it is a mapping of a region's file, and only content that an engine provides is
        // read.
        unsafe { userfault.register(memory.address() as u64, pages * PAGE_SIZE as u64) }?;
        let pagemap = File::open("/proc/self/pagemap")?;
        let (orders, shared, served) = Default::default();
        Ok(Self { memory, pages, userfault, guard, pagemap, orders, shared, served })
    }

    pub(super) fn address(&self) -> usize {
        self.memory.address()
    }

    pub(super) fn served(&self) -> Option<Arc<program::Program>> {
        self.served.borrow().as_ref().map(|(program, _)| program.clone())
    }

    /// Attaches the mapping to an engine.
    pub(super) fn attach(
        &self,
        engine: &Engine,
        listener: &Listener,
        socket: &Path,
    ) -> io::Result<()> {
        let ours = Connection::to(socket)?;
        let theirs = listener.accept()?;
        let pages = Run { first: 0, count: self.pages };
        let attach = Attach {
            version: VERSION,
            address: self.address() as u64,
            pages,
            live: vec![pages],
            watched: true,
        };
        let copy =
            |userfault: &Userfault| userfault.as_fd().try_clone_to_owned().map(Userfault::from);
        let userfaults = [copy(&self.userfault)?, copy(&self.guard)?];
        *self.orders.borrow_mut() = Some((ours, false));
        *self.served.borrow_mut() = Some(engine.attach(&attach, userfaults, theirs)?);
        self.obey();
        Ok(())
    }

    /// Notes that the engine is gone.
    pub(super) fn lose_engine(&self) {
        *self.served.borrow_mut() = None;
    }

    /// Carries out the pending orders, and answers them.
    pub(super) fn obey(&self) {
        let mut orders = self.orders.borrow_mut();
        let Some((orders, is_accepted)) = &mut *orders else { return };
        while is_readable(orders) {
            if !*is_accepted {
                *is_accepted = matches!(orders.receive::<Reply>(), Ok(Some((Reply::Done, _))));
                continue;
            }
            let Ok(Some((order, files))) = orders.receive::<Order>() else { return };
            let reply = match order {
                Order::Watch => Reply::Done,
                Order::Unmap(runs) => {
                    runs.iter().for_each(|run| self.memory.drop_entries(run.first..run.end()));
                    Reply::Done
                }
                Order::Share(all) => {
                    reply(all.iter().try_for_each(|shared| self.share(shared, &files[0])))
                }
                Order::Restore(runs) => {
                    reply(runs.iter().try_for_each(|run| self.restore(run, &files[0])))
                }
            };
            // An engine that is gone needs no answer.
            let _ = orders.send(&reply, &[]);
        }
    }

    fn share(&self, shared: &Shared, frames: &OwnedFd) -> io::Result<()> {
        let pages = shared.pages.first..shared.pages.end();
        // SAFETY: it is a private mapping of a file.
        let guard = |start, length| unsafe { self.guard.protect(start, length) };
        self.memory.replace(pages.clone(), (frames, shared.frame.0), MapFlags::PRIVATE, guard)?;
        self.shared.borrow_mut().extend(pages);
        Ok(())
    }

    fn restore(&self, run: &Run, region: &OwnedFd) -> io::Result<()> {
        let pages = run.first..run.end();
        // SAFETY: it is again a mapping of the region's file.
        let register = |start, length| unsafe { self.userfault.register(start, length) };
        self.memory.replace(pages.clone(), (region, run.first), MapFlags::SHARED, register)?;
        self.shared.borrow_mut().retain(|page| !pages.contains(page));
        Ok(())
    }

    /// Returns whether writes to the page are held.
    pub(super) fn shares(&self, page: u64) -> bool {
        self.shared.borrow().contains(&page)
    }

    /// Returns the content of the page, which must be in the page table.
    pub(super) fn content(&self, page: u64) -> Vec<u8> {
        let words = self.memory.words()[page as usize * PAGE_SIZE / 8..][..PAGE_SIZE / 8].iter();
        words.flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect()
    }

    /// Drops a page from the page table, unless it is shared.
    pub(super) fn drop_entry(&self, page: u64) {
        if self.shares(page) {
            return;
        }
        self.memory.drop_entries(page..page + 1);
    }

    /// Returns whether a touch needs no fault.
    pub(super) fn has(&self, page: u64) -> bool {
        const PRESENT: u64 = 1 << 63;
        let mut entry = [0; 8];
        let at = (self.address() / PAGE_SIZE) as u64 + page;
        self.pagemap
            .read_exact_at(&mut entry, at * 8)
            .is_ok_and(|()| u64::from_ne_bytes(entry) & PRESENT != 0)
    }

    fn words(&self, cell: u64) -> &[std::sync::atomic::AtomicU64] {
        &self.memory.words()[cell as usize * WORDS..][..WORDS]
    }

    pub(super) fn write(&self, cell: u64, version: u64) {
        let words = self.words(cell).iter().enumerate();
        words.for_each(|(at, is)| is.store(word(cell, version, at), Ordering::Relaxed));
    }

    pub(super) fn holds(&self, cell: u64, version: u64) -> bool {
        let mut words = self.words(cell).iter().enumerate();
        words.all(|(at, is)| is.load(Ordering::Relaxed) == word(cell, version, at))
    }

    /// Ends the program. Its addresses stay reserved until the returned value is dropped.
    pub(super) fn end(self) -> (Option<(Arc<program::Program>, Mapped)>, io::Result<Ended>) {
        let Self { memory, served, .. } = self;
        (served.into_inner(), memory.end())
    }
}

fn reply(done: io::Result<()>) -> Reply {
    done.map_or_else(|error| Reply::Refused(error.to_string()), |()| Reply::Done)
}

fn is_readable(connection: &Connection) -> bool {
    let mut fds = [rustix::event::PollFd::new(connection, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default()))
        .is_ok_and(|ready| ready > 0)
}
