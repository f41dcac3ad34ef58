//! The programs that map a region: they attach, release pages and end.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard};
use std::time::{Duration, Instant};

use aquifer_region_client::{Attach, Connection, Release, Reply, Run, Userfault, VERSION};
use rustix::event::epoll;

use super::Engine;
use super::cache::Cache;
use super::fault::GUARD;
use super::surviving_mappings::{Mapped, SurvivingMappings};
use super::watching::Is;
use crate::error::RegionError;
use crate::lock;
use crate::prefetch::PrefetchKind;
use crate::program::Program;

/// The number of pages handled under one lock.
const CHUNK: u64 = 4096;

/// How long a request waits for programs that take no orders, if it needs them.
const RETURN_TIMEOUT: Duration = Duration::from_secs(10);

/// The programs that map the region.
#[derive(Debug)]
pub(super) struct Programs {
    list: RwLock<Vec<Arc<Program>>>,
    pub(super) surviving: Mutex<SurvivingMappings>,
    /// The region is being removed, so no program may attach. Read under the lock of the list.
    removing: AtomicBool,
    /// How often programs have unmapped pages. Only their page tables knew of writes to these
    /// pages.
    pub(super) released: AtomicU64,
    /// The id of the next program.
    next: AtomicU64,
    prefetch: PrefetchKind,
    /// Held during a scan for dirty pages, as a scan clears the marks that the next one would find.
    pub(super) looking: Mutex<()>,
}

impl Programs {
    pub(super) fn new(surviving: SurvivingMappings, prefetch: PrefetchKind) -> Self {
        Self {
            list: RwLock::default(),
            surviving: Mutex::new(surviving),
            removing: AtomicBool::new(false),
            released: AtomicU64::new(0),
            next: AtomicU64::new(0),
            prefetch,
            looking: Mutex::default(),
        }
    }
}

impl Engine {
    /// Serves a mapping, and returns when its program has nothing of it mapped any more, or has
    /// connected again.
    ///
    /// # Errors
    /// The mapping is not of this region, or its program cannot be examined. The program hears of a
    /// refusal.
    pub fn attend(
        &self,
        attach: &Attach,
        userfaults: [OwnedFd; 2],
        orders: Connection,
    ) -> io::Result<()> {
        // Held, so that a mapping is refused until it is watched, or is among those that get the
        // order.
        let watching = self.watching.hold();
        if !attach.watched && *watching != Is::Unwatched {
            return orders.send(&Reply::Watch, &[]);
        }
        let (program, mapped) = self.attach(attach, userfaults.map(Userfault::from), orders)?;
        drop(watching);
        program.wait_for_end(|| lock(&self.programs.surviving).is_there(&mapped));
        self.detach(&program, &mapped);
        Ok(())
    }

    pub(super) fn attach(
        &self,
        attach: &Attach,
        userfaults: [Userfault; 2],
        orders: Connection,
    ) -> io::Result<(Arc<Program>, Mapped)> {
        let refuse = |why: String| {
            let _ = orders.send(&Reply::Refused(why.clone()), &[]);
            io::Error::other(why)
        };
        if attach.version != VERSION {
            let theirs = attach.version;
            return Err(refuse(format!(
                "the program speaks protocol version {theirs}, the engine {VERSION}; use the same \
                 release for both"
            )));
        }
        let Run { first, count } = attach.pages;
        if first.checked_add(count).is_none_or(|end| end > self.table.pages()) {
            return Err(refuse("the mapping is larger than the region".to_owned()));
        }
        if self.programs.removing.load(Ordering::Relaxed) {
            return Err(refuse("the region is being removed".to_owned()));
        }
        let pid = orders.peer()?;
        let mapped = Mapped::new(pid, attach.address, attach.pages, attach.watched)?;
        let id = self.programs.next.fetch_add(1, Ordering::Relaxed);
        let is_before =
            |other: &Arc<Program>| is_same(other, pid, attach.address) && !other.is_gone();
        let before = self.programs().into_iter().find(is_before);
        let program = Program::new(
            id,
            attach,
            userfaults,
            orders,
            self.programs.prefetch,
            before.as_deref(),
        )?;
        let program = Arc::new(program);
        if let Err(error) = self.take_care(&program, mapped) {
            // The program has pages mapped, and comes back. It must be on one of the two lists at
            // all times.
            lock(&self.programs.surviving).is_away(mapped);
            self.programs_mut().retain(|other| !Arc::ptr_eq(other, &program));
            return Err(error);
        }
        tracing::info!(program = program.name(), pages = count, "mapped");
        Ok((program, mapped))
    }

    fn take_care(&self, program: &Arc<Program>, mapped: Mapped) -> io::Result<()> {
        // If an earlier engine served it, no page may leave before both steps are done.
        program.accept(|| {
            let mut programs = self.programs_mut();
            if self.programs.removing.load(Ordering::Relaxed) {
                return Err(io::Error::other("the region is being removed"));
            }
            let before = |other: &mut Arc<Program>| {
                is_same(other, program.process.pid, program.mapping.address) && !other.is_gone()
            };
            for other in programs.extract_if(.., before) {
                other.replace();
                self.ignore(&other);
            }
            programs.push(program.clone());
            lock(&self.programs.surviving).add(mapped)
        })?;
        self.restore_shared().map_err(io::Error::other)?;
        // Also to an unwatched one: from the moment when it registers, its threads wait.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::EXCLUSIVE;
        for (userfault, id) in
            [(&program.userfault, program.id), (&program.guard, program.id | GUARD)]
        {
            epoll::add(&self.faults.epoll, userfault, epoll::EventData::new_u64(id), flags)?;
        }
        // Wakes the threads that an earlier engine was told of and did not serve.
        program.wake_all();
        Ok(())
    }

    /// Removes its faults from the epoll.
    fn ignore(&self, program: &Program) {
        let _ = epoll::delete(&self.faults.epoll, &program.userfault);
        let _ = epoll::delete(&self.faults.epoll, &program.guard);
    }

    pub(super) fn detach(&self, program: &Arc<Program>, mapped: &Mapped) {
        let programs = self.programs_mut();
        if program.is_replaced() {
            return;
        }
        program.end();
        drop(programs);
        self.ignore(program);
        // It stays listed meanwhile, so that no page counts as clean of which only its marks tell.
        self.forget_marks(0..self.table.pages(), |_| ());
        let mut programs = self.programs_mut();
        programs.retain(|other| !Arc::ptr_eq(other, program));
        // The program may have mapped the region at the same address again.
        if !programs
            .iter()
            .any(|other| is_same(other, program.process.pid, program.mapping.address))
        {
            lock(&self.programs.surviving).remove(mapped);
        }
        drop(programs);
        tracing::info!(process = program.process.pid, "unmapped");
    }

    /// Notes that a program is about to unmap pages. After this returns, the engine puts nothing
    /// there.
    pub fn release(&self, pid: u32, Release { address, pages }: &Release) {
        let end = pages.first.saturating_add(pages.count).min(self.table.pages());
        let programs = self.programs();
        for program in programs.iter().filter(|program| is_same(program, pid, *address)) {
            self.forget_marks(pages.first..end, |chunk| program.mapping.release(chunk));
            self.programs.released.fetch_add(1, Ordering::Relaxed);
            program.has_released_all();
        }
    }

    /// Marks pages dirty of which only a page table knew, in chunks. `forget` drops that page table
    /// from the engine's view.
    fn forget_marks(&self, pages: Range<u64>, forget: impl Fn(&Range<u64>)) {
        let mut first = pages.start;
        while first < pages.end {
            let chunk = first..pages.end.min(first + CHUNK);
            first = chunk.end;
            let mut cache = lock(&self.cache);
            forget(&chunk);
            self.lose_marks_of(&mut cache, chunk);
        }
    }

    pub(super) fn programs(&self) -> Vec<Arc<Program>> {
        self.programs.list.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn program(&self, id: u64) -> Option<Arc<Program>> {
        let programs = self.programs.list.read().unwrap_or_else(PoisonError::into_inner);
        programs.iter().find(|program| program.id == id).cloned()
    }

    fn programs_mut(&self) -> RwLockWriteGuard<'_, Vec<Arc<Program>>> {
        self.programs.list.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the names of the programs that have the region mapped.
    pub fn mapped_by(&self) -> Vec<String> {
        let mut names: Vec<_> = self.programs().iter().map(|program| program.name()).collect();
        names.extend(lock(&self.programs.surviving).missing_names());
        names
    }

    /// Returns the processes that have the region mapped.
    pub fn processes(&self) -> Vec<u32> {
        self.programs().iter().map(|program| program.process.pid).collect()
    }

    /// Blocks new programs, if none has the region mapped and none is due to come back.
    ///
    /// # Errors
    /// The names of the programs that have the region mapped.
    pub fn begin_removal(&self) -> Result<(), Vec<String>> {
        // Once no program is due to come back, that stays so.
        let is_known = self.is_known();
        let programs = self.programs_mut();
        let is_free = programs.is_empty() && is_known;
        self.programs.removing.store(is_free, Ordering::Relaxed);
        drop(programs);
        if is_free { Ok(()) } else { Err(self.mapped_by()) }
    }

    /// Allows new programs again, as the removal was abandoned.
    pub fn end_removal(&self) {
        self.programs.removing.store(false, Ordering::Relaxed);
    }

    /// Returns whether this engine serves all programs that may have pages mapped, and all take
    /// orders.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete_now(&mut lock(&self.cache))
    }

    /// As [`is_complete`](Self::is_complete), with the cache locked.
    pub(super) fn is_complete_now(&self, cache: &mut Cache) -> bool {
        self.is_known_now(cache) && !self.programs().iter().any(|program| program.is_silent())
    }

    /// Waits until `is` holds, for a limited time. A thread that serves a fault must not call it.
    ///
    /// # Errors
    /// The timeout passes, or the engine ends; the error names the programs that take no orders.
    pub(super) fn wait_until(&self, is: impl Fn(&Self) -> bool) -> Result<(), RegionError> {
        let deadline = Instant::now() + RETURN_TIMEOUT;
        while !is(self) {
            if Instant::now() > deadline || self.has_ended() {
                return Err(RegionError::Refused(self.describe_wait()));
            }
            self.wait_for_change(lock(&self.cache));
        }
        Ok(())
    }

    /// Returns a message that names the programs that the engine waits for.
    pub(super) fn describe_wait(&self) -> String {
        let silent = self.programs().into_iter().filter(|program| program.is_silent());
        let mut names: Vec<_> = silent.map(|program| program.name()).collect();
        names.extend(lock(&self.programs.surviving).missing_names());
        format!(
            "the engine waits for {}; resume a stopped program with 'kill -CONT PID'",
            names.join(", ")
        )
    }
}

fn is_same(program: &Program, pid: u32, address: u64) -> bool {
    program.process.pid == pid && program.mapping.address == address
}
