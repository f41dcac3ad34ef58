//! The program's end of a mapping: it adopts a mapping, obeys the engine's orders and finds the
//! next engine.

use std::fmt::Display;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use aquifer_page::{PAGE_SIZE, lock};

use crate::connection::Connection;
use crate::live::Live;
use crate::message::{Attach, Order, Release, Reply, Request, Run, Shared as SharedPages, VERSION};
use crate::sharing::{self, Sharing};
use crate::sys;
use crate::userfault::Userfault;

/// The interval between attempts to reach an engine that is gone.
const RETRY: Duration = Duration::from_millis(10);

/// An error that keeps the engine from serving a mapping.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// A system call of this process failed.
    #[error("{what}: {source}")]
    System {
        /// The step that failed, and its prerequisites.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The engine cannot be reached.
    #[error(
        "cannot reach the region's engine at {path}: {source}; 'aquifer region list' shows whether \
         it runs"
    )]
    Engine {
        /// The engine's socket.
        path: PathBuf,
        /// The error of connecting or talking to it.
        source: io::Error,
    },
    /// The engine refuses the mapping, for this reason.
    #[error("the region's engine refuses the mapping: {0}")]
    Refused(String),
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> AdoptError {
    move |source| AdoptError::System { what, source }
}

/// A mapping of a region in this process. The region's engine provides its pages.
///
/// The engine serves the mapping until it is [released](Self::release). Dropping this handle only
/// loses the means to make requests.
#[derive(Clone, Debug)]
pub struct Mapping(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The process that owns the mapping. A forked child inherits this struct, but neither the
    /// mapping nor its thread.
    process: u32,
    address: usize,
    pages: Run,
    /// The kernel must refuse removal of pages that the engine does not know of.
    is_locked: bool,
    socket: PathBuf,
    userfault: Userfault,
    /// Whether the mapping's faults come to the userfaultfd. Changes with `live` locked.
    watched: AtomicBool,
    sharing: Sharing,
    /// The pages that are still mapped. Locked during an unmap, as another mapping may take the
    /// addresses.
    live: Mutex<Live>,
    /// The connection for requests to the engine.
    asking: Mutex<Option<Connection>>,
    /// The connection on which orders come.
    orders: Mutex<Arc<Connection>>,
}

impl Mapping {
    /// Puts a mapping of this process under the care of the engine that listens at `socket`, and
    /// starts a thread. With `is_locked` the kernel refuses `MADV_REMOVE` there, of which the
    /// engine would not know. Without it, the caller must prevent that.
    ///
    /// # Safety
    /// `address` must be that of a shared mapping of the region's file, `length` bytes from page
    /// `first` on. No code may have touched the mapping yet. Only [`release`](Self::release) may
    /// unmap or move it.
    ///
    /// # Errors
    /// [`AdoptError`]; the caller must then not use the mapping.
    pub unsafe fn adopt(
        address: usize,
        length: usize,
        first: u64,
        socket: &Path,
        is_locked: bool,
    ) -> Result<Self, AdoptError> {
        let userfault = Userfault::new().map_err(system(
            "cannot create a userfaultfd (needs Linux 6.7, and root or \
             vm.unprivileged_userfaultfd=1)",
        ))?;
        let sharing = Sharing::new().map_err(system("cannot guard shared pages"))?;
        // SAFETY: the caller's promise. The engine cannot serve a child of this process.
        unsafe { sys::keep_to_this_process(address, length) }
            .map_err(system("cannot keep children from inheriting the mapping"))?;
        if is_locked {
            // SAFETY: only `unmap` takes pages out.
            unsafe { sys::refuse_removal(address, length) }.map_err(system(
                "cannot lock the mapping against removal of pages (needs CAP_IPC_LOCK, or an \
                 RLIMIT_MEMLOCK as large as the region)",
            ))?;
        }
        let pages = Run { first, count: (length / PAGE_SIZE) as u64 };
        let address_of_first = address as u64;
        let attach = |watched| {
            let (address, live) = (address_of_first, vec![pages]);
            let attach = Attach { version: VERSION, address, pages, live, watched };
            hand_over(&attach, [&userfault, &sharing.guard], socket)
        };
        let (orders, watched) = match attach(false)? {
            Some(orders) => {
                // SAFETY: the caller's promise.
                unsafe { sys::allow_huge_pages(address, length) };
                (orders, false)
            }
            None => {
                // SAFETY: the caller's promise.
                unsafe { watch(&userfault, address..address + length) }?;
                let refused = || AdoptError::Refused("it watches the mapping already".to_owned());
                (attach(true)?.ok_or_else(refused)?, true)
            }
        };
        let shared = Arc::new(Shared {
            process: process::id(),
            address,
            pages,
            is_locked,
            socket: socket.to_owned(),
            userfault,
            watched: AtomicBool::new(watched),
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

    /// Returns whether this mapping still has any of these addresses.
    pub fn has_part_of(&self, range: &Range<usize>) -> bool {
        let shared = &self.0;
        shared.is_mine()
            && shared
                .pages_in(range)
                .is_some_and(|pages| lock(&shared.live).parts(&pages).next().is_some())
    }

    /// Returns the parts of the range of addresses that this mapping still has.
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

    /// Returns whether any page is still mapped; always true in a forked child.
    pub fn is_mapped(&self) -> bool {
        !self.0.is_mine() || !lock(&self.0.live).is_empty()
    }

    /// Returns whether this process made the mapping, rather than its parent before a fork.
    pub fn is_mine(&self) -> bool {
        self.0.is_mine()
    }

    /// Returns the path of the socket of the region's engine.
    pub fn socket(&self) -> &Path {
        &self.0.socket
    }

    /// Makes whole pages of the region read as zeroes, and frees their memory. Waits for the
    /// engine's answer, and for the next engine if this one is gone.
    ///
    /// # Errors
    /// The engine refuses, or this process is a child of the process that made the mapping.
    pub fn discard(&self, pages: Run) -> io::Result<()> {
        if !self.0.is_mine() {
            return Err(io::Error::other(
                "a forked child cannot use its parent's mapping of the region",
            ));
        }
        let mut asking = lock(&self.0.asking);
        loop {
            match self.0.ask(&mut asking, &Request::Discard(pages)) {
                Ok(Reply::Done) => return Ok(()),
                Ok(Reply::Refused(why)) => return Err(io::Error::other(why)),
                Ok(Reply::DoneBut(_) | Reply::Watch) => {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                Err(_) => {
                    *asking = None;
                    thread::sleep(RETRY);
                }
            }
        }
    }

    /// Discards pages as [`discard`](Self::discard) does, by addresses of this mapping. It discards
    /// only pages that lie wholly in the range.
    ///
    /// # Errors
    /// As [`discard`](Self::discard).
    pub fn discard_at(&self, range: &Range<usize>) -> io::Result<()> {
        let from = (range.start - self.0.address).div_ceil(PAGE_SIZE) as u64;
        let to = ((range.end - self.0.address) / PAGE_SIZE) as u64;
        if from >= to {
            return Ok(());
        }
        self.discard(Run { first: self.0.pages.first + from, count: to - from })
    }

    /// Runs `unmap`, which unmaps or replaces these addresses, after the engine has stopped to
    /// serve them. The engine must hear first, so that it does not put a fetched page there. An
    /// engine that is gone puts nothing there.
    ///
    /// # Errors
    /// Those of `unmap`, which must then have changed nothing.
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
                // The mapping's thread connects again, and so tells the engine that the pages are
                // still mapped.
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

    /// Tells the engine that pages are about to be unmapped, and waits until it puts nothing there
    /// any more. Returns at once if no engine listens.
    fn tell_release(&self, pages: &Range<u64>) {
        let pages = Run { first: pages.start, count: pages.end - pages.start };
        let request = Request::Release(Release { address: self.address as u64, pages });
        // A new connection, as the engine may need this mapping before it answers on the shared
        // one. If it breaks, that engine has ended, and the next one may already know this mapping.
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

    /// Obeys the engine's orders, and connects to the next engine after a loss, until no page is
    /// mapped.
    fn serve(&self) {
        let filters = sys::Filters::of_this_thread();
        let mut orders = lock(&self.orders).clone();
        loop {
            match orders.receive() {
                Ok(Some((order, files))) => {
                    let reply = self
                        .obey(&order, &files, &filters)
                        .unwrap_or_else(|error| Reply::Refused(error.to_string()));
                    // An engine that is gone needs no answer.
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
            // Held, so that an unmap meanwhile is either reported to this engine or absent from its
            // list.
            let live = lock(&self.live);
            if live.is_empty() {
                return None;
            }
            let (address, pages) = (self.address as u64, self.pages);
            let (live_runs, watched) = (live.runs(), self.watched.load(Ordering::Relaxed));
            let attach = Attach { version: VERSION, address, pages, live: live_runs, watched };
            match hand_over(&attach, [&self.userfault, &self.sharing.guard], &self.socket) {
                Ok(None) => {
                    if let Err(error) = self.watch(&live)
                        && !told
                    {
                        tell(format_args!("{error}; this program's pages stay in local RAM"));
                        told = true;
                    }
                }
                Ok(Some(orders)) => {
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

    fn obey(&self, order: &Order, files: &[OwnedFd], filters: &sys::Filters) -> io::Result<Reply> {
        let missing = || io::Error::other("the order came without its files");
        let failed = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| io::Error::new(error.kind(), format!("cannot {what}: {error}"))
        };
        match order {
            Order::Watch => self.watch(&lock(&self.live)).map_err(io::Error::other)?,
            Order::Unmap(runs) => self.unmap(runs, filters).map_err(failed("unmap"))?,
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

    /// Lets all faults of what is still mapped come to the userfaultfd.
    fn watch(&self, live: &Live) -> Result<(), AdoptError> {
        for part in live.parts(&(self.pages.first..self.pages.end())) {
            let part = self.address_of(part.start)..self.address_of(part.end);
            // SAFETY: the part still belongs to the mapping, as its list is locked.
            unsafe { watch(&self.userfault, part) }?;
        }
        self.watched.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Calls `what` for each part of these pages that is still mapped. The lock keeps other threads
    /// from unmapping one meanwhile.
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

    /// Returns the page of the region at an address of this mapping.
    fn page_at(&self, address: usize) -> u64 {
        self.pages.first + ((address - self.address) / PAGE_SIZE) as u64
    }

    /// Returns the pages that overlap these addresses, or `None` if there are none.
    fn pages_in(&self, range: &Range<usize>) -> Option<Range<u64>> {
        let length = self.pages.count as usize * PAGE_SIZE;
        let at = |address: usize| address.clamp(self.address, self.address + length) - self.address;
        let (from, to) = (at(range.start) / PAGE_SIZE, at(range.end).div_ceil(PAGE_SIZE));
        (from < to && range.start < range.end)
            .then(|| self.pages.first + from as u64..self.pages.first + to as u64)
    }

    fn unmap(&self, runs: &[Run], filters: &sys::Filters) -> io::Result<()> {
        let live = lock(&self.live);
        let mut all = Vec::with_capacity(runs.len());
        for run in runs {
            let pages = run.first..run.end();
            let parts = live.parts(&pages);
            all.extend(parts.map(|part| self.address_of(part.start)..self.address_of(part.end)));
        }
        // SAFETY: the parts still belong to the mapping, as its list is locked.
        unsafe { sys::unmap_pages(&all, filters) }
    }

    fn restore(&self, run: &Run, region: &OwnedFd) -> io::Result<()> {
        self.each_part(run, |part| self.restore_at(part, region))
    }

    fn restore_at(&self, part: &Range<usize>, region: &OwnedFd) -> io::Result<()> {
        let offset = self.page_at(part.start) * PAGE_SIZE as u64;
        // SAFETY: the part still belongs to the mapping, and the engine or `share` has put the
        // pages into the file.
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
            let offset = shared.frame.offset()
                + (self.page_at(part.start) - shared.pages.first) * PAGE_SIZE as u64;
            // SAFETY: the part still belongs to the mapping. The engine has compared the pages,
            // none of which is in a page table.
            for address in unsafe { self.sharing.share(part, file.as_fd(), offset) }? {
                let page = self.page_at(address);
                // Retries, as the written bytes are nowhere else yet. SAFETY: the page is mapped,
                // and writes to it are held.
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

/// Lets the faults at these addresses come to the userfaultfd. May be repeated. Pages move singly
/// from here on, so there are no more huge pages.
///
/// # Safety
/// The addresses must be those of a shared mapping of a region's file.
unsafe fn watch(userfault: &Userfault, at: Range<usize>) -> Result<(), AdoptError> {
    // SAFETY: the caller's promise.
    unsafe { sys::refuse_huge_pages(at.start, at.end - at.start) }
        .map_err(system("cannot keep huge pages out of the mapping"))?;
    // SAFETY: the caller's promise.
    unsafe { userfault.register(at.start as u64, (at.end - at.start) as u64) }
        .map_err(system("cannot register the mapping with userfaultfd"))
}

/// Hands a mapping to the engine, and returns the connection on which its orders come. Returns
/// `None` if the engine serves only watched mappings, and this one is not.
fn hand_over(
    attach: &Attach,
    userfaults: [&Userfault; 2],
    socket: &Path,
) -> Result<Option<Connection>, AdoptError> {
    let engine = |source| AdoptError::Engine { path: socket.to_owned(), source };
    let connection = Connection::to(socket).map_err(engine)?;
    let request = Request::Attach(attach.clone());
    connection.send(&request, &userfaults.map(Userfault::as_fd)).map_err(engine)?;
    match connection.receive().map_err(engine)? {
        Some((Reply::Done, _)) => Ok(Some(connection)),
        Some((Reply::Watch, _)) => Ok(None),
        Some((Reply::Refused(why), _)) => Err(AdoptError::Refused(why)),
        Some((Reply::DoneBut(_), _)) => Err(engine(io::ErrorKind::InvalidData.into())),
        None => Err(engine(io::ErrorKind::UnexpectedEof.into())),
    }
}

/// Prints a message for the program's operator to stderr.
fn tell(message: impl Display) {
    eprintln!("aquifer: {message}");
}

/// Runs `start` with signals blocked, so that threads that it starts receive none. Signals belong
/// to the program's own threads.
fn with_signals_blocked<T>(start: impl FnOnce() -> T) -> T {
    let before = sys::block_signals();
    let started = start();
    sys::restore_signals(&before);
    started
}
