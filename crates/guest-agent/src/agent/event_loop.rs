//! The agent's event loop.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant, SystemTime};

use aquifer_page::Bytes;
use aquifer_procfs::arm_trigger;
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SocketFlags, SocketType, bind, netlink, recv, socket_with,
};

use super::applications::Application;
use super::host::{Check, Host};
use super::pending::{Asker, Pending};
use super::watch::Watch;
use super::{Options, socket};
use crate::figures::Blocks;
use crate::message::ToHost;
use crate::trace::Tracer;

/// Epoll's numbers of the host, the socket and the pressure file; applications have the numbers
/// that follow.
pub(super) const HOST: u64 = 0;
pub(super) const SOCKET: u64 = 1;
const PRESSURE: u64 = 2;
const EVENTS: u64 = 3;
pub(super) const FIRST_APPLICATION: u64 = 4;

/// The stall, and the window in which it makes the kernel send an event.
const TRIGGER: [Duration; 2] = [Duration::from_millis(150), Duration::from_secs(1)];

/// The netlink group of the kernel's own events.
const KERNEL: u32 = 1;

/// Timeout of the answer to an urgent request.
const URGENT_TIMEOUT: Duration = Duration::from_secs(10);

/// How soon unsent bytes are retried at the latest.
const RETRY: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(super) struct Agent {
    pub(super) options: Options,
    pub(super) epoll: OwnedFd,
    pub(super) host: Host,
    pub(super) listener: UnixListener,
    pub(super) applications: BTreeMap<u64, Application>,
    pub(super) next_application: u64,
    pub(super) pending: Pending,
    pub(super) watch: Watch,
    pub(super) tracer: Tracer,
    pub(super) checks: Vec<Check>,
    /// Events of memory that comes online, if the kernel permits them.
    events: Option<OwnedFd>,
    /// Events of pressure, if the kernel permits them.
    pub(super) pressure: Option<File>,
}

impl Agent {
    /// Prepares everything but the port, which may not exist yet.
    pub(super) fn start(options: Options) -> io::Result<Self> {
        let listener = socket::listen(&options.socket, options.socket_group.as_deref())?;
        let watch = Watch::new(&options.root)?;
        if let Err(error) = Blocks::new(&options.root).keep_online(options.online) {
            eprintln!("aquifer-guest: cannot make the kernel bring memory online: {error}");
        }
        let [stall, window] = TRIGGER;
        let pressure = options.root.join("proc/pressure/memory");
        let pressure = arm_trigger(&pressure, stall, window)
            .inspect_err(|error| {
                eprintln!(
                    "aquifer-guest: the kernel cannot report memory pressure ({error}): boot the \
                     guest with psi=1 on its command line, and run the agent as root"
                );
            })
            .ok();
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        add(&epoll, &listener, SOCKET, EventFlags::IN)?;
        if let Some(pressure) = &pressure {
            add(&epoll, pressure, PRESSURE, EventFlags::PRI)?;
        }
        let events = kernel_events().ok();
        if let Some(events) = &events {
            add(&epoll, events, EVENTS, EventFlags::IN)?;
        }
        // Greater than any number that an earlier agent has used.
        let before = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Ok(Self {
            host: Host::new(&options),
            listener,
            applications: BTreeMap::new(),
            next_application: FIRST_APPLICATION,
            pending: Pending::new(before.as_micros() as u64),
            watch,
            tracer: Tracer::new(&options.root),
            checks: Vec::new(),
            events,
            pressure,
            epoll,
            options,
        })
    }

    /// Waits for the next event or timer, and handles it.
    ///
    /// # Errors
    /// If epoll fails.
    pub(super) fn run_once(&mut self) -> io::Result<()> {
        self.reach_host(Instant::now());
        let mut events: Vec<Event> = Vec::with_capacity(16);
        let until = self.next_time();
        let timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in events {
            let (data, flags) = (event.data, event.flags);
            match data.u64() {
                HOST => self.hear_host(flags),
                SOCKET => self.let_in(),
                PRESSURE => self.stalls(),
                EVENTS => self.hear_kernel(),
                application => self.hear_application(application),
            }
        }
        self.keep_time(Instant::now());
        Ok(())
    }

    /// Returns the time of the next timer.
    fn next_time(&self) -> Option<Instant> {
        let host = self.host.next_time();
        let now = Instant::now();
        let retry = self.host.is_behind().then(|| now + RETRY);
        let check = self.next_check(now);
        let look = self.watch.next_look.filter(|_| self.host.connected());
        [host, retry, check, look, self.pending.deadline()].into_iter().flatten().min()
    }

    /// Runs the timers that are due.
    fn keep_time(&mut self, now: Instant) {
        while let Some(asker) = self.pending.late(now) {
            self.no_answer(asker, now);
        }
        if !self.host.connected() {
            return;
        }
        if self.watch.next_look.is_some_and(|look| look <= now)
            && let Some((bytes, why)) = self.watch.look(now)
        {
            self.ask_urgently(bytes, now, why);
        }
        self.report_if_due(now);
        self.answer_checks(now);
        self.finish_tracing(now, false);
        self.host.flush();
    }

    /// Discards the kernel's events: [`keep_time`](Self::keep_time) looks at their effect.
    fn hear_kernel(&self) {
        let mut event = [0; 4096];
        while let Some(events) = &self.events
            && recv(events, &mut event[..], RecvFlags::DONTWAIT).is_ok()
        {}
    }

    /// Handles the kernel's event of pressure.
    fn stalls(&mut self) {
        let now = Instant::now();
        if self.host.connected()
            && let Some((bytes, why)) = self.watch.stalls(now)
        {
            self.ask_urgently(bytes, now, why);
        }
    }

    fn ask_urgently(&mut self, bytes: Bytes, now: Instant, why: String) {
        let id = self.pending.add(Asker::Own, now, URGENT_TIMEOUT);
        let bytes = i64::try_from(bytes.0).unwrap_or(i64::MAX);
        let timeout_ms = URGENT_TIMEOUT.as_millis() as u64;
        self.host.say(&ToHost::Request { id, bytes, urgent: true, timeout_ms, why });
    }
}

/// Opens a socket of the kernel's events, of memory blocks among others (netlink(7),
/// `NETLINK_KOBJECT_UEVENT`).
fn kernel_events() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let protocol = Some(netlink::KOBJECT_UEVENT);
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
    bind(&socket, &netlink::SocketAddrNetlink::new(0, KERNEL))?;
    Ok(socket)
}

/// Adds a file to epoll, with `number` as its data.
pub(super) fn add(
    epoll: impl AsFd,
    file: impl AsFd,
    number: u64,
    flags: EventFlags,
) -> io::Result<()> {
    Ok(epoll::add(epoll, file, EventData::new_u64(number), flags)?)
}
