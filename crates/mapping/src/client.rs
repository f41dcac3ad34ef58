//! The program's end.

use std::fmt::Display;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use aquifer_page::PAGE_SIZE;

use crate::connection::Connection;
use crate::live::Live;
use crate::message::{Attach, Order, Release, Reply, Request, Run, Shared as SharedPages, VERSION};
use crate::sharing::{self, Sharing};
use crate::sys;
use crate::userfault::Userfault;

/// How often an engine that is gone is looked for.
const RETRY: Duration = Duration::from_millis(10);

/// Why an engine does not care for a mapping.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// A system call of this process failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried, and what it takes.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The engine cannot be reached.
    #[error(
        "cannot reach the engine of the region at {path}: {source}; 'aquifer region list' shows whether it runs"
    )]
    Engine {
        /// Its socket.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
    /// The engine does not want it.
    #[error("the engine of the region refuses: {0}")]
    Refused(String),
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> AdoptError {
    move |source| AdoptError::System { what, source }
}

/// A mapping of a region in this process, whose pages come from the region's engine.
///
/// It stays under the engine's care until it is [released](Self::release); dropping this only forgets how to ask for things.
#[derive(Clone, Debug)]
pub struct Mapping(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Whose mapping it is: a child that the process forked has this, too, but neither the mapping nor its thread.
    process: u32,
    address: usize,
    pages: Run,
    /// The kernel is to refuse that pages are removed without the engine.
    is_locked: bool,
    socket: PathBuf,
    userfault: Userfault,
    sharing: Sharing,
    /// The pages that are still mapped. Held while some are unmapped, lest they be somebody else's by then.
    live: Mutex<Live>,
    /// To ask for things by.
    asking: Mutex<Option<Connection>>,
    /// What orders come by.
    orders: Mutex<Arc<Connection>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mapping {
    /// Puts a mapping of this process under the care of the engine that listens at `socket`. It starts a thread. With `is_locked` the
    /// kernel refuses `MADV_REMOVE` there, of which the engine would not know; without, the caller sees to it.
    ///
    /// # Safety
    /// `address` must be that of a shared mapping of the region's file, `length` bytes from page `first` on, that nobody has touched yet.
    /// It must not be unmapped or moved but by [`release`](Self::release).
    ///
    /// # Errors
    /// [`AdoptError`]; the mapping must then not be used.
    pub unsafe fn adopt(
        address: usize,
        length: usize,
        first: u64,
        socket: &Path,
        is_locked: bool,
    ) -> Result<Self, AdoptError> {
        let userfault = Userfault::new().map_err(system(
            "cannot serve page faults (it takes root or vm.unprivileged_userfaultfd=1, and Linux 6.7)",
        ))?;
        let sharing = Sharing::new().map_err(system("cannot guard shared pages"))?;
        // SAFETY: the caller says so; who is a child of this process cannot be served.
        unsafe { sys::keep_to_this_process(address, length) }
            .map_err(system("cannot keep the mapping out of children"))?;
        // SAFETY: the caller says so.
        unsafe { userfault.register(address as u64, length as u64) }
            .map_err(system("cannot register the mapping with userfaultfd"))?;
        if is_locked {
            // SAFETY: pages are taken out by `unmap` only.
            unsafe { sys::refuse_removal(address, length) }.map_err(system(
                "cannot lock the mapping, so that no page is removed but by the engine (it takes CAP_IPC_LOCK, or a limit of locked memory \
                 as large as the region)",
            ))?;
        }
        let pages = Run { first, count: (length / PAGE_SIZE) as u64 };
        let live = vec![pages];
        let attach = Attach { version: VERSION, address: address as u64, pages, live };
        let orders = hand_over(&attach, [&userfault, &sharing.guard], socket)?;
        let shared = Arc::new(Shared {
            process: process::id(),
            address,
            pages,
            is_locked,
            socket: socket.to_owned(),
            userfault,
            sharing,
            live: Mutex::new(Live::new(&[pages])),
            asking: Mutex::new(None),
            orders: Mutex::new(Arc::new(orders)),
        });
        let serving = shared.clone();
        with_signals_blocked(|| {
            thread::Builder::new().name("aquifer".to_owned()).spawn(move || serving.serve())
        })
        .map_err(system("cannot start a thread"))?;
        Ok(Self(shared))
    }

    /// Whether any of these addresses belongs to this mapping still.
    pub fn has_part_of(&self, range: &Range<usize>) -> bool {
        let shared = &self.0;
        shared.is_mine()
            && shared
                .pages_in(range)
                .is_some_and(|pages| lock(&shared.live).parts(&pages).next().is_some())
    }

    /// The parts of the range of addresses that belong to this mapping still.
    pub fn parts_of(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let shared = &self.0;
        let Some(pages) = shared.pages_in(range).filter(|_| shared.is_mine()) else {
            return Vec::new();
        };
        let part = |pages: Range<u64>| {
            let [from, to] = [pages.start, pages.end].map(|page| shared.address_of(page));
            from.max(range.start)..to.min(range.end)
        };
        lock(&shared.live).parts(&pages).map(part).collect()
    }

    /// Whether any of it still is.
    pub fn is_mapped(&self) -> bool {
        !self.0.is_mine() || !lock(&self.0.live).is_empty()
    }

    /// Whether it is this process's, and not that of one that forked this.
    pub fn is_mine(&self) -> bool {
        self.0.is_mine()
    }

    /// The socket of the region's engine.
    pub fn socket(&self) -> &Path {
        &self.0.socket
    }

    /// Makes whole pages of the region read as zeroes, and gives their memory back. Waits until that is so.
    ///
    /// # Errors
    /// Where the engine refuses, and in a child of the process whose mapping it is. An engine that is gone is waited for.
    pub fn discard(&self, pages: Run) -> io::Result<()> {
        if !self.0.is_mine() {
            return Err(io::Error::other(
                "the region is mapped in the process that forked this one, and not here",
            ));
        }
        let mut asking = lock(&self.0.asking);
        loop {
            match self.0.ask(&mut asking, &Request::Discard(pages)) {
                Ok(Reply::Done) => return Ok(()),
                Ok(Reply::Refused(why)) => return Err(io::Error::other(why)),
                Ok(Reply::DoneBut(_)) => return Err(io::ErrorKind::InvalidData.into()),
                Err(_) => {
                    *asking = None;
                    thread::sleep(RETRY);
                }
            }
        }
    }

    /// As [`discard`](Self::discard), by addresses of this mapping; only whole pages are discarded.
    pub fn discard_at(&self, range: &Range<usize>) -> io::Result<()> {
        let from = (range.start - self.0.address).div_ceil(PAGE_SIZE) as u64;
        let to = ((range.end - self.0.address) / PAGE_SIZE) as u64;
        if from >= to {
            return Ok(());
        }
        self.discard(Run { first: self.0.pages.first + from, count: to - from })
    }

    /// Has `unmap` unmap or replace these addresses, of which the engine knows nothing from then on. The engine is told before: it must not
    /// put there what it is fetching. One that is gone puts nothing there.
    ///
    /// # Errors
    /// Those of `unmap`; all is as it was then.
    pub fn release<T>(
        &self,
        range: &Range<usize>,
        unmap: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        let shared = &self.0;
        let Some(pages) = shared.pages_in(range).filter(|_| shared.is_mine()) else {
            return unmap();
        };
        let mut live = lock(&shared.live);
        shared.tell_release(&pages);
        match unmap() {
            Ok(done) => {
                live.remove(&pages);
                Ok(done)
            }
            Err(error) => {
                // The engine learns from the thread of this mapping that they are mapped still.
                lock(&shared.orders).shut();
                Err(error)
            }
        }
    }
}

impl Shared {
    fn is_mine(&self) -> bool {
        process::id() == self.process
    }

    /// Tells the engine, if there is one, that pages are about to be unmapped, and waits until it puts nothing there any more.
    fn tell_release(&self, pages: &Range<u64>) {
        let pages = Run { first: pages.start, count: pages.end - pages.start };
        let request = Request::Release(Release { address: self.address as u64, pages });
        // Not by the connection by which others ask: the engine may need this mapping before it answers them. What breaks is an engine
        // that has ended; the next one may know of this mapping already.
        while let Ok(connection) = Connection::to(&self.socket) {
            let answered =
                connection.send(&request, &[]).and_then(|()| connection.receive::<Reply>());
            if matches!(answered, Ok(Some(_))) {
                return;
            }
            thread::sleep(RETRY);
        }
    }

    fn ask(&self, asking: &mut Option<Connection>, request: &Request) -> io::Result<Reply> {
        let connection = match asking {
            Some(connection) => connection,
            None => asking.insert(Connection::to(&self.socket)?),
        };
        connection.send(request, &[])?;
        connection
            .receive()?
            .map(|(reply, _)| reply)
            .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Does what the engine orders, and finds the next one when it is gone, until nothing is mapped any more.
    fn serve(&self) {
        let mut orders = lock(&self.orders).clone();
        loop {
            match orders.receive() {
                Ok(Some((order, files))) => {
                    let reply = self
                        .obey(&order, &files)
                        .unwrap_or_else(|error| Reply::Refused(error.to_string()));
                    // Who is gone needs no answer.
                    let _ = orders.send(&reply, &[]);
                }
                Ok(None) | Err(_) => match self.hand_over_again() {
                    Some(next) => orders = next,
                    None => return,
                },
            }
        }
    }

    fn hand_over_again(&self) -> Option<Arc<Connection>> {
        let mut told = false;
        loop {
            thread::sleep(RETRY);
            // Held, so that what is unmapped meanwhile is told to this engine or is not told of as mapped.
            let live = lock(&self.live);
            if live.is_empty() {
                return None;
            }
            let (address, pages) = (self.address as u64, self.pages);
            let attach = Attach { version: VERSION, address, pages, live: live.runs() };
            match hand_over(&attach, [&self.userfault, &self.sharing.guard], &self.socket) {
                Ok(orders) => {
                    let orders = Arc::new(orders);
                    *lock(&self.orders) = orders.clone();
                    return Some(orders);
                }
                Err(AdoptError::Refused(why)) if !told => {
                    tell(format_args!(
                        "the new engine refuses this mapping: {why}; this program waits"
                    ));
                    told = true;
                }
                Err(_) => {}
            }
        }
    }

    fn obey(&self, order: &Order, files: &[OwnedFd]) -> io::Result<Reply> {
        let missing = || io::Error::other("the order came without its files");
        let failed = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| io::Error::new(error.kind(), format!("cannot {what}: {error}"))
        };
        match order {
            Order::Unmap(runs) => {
                runs.iter().try_for_each(|run| self.unmap(run)).map_err(failed("unmap"))?
            }
            Order::Restore(runs) => {
                let [region] = files else { return Err(missing()) };
                let restored = runs.iter().try_for_each(|run| self.restore(run, region));
                restored.map_err(failed("map the region's pages again"))?;
            }
            Order::Share(all) => {
                let [file, region] = files else { return Err(missing()) };
                let mut written = Vec::new();
                let shared = all
                    .iter()
                    .try_for_each(|shared| self.share(shared, file, region, &mut written));
                shared.map_err(failed("map shared pages"))?;
                if !written.is_empty() {
                    return Ok(Reply::DoneBut(written));
                }
            }
        }
        Ok(Reply::Done)
    }

    /// Does something with those parts of these pages that are still mapped; no other thread lets go of one meanwhile.
    fn each_part(
        &self,
        run: &Run,
        mut what: impl FnMut(&Range<usize>) -> io::Result<()>,
    ) -> io::Result<()> {
        for part in lock(&self.live).parts(&(run.first..run.end())) {
            what(&(self.address_of(part.start)..self.address_of(part.end)))?;
        }
        Ok(())
    }

    fn address_of(&self, page: u64) -> usize {
        self.address
            + (page.clamp(self.pages.first, self.pages.end()) - self.pages.first) as usize
                * PAGE_SIZE
    }

    /// The page of the region at an address of this mapping.
    fn page_at(&self, address: usize) -> u64 {
        self.pages.first + ((address - self.address) / PAGE_SIZE) as u64
    }

    /// The pages that have some of these addresses; none where there are none.
    fn pages_in(&self, range: &Range<usize>) -> Option<Range<u64>> {
        let length = self.pages.count as usize * PAGE_SIZE;
        let at = |address: usize| address.clamp(self.address, self.address + length) - self.address;
        let (from, to) = (at(range.start) / PAGE_SIZE, at(range.end).div_ceil(PAGE_SIZE));
        (from < to && range.start < range.end)
            .then(|| self.pages.first + from as u64..self.pages.first + to as u64)
    }

    fn unmap(&self, run: &Run) -> io::Result<()> {
        // SAFETY: it is still part of the mapping, and the lock is held.
        self.each_part(run, |part| unsafe { sys::unmap_pages(part.start, part.end - part.start) })
    }

    fn restore(&self, run: &Run, region: &OwnedFd) -> io::Result<()> {
        self.each_part(run, |part| self.restore_at(part, region))
    }

    fn restore_at(&self, part: &Range<usize>, region: &OwnedFd) -> io::Result<()> {
        let offset = self.page_at(part.start) * PAGE_SIZE as u64;
        // SAFETY: it is still part of the mapping; the engine has put the pages there, or this has.
        unsafe {
            sharing::restore(part, region.as_fd(), offset, &self.userfault)?;
            if self.is_locked {
                sys::refuse_removal(part.start, part.end - part.start)
            } else {
                Ok(())
            }
        }
    }

    fn share(
        &self,
        shared: &SharedPages,
        file: &OwnedFd,
        region: &OwnedFd,
        written: &mut Vec<Run>,
    ) -> io::Result<()> {
        self.each_part(&shared.pages, |part| {
            let offset =
                (shared.frame + self.page_at(part.start) - shared.pages.first) * PAGE_SIZE as u64;
            // SAFETY: it is still part of the mapping, and the engine has compared the pages, which are in no page table.
            for address in unsafe { self.sharing.share(part, file.as_fd(), offset) }? {
                let page = self.page_at(address);
                // Until it is there nobody else has what was written. SAFETY: it is mapped, and writes to it are held.
                while unsafe {
                    sharing::take_back(address, region.as_fd(), page * PAGE_SIZE as u64)
                }
                .is_err()
                {
                    thread::sleep(RETRY);
                }
                self.restore_at(&(address..address + PAGE_SIZE), region)?;
                written.push(Run { first: page, count: 1 });
            }
            Ok(())
        })
    }
}

/// Hands a mapping to the engine.
fn hand_over(
    attach: &Attach,
    userfaults: [&Userfault; 2],
    socket: &Path,
) -> Result<Connection, AdoptError> {
    let engine = |source| AdoptError::Engine { path: socket.to_owned(), source };
    let connection = Connection::to(socket).map_err(engine)?;
    let request = Request::Attach(attach.clone());
    connection.send(&request, &userfaults.map(Userfault::as_fd)).map_err(engine)?;
    match connection.receive().map_err(engine)? {
        Some((Reply::Done, _)) => Ok(connection),
        Some((Reply::Refused(why), _)) => Err(AdoptError::Refused(why)),
        Some((Reply::DoneBut(_), _)) => Err(engine(io::ErrorKind::InvalidData.into())),
        None => Err(engine(io::ErrorKind::UnexpectedEof.into())),
    }
}

/// Says something where the program's operator may see it.
fn tell(message: impl Display) {
    eprintln!("aquifer: {message}");
}

/// Threads that are started meanwhile get no signals: those are the program's business.
fn with_signals_blocked<T>(start: impl FnOnce() -> T) -> T {
    let before = sys::block_signals();
    let started = start();
    sys::restore_signals(&before);
    started
}
