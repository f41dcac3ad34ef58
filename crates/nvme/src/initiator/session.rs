//! The connections of a host to a namespace.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use aquifer_page::lock;
use aquifer_page::visitor::Visitor;
use aquifer_transport::initiating::{Deadline, Failure as _};

use super::controller::Controller;
use super::{Connection, Failure, NvmeError, Target};

/// The connections of one host to one namespace, which share a controller. The first connection
/// makes the controller; a connection after the controller's end makes a new one.
#[derive(Debug)]
pub struct Session {
    target: Arc<Target>,
    slot: Mutex<Slot>,
    /// Notified when a thread has finished connecting.
    done: Condvar,
}

enum Slot {
    /// The controller, alive as long as it has connections.
    There(Weak<Controller>),
    /// A thread is making a controller.
    Connecting,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::There(_) => "There",
            Self::Connecting => "Connecting",
        })
    }
}

impl Session {
    /// Makes a session without a controller; connects nothing.
    pub fn new(target: Arc<Target>) -> Self {
        Self { target, slot: Mutex::new(Slot::There(Weak::new())), done: Condvar::new() }
    }

    /// Returns the target of the session's connections.
    pub fn target(&self) -> &Arc<Target> {
        &self.target
    }

    /// Connects another I/O queue within `io_timeout`, which is also the timeout of each later
    /// operation.
    ///
    /// # Errors
    /// If the target cannot be reached, does not let this host use the namespace, or cannot serve
    /// it in blocks that fit a page.
    pub fn connect(&self, io_timeout: Duration) -> Result<Connection, NvmeError> {
        self.connect_as(None, io_timeout)
    }

    /// As [`connect`](Self::connect), for a visitor that claims the namespace. The queue belongs to
    /// a controller of the visitor's epoch or a newer one. Once a target of ours admits the
    /// visitor, it carries out no command of an earlier epoch.
    ///
    /// # Errors
    /// As `connect`, and [`Failure::Claimed`] if the namespace belongs to another owner.
    pub fn connect_as(
        &self,
        visitor: Option<&Visitor>,
        io_timeout: Duration,
    ) -> Result<Connection, NvmeError> {
        self.try_connect(visitor, io_timeout)
            .map_err(|failure| NvmeError::new(&self.target, failure))
    }

    fn try_connect(
        &self,
        visitor: Option<&Visitor>,
        io_timeout: Duration,
    ) -> Result<Connection, Failure> {
        let deadline = Deadline::after(io_timeout);
        let controller = self.controller(visitor, deadline)?;
        let joined = controller.join(&self.target, deadline);
        let (link, number) = joined.inspect_err(|failure| {
            if failure.ends_connection() && !matches!(failure, Failure::Refused(_)) {
                controller.end();
            }
        })?;
        Ok(Connection::new(Arc::clone(&self.target), controller, link, number, io_timeout))
    }

    /// Returns the live controller or a new one. One caller makes the new one while the others
    /// wait.
    fn controller(
        &self,
        visitor: Option<&Visitor>,
        deadline: Deadline,
    ) -> Result<Arc<Controller>, Failure> {
        let epoch = visitor.map_or(0, |visitor| visitor.epoch);
        let mut slot = self.locked();
        loop {
            match &*slot {
                Slot::There(controller) => {
                    match controller.upgrade().filter(|one| one.is_alive()) {
                        Some(controller) if controller.epoch >= epoch => return Ok(controller),
                        // A connection of the controller's epoch has broken.
                        Some(controller) => {
                            controller.end();
                            break;
                        }
                        None => break,
                    }
                }
                Slot::Connecting => {
                    deadline.check()?;
                    let waited = self.done.wait_timeout(slot, deadline.left());
                    (slot, _) = waited.unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
        *slot = Slot::Connecting;
        drop(slot);
        let made = Controller::connect(&self.target, visitor, deadline).map(Arc::new);
        let found = made.as_ref().map(Arc::downgrade).unwrap_or_default();
        *self.locked() = Slot::There(found);
        self.done.notify_all();
        made
    }

    fn locked(&self) -> MutexGuard<'_, Slot> {
        // The slot is only assigned as a whole, so a panic leaves no partial change.
        lock(&self.slot)
    }
}
