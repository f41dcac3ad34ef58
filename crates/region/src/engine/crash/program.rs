//! A program that has the region mapped, played by the thread that plays its engine.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_mapping::{Attach, Connection, Listener, Order, Reply, Run, Userfault, VERSION};
use aquifer_page::PAGE_SIZE;

use super::super::Engine;
use super::super::expected::Mapped;
use crate::program;
use crate::sys::test::{Ended, Mapping};

/// What is written and compared at a time: a part of a page.
pub(super) const CELLS: u64 = 2;
const WORDS: usize = PAGE_SIZE / 8 / CELLS as usize;

/// What stands in a cell.
fn word(cell: u64, version: u64, at: usize) -> u64 {
    if version == 0 { 0 } else { (cell << 32 | version).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at as u64 }
}

pub(super) struct Program {
    memory: Mapping,
    pages: u64,
    userfault: Userfault,
    guard: Userfault,
    pagemap: File,
    orders: RefCell<Option<Connection>>,
    served: RefCell<Option<(Arc<program::Program>, Mapped)>>,
}

impl Program {
    pub(super) fn new(region: &File, pages: u64) -> io::Result<Self> {
        let memory = Mapping::new(region, pages as usize * PAGE_SIZE)?;
        let (userfault, guard) = (Userfault::new()?, Userfault::guard()?);
        // SAFETY: it is a mapping of a region's file, of which only what an engine puts there is read.
        unsafe { userfault.register(memory.address() as u64, pages * PAGE_SIZE as u64) }?;
        let pagemap = File::open("/proc/self/pagemap")?;
        let (orders, served) = (RefCell::default(), RefCell::default());
        Ok(Self { memory, pages, userfault, guard, pagemap, orders, served })
    }

    pub(super) fn address(&self) -> usize {
        self.memory.address()
    }

    pub(super) fn served(&self) -> Option<Arc<program::Program>> {
        self.served.borrow().as_ref().map(|(program, _)| program.clone())
    }

    /// Puts the mapping under the care of an engine.
    pub(super) fn attach(&self, engine: &Engine, listener: &Listener, socket: &Path) -> io::Result<()> {
        let ours = Connection::to(socket)?;
        let theirs = listener.accept()?;
        let pages = Run { first: 0, count: self.pages };
        let attach = Attach { version: VERSION, address: self.address() as u64, pages, live: vec![pages] };
        let copy = |userfault: &Userfault| userfault.as_fd().try_clone_to_owned().map(Userfault::from);
        let userfaults = [copy(&self.userfault)?, copy(&self.guard)?];
        *self.served.borrow_mut() = Some(engine.attach(&attach, userfaults, theirs)?);
        match ours.receive::<Reply>()? {
            Some((Reply::Done, _)) => *self.orders.borrow_mut() = Some(ours),
            other => return Err(io::Error::other(format!("{other:?}"))),
        }
        Ok(())
    }

    /// The engine is gone.
    pub(super) fn lose_engine(&self) {
        *self.served.borrow_mut() = None;
    }

    /// Does what it was ordered to, and says so.
    pub(super) fn obey(&self) {
        let orders = self.orders.borrow();
        let Some(orders) = &*orders else { return };
        while is_readable(orders) {
            let Ok(Some((order, _))) = orders.receive::<Order>() else { return };
            let reply = match order {
                Order::Unmap(runs) => {
                    runs.iter().for_each(|run| self.memory.drop_entries(run.first..run.end()));
                    Reply::Done
                }
                Order::Share(_) | Order::Restore(_) => Reply::Refused("not played".to_owned()),
            };
            // An engine that is gone needs no answer.
            let _ = orders.send(&reply, &[]);
        }
    }

    /// Takes a page out of its page table by itself.
    pub(super) fn drop_entry(&self, page: u64) {
        self.memory.drop_entries(page..page + 1);
    }

    /// Whether a touch is no fault.
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

    /// Ends it. Nothing is mapped where it was until what is returned is dropped.
    pub(super) fn end(self) -> (Option<(Arc<program::Program>, Mapped)>, io::Result<Ended>) {
        let Self { memory, served, .. } = self;
        (served.into_inner(), memory.end())
    }
}

fn is_readable(connection: &Connection) -> bool {
    let mut fds = [rustix::event::PollFd::new(connection, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())).is_ok_and(|ready| ready > 0)
}
