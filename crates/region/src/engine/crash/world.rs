//! Hosts with an engine each, which dies at a point that the schedule chooses.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGE_SIZE, VolumeId, WorkerId};
use aquifer_region_client::{Fault, Listener};
use aquifer_transport::Address;
use aquifer_volume::{Encryption, LeaseTarget, Protocol, Volume, VolumeConfig};
use rustix::fs::SeekFrom;
use tempfile::TempDir;

use super::super::fault::FaultRequest;
use super::super::{Engine, EngineConfig, Paging, Scheme};
use super::lender::Pages;
use super::program::{CELLS, Program};
use crate::effect;
use crate::lock;
use crate::policy::PolicyKind;
use crate::prefetch::{MOST, PrefetchKind};
use crate::sys::test::Ended;

/// The payload that unwinds a killed engine.
pub(super) struct Killed;

/// The payload that unwinds a schedule after a failed check.
pub(super) struct Wrong(pub(super) String);

#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) pages: u64,
    pub(super) frames: u64,
    pub(super) policy: PolicyKind,
    pub(super) scheme: Scheme,
    /// Whether pages become shared with others of the group.
    pub(super) shares: bool,
    /// Whether leases come and go.
    pub(super) moves: bool,
    /// Whether second copies come and go, and their lenders.
    pub(super) copies: bool,
    /// Whether the first of these lags behind. Each other one of the following does, too.
    pub(super) lags: bool,
}

/// A random sequence that depends only on its seed.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % end
    }
}

pub(super) struct Host {
    pub(super) number: u64,
    directory: TempDir,
    region: File,
    listener: Listener,
    pub(super) foreign: Cell<bool>,
    /// The region's leases on record.
    pub(super) leases: RefCell<BTreeSet<LeaseId>>,
    /// The leases with a second copy on record, and the lease that holds it.
    pub(super) copies: RefCell<BTreeMap<LeaseId, LeaseId>>,
    pub(super) engine: RefCell<Option<Arc<Engine>>>,
    pub(super) programs: RefCell<Vec<Rc<Program>>>,
}

/// What happens next.
pub(super) struct Schedule {
    random: RefCell<Random>,
    /// The number of points until the running engine is killed.
    pub(super) fuse: Cell<Option<u64>>,
    /// Whether only told steps happen: no random kill, no interference.
    is_told: bool,
    pub(super) playing: Cell<bool>,
    /// Programs do nothing on their own.
    pub(super) still: Cell<bool>,
    /// Pages under discard, which no program touches.
    pub(super) discarding: RefCell<std::ops::Range<u64>>,
}

/// What programs wrote.
pub(super) struct Model {
    /// The versions that each cell may hold.
    pub(super) cells: RefCell<Vec<Vec<u64>>>,
    /// The number of versions so far.
    versions: Cell<u64>,
}

pub(super) struct World {
    pub(super) shape: Shape,
    pub(super) lender: Arc<Pages>,
    /// The key of all leases.
    encryption: Option<Encryption>,
    /// Leases whose lender may have other pages than the last ones.
    pub(super) suspects: RefCell<BTreeSet<LeaseId>>,
    /// The number of second copies so far.
    pub(super) copies: Cell<u64>,
    pub(super) schedule: Schedule,
    /// `here` is the host on which the programs run; `other` is the source or destination of a
    /// hand-over.
    pub(super) here: RefCell<Rc<Host>>,
    pub(super) other: RefCell<Option<Rc<Host>>>,
    /// The host with the running engine.
    pub(super) running: RefCell<Option<Rc<Host>>>,
    pub(super) model: Model,
    hosts: Cell<u64>,
    ended: RefCell<Vec<Ended>>,
    /// Frames of the group that were written.
    pub(super) frames: RefCell<BTreeSet<u64>>,
    /// The limit of each cache.
    pub(super) limit: Cell<u64>,
    pub(super) log: RefCell<Vec<String>>,
}

pub(super) fn wrong(what: impl Display) -> ! {
    resume_unwind(Box::new(Wrong(what.to_string())))
}

pub(super) fn expect<T, E: Display>(what: &str, result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| wrong(format_args!("{what}: {error}")))
}

impl Host {
    fn new(number: u64, shape: Shape, foreign: bool, leases: BTreeSet<LeaseId>) -> Rc<Self> {
        let directory = expect(
            "make a directory",
            tempfile::tempdir_in(expect("find a place", aquifer_store::tmpfs::stores())),
        );
        let region = open(directory.path().join("region"), shape.pages * PAGE_SIZE as u64);
        let listener = expect("listen", Listener::bind(&directory.path().join("programs")));
        let (copies, engine, programs) = Default::default();
        Rc::new(Self {
            number,
            directory,
            region,
            listener,
            foreign: Cell::new(foreign),
            leases: RefCell::new(leases),
            copies,
            engine,
            programs,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(super) fn engine(&self) -> Arc<Engine> {
        self.engine.borrow().clone().unwrap_or_else(|| wrong("there is no engine"))
    }

    /// Writes this content to a frame of the group.
    pub(super) fn keep_frame(&self, frame: u64, content: &[u8]) {
        let file = open(self.path("frames"), 0);
        expect("write a frame", file.write_all_at(content, frame * PAGE_SIZE as u64));
    }

    /// Returns whether a page is in the region's file.
    fn has(&self, page: u64) -> bool {
        let at = page * PAGE_SIZE as u64;
        rustix::fs::seek(&self.region, SeekFrom::Data(at)) == Ok(at)
    }

    fn open_engine(&self, world: &World) -> Arc<Engine> {
        let shape = world.shape;
        let config = EngineConfig {
            cache: Bytes(shape.frames * PAGE_SIZE as u64),
            may_be_unwatched: false,
            paging: Paging {
                policy: shape.policy,
                scheme: shape.scheme,
                prefetch: PrefetchKind::Auto,
                workers: 1,
                ..Paging::default()
            },
            spill: None,
            copies: Vec::new(),
            disk: None,
            foreign: self.foreign.get(),
        };
        let volume = VolumeConfig {
            id: VolumeId(7),
            capacity: Bytes(shape.pages * PAGE_SIZE as u64),
            workers: 0,
            io_timeout: VolumeConfig::DEFAULT_IO_TIMEOUT,
            tls: None,
            spill: None,
            ledger: None,
        };
        let joined = |config, _| {
            let volume = Volume::new(config)?;
            self.leases.borrow().iter().for_each(|lease| world.join(&volume, self, *lease));
            for (of, copy) in &*self.copies.borrow() {
                let holder = Box::new(world.holder(self, *copy));
                // The engine goes on without a copy that it cannot use.
                if let Err(error) = volume.resume_copy_holder(world.copy(*of, *copy), holder) {
                    world.say(format_args!("  no copy of lease {of}: {error}"));
                }
            }
            Ok(volume)
        };
        let names = ["region", "table", "extent_map", "sharers"];
        let paths = names.map(|name| self.path(name));
        let sizes = [shape.pages * PAGE_SIZE as u64, shape.pages, 0, 0];
        let files =
            std::array::from_fn(|at| (paths[at].as_path(), open(paths[at].clone(), sizes[at])));
        let beside = ["mapped", "frames", "watched"].map(|name| self.path(name));
        let engine = expect("open an engine", Engine::over(&config, volume, joined, files, beside));
        // Fewer frames than any real cache, so that a small region has many evictions.
        lock(&engine.cache).limit = world.limit.get();
        Arc::new(engine)
    }
}

fn open(path: PathBuf, size: u64) -> File {
    let mut options = OpenOptions::new();
    let opened = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = expect("open a file", opened);
    // The file of an earlier engine is not truncated.
    if file.metadata().is_ok_and(|is| is.len() < size) {
        expect("set a size", file.set_len(size));
    }
    file
}

impl World {
    /// Makes the world. With `is_told`, no engine is killed and nothing happens at random.
    pub(super) fn new(shape: Shape, random: Random, is_told: bool) -> Rc<Self> {
        let here = Host::new(0, shape, false, BTreeSet::from([LeaseId(1)]));
        let schedule = Schedule {
            random: RefCell::new(random),
            fuse: Cell::new(None),
            is_told,
            playing: Cell::new(false),
            still: Cell::new(false),
            discarding: RefCell::new(0..0),
        };
        let world = Rc::new(Self {
            shape,
            lender: Arc::default(),
            encryption: shape.copies.then(Encryption::random),
            suspects: RefCell::default(),
            copies: Cell::new(u64::from(shape.lags)),
            schedule,
            here: RefCell::new(here.clone()),
            other: RefCell::default(),
            running: RefCell::default(),
            model: Model {
                cells: RefCell::new(vec![vec![0]; (shape.pages * CELLS) as usize]),
                versions: Cell::new(0),
            },
            hosts: Cell::new(0),
            ended: RefCell::default(),
            frames: RefCell::default(),
            limit: Cell::new(shape.frames),
            log: RefCell::default(),
        });
        let hooked = Rc::downgrade(&world);
        effect::set(Some(Rc::new(move |point| {
            if let Some(world) = hooked.upgrade() {
                world.at(point);
            }
        })));
        world.restart(&here);
        world.start_program(&here);
        world
    }

    pub(super) fn below(&self, end: u64) -> u64 {
        self.schedule.random.borrow_mut().below(end)
    }

    pub(super) fn one_in(&self, number: u64) -> bool {
        !self.schedule.is_told && self.below(number) == 0
    }

    pub(super) fn say(&self, what: impl Display) {
        self.log.borrow_mut().push(what.to_string());
    }

    /// Returns the host on which the programs run.
    pub(super) fn host(&self) -> Rc<Host> {
        self.here.borrow().clone()
    }

    /// Makes another host, to which the region can move.
    pub(super) fn new_host(&self) -> Rc<Host> {
        self.hosts.set(self.hosts.get() + 1);
        Host::new(self.hosts.get(), self.shape, true, self.host().leases.borrow().clone())
    }

    /// Adds a lease to a host's volume.
    pub(super) fn join(&self, volume: &Volume, host: &Host, lease: LeaseId) {
        let is_clean = self.lender.count(lease) == 0;
        let holder = Box::new(self.holder(host, lease));
        let added = volume.add_holder(self.target(lease), holder, 2, |_| is_clean);
        expect("add a lease", added);
    }

    pub(super) fn target(&self, lease: LeaseId) -> LeaseTarget {
        LeaseTarget {
            lease,
            lender: expect("name a lender", "lender".parse()),
            address: Address::Unix(format!("/{lease}").into()),
            protocol: Protocol::Nbd { export: String::new(), secure: false },
            capacity: Bytes(2 * EXTENT_SIZE),
            encryption: self.encryption.clone(),
            claim: None,
        }
    }

    pub(super) fn own(&self, host: &Host) {
        host.foreign.set(false);
        self.lender.give_to(host.number);
    }

    /// Handles a point: the running engine is about to change lasting state.
    fn at(&self, point: &'static str) {
        let Some(running) = self.running.borrow().clone() else { return };
        if let Some(left) = self.schedule.fuse.get() {
            self.schedule.fuse.set(left.checked_sub(1));
            if left == 0 {
                self.say(format_args!("  killed before '{point}'"));
                resume_unwind(Box::new(Killed));
            }
        }
        if point == "ordered" {
            running.programs.borrow().iter().for_each(|program| program.obey());
        }
        if !self.schedule.playing.get() && !self.schedule.still.get() && self.one_in(16) {
            self.schedule.playing.set(true);
            self.interfere();
            self.schedule.playing.set(false);
        }
    }

    /// Plays a thread of a program meanwhile.
    fn interfere(&self) {
        let host = self.host();
        let programs = host.programs.borrow().clone();
        let Some(program) = programs.get(self.below(2) as usize) else { return };
        let page = self.below(self.shape.pages);
        if self.schedule.discarding.borrow().contains(&page) {
            return;
        }
        if !program.has(page) {
            self.fault_meanwhile(&host, program, page);
        }
        if !program.has(page) || program.shares(page) {
            return;
        }
        match self.below(4) {
            0 => program.drop_entry(page),
            1 => self.check(program, page),
            _ => self.write(program, page * CELLS + self.below(CELLS)),
        }
    }

    /// Plays a fault while the engine does other work. It must need no room, as the engine may be
    /// making room.
    fn fault_meanwhile(&self, host: &Rc<Host>, program: &Program, page: u64) {
        let is_running =
            self.running.borrow().as_ref().is_some_and(|running| Rc::ptr_eq(running, host));
        let (Some(engine), Some(served), true) =
            (host.engine.borrow().clone(), program.served(), is_running)
        else {
            return;
        };
        let is_easy = engine.cache.try_lock().is_ok_and(|cache| {
            let is = engine.table.get(page);
            is.has_frame() || cache.frames + MOST < cache.limit
        });
        if is_easy {
            let _ = self.serve(host, &engine, &served, program, page, true);
        }
    }

    fn serve(
        &self,
        host: &Host,
        engine: &Engine,
        served: &Arc<crate::program::Program>,
        program: &Program,
        page: u64,
        write: bool,
    ) -> Result<(), crate::error::RegionError> {
        let address = (program.address() as u64) + page * PAGE_SIZE as u64;
        let fault =
            Fault { address, write, minor: host.has(page) && !program.shares(page), thread: 1 };
        let mut buffer = super::super::prefetch::buffer();
        let Some(request) = FaultRequest::new(served, fault) else { return Ok(()) };
        engine.try_serve(WorkerId(0), &request, &mut buffer)
    }

    /// Runs an operation of the host's engine. Returns `None` if the engine was killed.
    pub(super) fn run<T>(
        &self,
        host: &Rc<Host>,
        what: impl Display,
        op: impl FnOnce(&Engine) -> T,
    ) -> Option<T> {
        let engine = host.engine();
        self.say(format_args!("host {}: {what}", host.number));
        self.survives(host, || op(&engine))
    }

    fn survives<T>(&self, host: &Rc<Host>, op: impl FnOnce() -> T) -> Option<T> {
        if !self.schedule.is_told {
            // Most engines die early, some late.
            self.schedule.fuse.set(match self.below(8) {
                0 => Some(self.below(8)),
                1 => Some(self.below(200)),
                _ => None,
            });
        }
        let before = self.running.replace(Some(host.clone()));
        let done = catch_unwind(AssertUnwindSafe(op));
        self.running.replace(before);
        if !self.schedule.is_told {
            self.schedule.fuse.set(None);
        }
        self.schedule.playing.set(false);
        let done = unless_killed(done);
        if done.is_none() {
            self.lose_engine(host);
        }
        done
    }

    pub(super) fn lose_engine(&self, host: &Host) {
        host.engine.replace(None);
        host.programs.borrow().iter().for_each(|program| program.lose_engine());
    }

    /// Starts engines until one survives, and reattaches the programs to it.
    pub(super) fn restart(&self, host: &Rc<Host>) {
        for _ in 0..20 {
            self.say(format_args!("host {}: start an engine", host.number));
            self.lose_engine(host);
            while !self.schedule.still.get() && !host.programs.borrow().is_empty() && self.one_in(3)
            {
                self.interfere();
            }
            host.programs.borrow().iter().for_each(|program| program.obey());
            if self.one_in(12) {
                self.end_program(host);
            }
            let Some(engine) = self.survives(host, || host.open_engine(self)) else {
                continue;
            };
            *host.engine.borrow_mut() = Some(engine);
            if self.attach_all(host) {
                return;
            }
        }
        wrong("no engine comes up");
    }

    fn attach_all(&self, host: &Rc<Host>) -> bool {
        let programs = host.programs.borrow().clone();
        programs.iter().all(|program| {
            self.run(host, "take a program in", |engine| {
                expect("attach", program.attach(engine, &host.listener, &host.path("programs")));
            })
            .is_some()
        })
    }

    pub(super) fn start_program(&self, host: &Rc<Host>) {
        let program = Program::new(&host.region, self.shape.pages);
        host.programs.borrow_mut().push(Rc::new(expect("map the region", program)));
        let engine = host.engine();
        let program = host.programs.borrow().last().cloned();
        let attached = program.is_some_and(|program| {
            self.run(host, "take a new program in", |_| {
                expect("attach", program.attach(&engine, &host.listener, &host.path("programs")));
            })
            .is_some()
        });
        if !attached {
            self.restart(host);
        }
    }

    /// Kills a program; its engine, if there is one, hears of it a while later.
    pub(super) fn end_program(&self, host: &Rc<Host>) {
        let Some(program) = host.programs.borrow_mut().pop() else { return };
        self.say(format_args!("host {}: a program dies", host.number));
        let Ok(program) = Rc::try_unwrap(program) else { wrong("a program is in use") };
        let (served, ended) = program.end();
        self.ended.borrow_mut().push(expect("unmap", ended));
        let Some((served, mapped)) = served else { return };
        let told = self.run(host, "hear of a program's end", |engine| {
            if self.one_in(3) {
                expect("evict", engine.evict(WorkerId(0), 4));
            }
            engine.detach(&served, &mapped);
        });
        if told.is_none() {
            self.restart(host);
        }
    }

    /// Makes a program touch a page, until it has read or written it.
    pub(super) fn touch(&self, host: &Rc<Host>, page: u64, write: bool) {
        self.touch_by(host, self.below(2) as usize, page, write);
    }

    /// Does the same with the program of this number, modulo their count.
    pub(super) fn touch_by(&self, host: &Rc<Host>, number: usize, page: u64, write: bool) {
        for _ in 0..200 {
            if host.programs.borrow().is_empty() {
                self.start_program(host);
            }
            let programs = host.programs.borrow().clone();
            let Some(program) = programs.get(number % programs.len().max(1)) else { continue };
            if program.has(page) && !(write && program.shares(page)) {
                if write {
                    self.write(program, page * CELLS + self.below(CELLS));
                } else {
                    self.check(program, page);
                }
                return;
            }
            let Some(served) = program.served() else { wrong("a program has no engine") };
            let done = self.run(host, format_args!("fault on {page}, write {write}"), |engine| {
                self.serve(host, engine, &served, program, page, write)
            });
            drop((served, programs));
            match done {
                None => self.restart(host),
                Some(served) => expect("serve a fault", served),
            }
            if host.engine().table.get(page).awaiting_source {
                self.fetch_postcopy(false);
            }
        }
        wrong(format_args!("page {page} does not come"));
    }

    fn write(&self, program: &Program, cell: u64) {
        let version = self.model.versions.get() + 1;
        self.model.versions.set(version);
        self.say(format_args!("  write {version} to page {}, cell {}", cell / CELLS, cell % CELLS));
        program.write(cell, version);
        self.model.cells.borrow_mut()[cell as usize] = vec![version];
    }

    fn check(&self, program: &Program, page: u64) {
        for cell in page * CELLS..(page + 1) * CELLS {
            let may = &mut self.model.cells.borrow_mut()[cell as usize];
            match may.iter().find(|version| program.holds(cell, **version)).copied() {
                Some(version) => *may = vec![version],
                None => {
                    wrong(format_args!("page {page}, cell {} is none of {may:?}", cell % CELLS))
                }
            }
        }
    }
}

/// Returns the result, or `None` if the engine was killed.
pub(super) fn unless_killed<T>(done: Result<T, Box<dyn Any + Send>>) -> Option<T> {
    match done {
        Ok(done) => Some(done),
        Err(why) if why.is::<Killed>() => None,
        Err(why) => resume_unwind(why),
    }
}
