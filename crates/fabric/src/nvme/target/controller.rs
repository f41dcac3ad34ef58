use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use aquifer_store::Stay;

use super::bell::Bell;
use super::{Host, MAX_QUEUE, Namespace};
use crate::channel::{Channel, Socket};
use crate::nvme::proto::fabrics::{VERSION_2_0, capabilities, configuration, property, status};
use crate::nvme::proto::{Nqn, Status};

/// The admin queue.
pub(super) const ADMIN: u16 = 0;
/// How long a reset may take, in half seconds: it waits for the I/O queues' threads.
const READY_TIMEOUT: u64 = 20;

/// Things to tell the host, as bits.
pub(super) mod notice {
    pub(in super::super) const NAMESPACE: u32 = 1 << 0;
    pub(in super::super) const DISCOVERY: u32 = 1 << 1;
}

/// What a host's queues have in common: it is there from the admin queue's Connect to the end of its connection.
#[derive(Debug)]
pub(super) struct Controller {
    pub(super) id: u16,
    pub(super) subsystem: Nqn,
    pub(super) host: Host,
    /// None: it serves discovery.
    pub(super) namespace: Option<Arc<Namespace>>,
    pub(super) bell: Bell,
    /// See [`notice`].
    pub(super) notices: AtomicU32,
    traffic: AtomicBool,
    state: Mutex<State>,
    /// Rung when an I/O queue has left.
    left: Condvar,
}

#[derive(Debug, Default)]
struct State {
    configuration: u32,
    status: u32,
    /// The I/O queues' connections, by queue.
    queues: BTreeMap<u16, Socket>,
    /// Its admin queue is gone.
    ended: bool,
    /// The host's time with the lease, once it has introduced itself.
    stay: Option<Stay>,
}

impl Controller {
    pub(super) fn new(
        id: u16,
        subsystem: Nqn,
        host: Host,
        namespace: Option<Arc<Namespace>>,
    ) -> io::Result<Self> {
        let (notices, traffic) = (AtomicU32::new(0), AtomicBool::new(true));
        let (state, left) = (Mutex::default(), Condvar::new());
        Ok(Self {
            id,
            subsystem,
            host,
            namespace,
            bell: Bell::new()?,
            notices,
            traffic,
            state,
            left,
        })
    }

    pub(super) fn is_discovery(&self) -> bool {
        self.namespace.is_none()
    }

    /// The host has given a sign of life.
    pub(super) fn touch(&self) {
        // Not written where it is set already: many threads read it.
        if !self.traffic.load(Ordering::Relaxed) {
            self.traffic.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the host has given a sign of life since this was asked last.
    pub(super) fn take_traffic(&self) -> bool {
        self.traffic.swap(false, Ordering::Relaxed)
    }

    /// Lets the host know that its namespace has changed; true.
    pub(super) fn tell_namespace_changed(&self) -> bool {
        self.tell(notice::NAMESPACE);
        true
    }

    pub(super) fn tell(&self, notice: u32) {
        self.notices.fetch_or(notice, Ordering::SeqCst);
        self.bell.ring();
    }

    /// Whether commands other than those of fabrics may be used.
    pub(super) fn is_ready(&self) -> bool {
        self.locked().status & status::READY != 0
    }

    /// A property of this size.
    pub(super) fn property(&self, offset: u32, eight_bytes: bool) -> Result<u64, Status> {
        let state = self.locked();
        Ok(match (offset, eight_bytes) {
            (property::CAPABILITIES, true) => self.capabilities(),
            (property::VERSION, false) => VERSION_2_0.into(),
            (property::CONFIGURATION, false) => state.configuration.into(),
            (property::STATUS, false) => state.status.into(),
            (property::READY_TIMEOUTS, false) => READY_TIMEOUT,
            _ => return Err(Status::INVALID_FIELD.final_()),
        })
    }

    fn capabilities(&self) -> u64 {
        let set = capabilities::NVM;
        u64::from(MAX_QUEUE - 1)
            | capabilities::CONTIGUOUS
            | READY_TIMEOUT << capabilities::TIMEOUT_SHIFT
            | set
            | capabilities::READY_WITH_MEDIA
    }

    /// Sets a property of 4 bytes. Comes back when what that means has happened. True if it was a reset.
    pub(super) fn set_property(&self, offset: u32, value: u32) -> Result<bool, Status> {
        if offset != property::CONFIGURATION {
            return Err(Status::INVALID_FIELD.final_());
        }
        let mut state = self.locked();
        let before = std::mem::replace(&mut state.configuration, value);
        let is = |bits| value & bits != 0;
        let was = |bits| before & bits != 0;
        let reset = was(configuration::ENABLE) && !is(configuration::ENABLE);
        if reset {
            state.status = 0;
            drop(self.end_queues(state));
            return Ok(true);
        }
        if is(configuration::ENABLE) && !was(configuration::ENABLE) {
            state.status = if self.accepts(value) { status::READY } else { status::FATAL };
        }
        if is(configuration::SHUTDOWN) && !was(configuration::SHUTDOWN) {
            state.status |= status::SHUTDOWN_COMPLETE;
        }
        Ok(false)
    }

    fn accepts(&self, configuration: u32) -> bool {
        let sizes = configuration::COMMAND_SIZE | configuration::COMPLETION_SIZE;
        let wanted = configuration::START & sizes;
        let other = configuration::COMMAND_SET | configuration::PAGE_SIZE;
        // A discovery controller has no I/O queues whose entries could have a size.
        self.is_discovery() || (configuration & sizes == wanted && configuration & other == 0)
    }

    /// Takes an I/O queue in. The caller MUST call [`leave`](Self::leave) at its end.
    pub(super) fn join(&self, queue: u16, socket: Socket) -> Result<(), Status> {
        let mut state = self.locked();
        if state.ended || state.status & status::READY == 0 || state.queues.contains_key(&queue) {
            return Err(Status::COMMAND_SEQUENCE.final_());
        }
        state.queues.insert(queue, socket);
        Ok(())
    }

    /// An I/O queue is gone.
    pub(super) fn leave(&self, queue: u16) {
        self.locked().queues.remove(&queue);
        self.left.notify_all();
    }

    /// Whether the host has introduced itself.
    pub(super) fn is_introduced(&self) -> bool {
        self.locked().stay.is_some()
    }

    /// The host has introduced itself, and has the lease until the controller ends. Only the admin
    /// queue calls this.
    pub(super) fn keep(&self, stay: Stay) {
        self.locked().stay = Some(stay);
    }

    /// The admin queue is gone: ends the I/O queues and waits until they are gone too.
    pub(super) fn end(&self) {
        let mut state = self.locked();
        state.ended = true;
        let mut state = self.end_queues(state);
        // Only now: a newer controller that waits for the end of this one must not go on before.
        let stay = state.stay.take();
        drop(state);
        drop(stay);
    }

    /// Ends all I/O queues and waits for their threads: nothing that came over them is carried out any more when the host
    /// is told that they are gone, and takes other ways.
    fn end_queues<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        for socket in state.queues.values() {
            // One that is shut down already is on its way out.
            let _ = socket.shutdown();
        }
        while !state.queues.is_empty() {
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        // Every change is a single assignment, insertion or removal, so a panic elsewhere cannot have left half of one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
