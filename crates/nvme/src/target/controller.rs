//! Controllers of the target.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use aquifer_page::lock;
use aquifer_page::visitor::Stay;
use aquifer_transport::channel::{Channel, Socket};

use super::wakeup::Wakeup;
use super::{Host, MAX_QUEUE, Namespace};
use crate::proto::fabrics::{VERSION_2_0, capabilities, configuration, property, status};
use crate::proto::{Nqn, NvmeStatus};

/// The number of the admin queue.
pub(super) const ADMIN: u16 = 0;
/// The longest reset, in units of 500 ms: a reset waits for the threads of the I/O queues.
const READY_TIMEOUT: u64 = 20;

/// Notices for the host, as bits.
pub(super) mod notice {
    pub(in super::super) const NAMESPACE: u32 = 1 << 0;
    pub(in super::super) const DISCOVERY: u32 = 1 << 1;
}

/// A controller: the state that a host's queues share, from the admin queue's Connect to its end.
#[derive(Debug)]
pub(super) struct Controller {
    pub(super) id: u16,
    pub(super) subsystem: Nqn,
    pub(super) host: Host,
    /// The namespace; `None` for discovery.
    pub(super) namespace: Option<Arc<Namespace>>,
    pub(super) wakeup: Wakeup,
    /// Notices not yet reported, see [`notice`].
    pub(super) notices: AtomicU32,
    traffic: AtomicBool,
    state: Mutex<State>,
    /// Notified when an I/O queue leaves.
    left: Condvar,
}

#[derive(Debug, Default)]
struct State {
    configuration: u32,
    status: u32,
    /// The connections of the I/O queues, by queue number.
    queues: BTreeMap<u16, Socket>,
    /// Whether the admin queue has ended.
    ended: bool,
    /// The host's admission to the lease, once it has introduced itself.
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
            wakeup: Wakeup::new()?,
            notices,
            traffic,
            state,
            left,
        })
    }

    pub(super) fn is_discovery(&self) -> bool {
        self.namespace.is_none()
    }

    /// Records traffic of the host, for its keep alive timeout.
    pub(super) fn touch(&self) {
        // Skips the store if the flag is set: threads of many queues share its cache line.
        if !self.traffic.load(Ordering::Relaxed) {
            self.traffic.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether the host has sent anything since the last call.
    pub(super) fn take_traffic(&self) -> bool {
        self.traffic.swap(false, Ordering::Relaxed)
    }

    /// Tells the host that its namespace has changed. Returns true.
    pub(super) fn tell_namespace_changed(&self) -> bool {
        self.tell(notice::NAMESPACE);
        true
    }

    pub(super) fn tell(&self, notice: u32) {
        self.notices.fetch_or(notice, Ordering::SeqCst);
        self.wakeup.wake();
    }

    /// Returns whether the controller accepts commands other than fabrics commands.
    pub(super) fn is_ready(&self) -> bool {
        self.locked().status & status::READY != 0
    }

    /// Returns a property, which must have this size (Base, section 6.5 "Property Get command").
    pub(super) fn property(&self, offset: u32, eight_bytes: bool) -> Result<u64, NvmeStatus> {
        let state = self.locked();
        Ok(match (offset, eight_bytes) {
            (property::CAPABILITIES, true) => self.capabilities(),
            (property::VERSION, false) => VERSION_2_0.into(),
            (property::CONFIGURATION, false) => state.configuration.into(),
            (property::STATUS, false) => state.status.into(),
            (property::READY_TIMEOUTS, false) => READY_TIMEOUT,
            _ => return Err(NvmeStatus::INVALID_FIELD.final_()),
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

    /// Sets a property of 4 bytes, and returns once that has taken effect. Returns true on a reset.
    ///
    /// The configuration is the only one that a host may set here (Base, section 6.6 "Property Set
    /// command").
    pub(super) fn set_property(&self, offset: u32, value: u32) -> Result<bool, NvmeStatus> {
        if offset != property::CONFIGURATION {
            return Err(NvmeStatus::INVALID_FIELD.final_());
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
        // A discovery controller has no I/O queues, so entry sizes do not matter.
        self.is_discovery() || (configuration & sizes == wanted && configuration & other == 0)
    }

    /// Adds an I/O queue. The caller MUST call [`leave`](Self::leave) when the queue ends.
    pub(super) fn join(&self, queue: u16, socket: Socket) -> Result<(), NvmeStatus> {
        let mut state = self.locked();
        if state.ended || state.status & status::READY == 0 || state.queues.contains_key(&queue) {
            return Err(NvmeStatus::COMMAND_SEQUENCE.final_());
        }
        state.queues.insert(queue, socket);
        Ok(())
    }

    /// Removes an I/O queue that has ended.
    pub(super) fn leave(&self, queue: u16) {
        self.locked().queues.remove(&queue);
        self.left.notify_all();
    }

    /// Returns whether the host has introduced itself.
    pub(super) fn is_introduced(&self) -> bool {
        self.locked().stay.is_some()
    }

    /// Keeps the host's admission to the lease until the controller ends. Only the admin queue
    /// calls this.
    pub(super) fn keep(&self, stay: Stay) {
        self.locked().stay = Some(stay);
    }

    /// Ends the I/O queues and waits for them, after the end of the admin queue.
    pub(super) fn end(&self) {
        let mut state = self.locked();
        state.ended = true;
        let mut state = self.end_queues(state);
        // Only after the I/O queues have ended: dropping it lets a waiting newer controller
        // proceed.
        let stay = state.stay.take();
        drop(state);
        drop(stay);
    }

    /// Ends all I/O queues and waits for their threads. Once the host learns that they are gone,
    /// the target carries out none of their commands.
    fn end_queues<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        for socket in state.queues.values() {
            // A socket that is shut down already is about to leave.
            let _ = socket.shutdown();
        }
        while !state.queues.is_empty() {
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        // Every change is a single assignment, insertion or removal, so a panic leaves no partial
        // change.
        lock(&self.state)
    }
}
