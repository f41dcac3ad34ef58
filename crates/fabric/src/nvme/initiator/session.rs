use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use aquifer_store::Visitor;

use super::controller::Controller;
use super::{Connection, Failure, NvmeError, Target};
use crate::initiating::Deadline;

/// What the connections of one host to one namespace have in common: a controller, made when the first connects and made
/// anew when one connects after it has ended.
#[derive(Debug)]
pub struct Session {
    target: Arc<Target>,
    slot: Mutex<Slot>,
    /// Rung when somebody is done connecting.
    done: Condvar,
}

enum Slot {
    /// There is one, as long as it has connections.
    There(Weak<Controller>),
    /// Somebody is making one.
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
    /// One without a controller: nothing is connected yet.
    pub fn new(target: Arc<Target>) -> Self {
        Self { target, slot: Mutex::new(Slot::There(Weak::new())), done: Condvar::new() }
    }

    /// What it is about.
    pub fn target(&self) -> &Arc<Target> {
        &self.target
    }

    /// Connects another I/O queue within `patience`, which is from then on the longest that an operation takes.
    ///
    /// # Errors
    /// When the target cannot be reached, does not let this host use the namespace, or cannot serve it in pages.
    pub fn connect(&self, patience: Duration) -> Result<Connection, NvmeError> {
        self.connect_as(None, patience)
    }

    /// As [`connect`](Self::connect), for a visitor that claims the namespace. The queue belongs to
    /// a controller of the visitor's epoch or a newer one. Once a target of ours admits the
    /// visitor, it carries out no command of an earlier epoch.
    ///
    /// # Errors
    /// As `connect`, and [`Failure::Claimed`] where the namespace is another owner's.
    pub fn connect_as(
        &self,
        visitor: Option<&Visitor>,
        patience: Duration,
    ) -> Result<Connection, NvmeError> {
        self.try_connect(visitor, patience).map_err(|failure| NvmeError::new(&self.target, failure))
    }

    fn try_connect(
        &self,
        visitor: Option<&Visitor>,
        patience: Duration,
    ) -> Result<Connection, Failure> {
        let deadline = Deadline::after(patience);
        let controller = self.controller(visitor, deadline)?;
        let joined = controller.join(&self.target, deadline);
        let (link, number) = joined.inspect_err(|failure| {
            if failure.ends_connection() && !matches!(failure, Failure::Refused(_)) {
                controller.end();
            }
        })?;
        Ok(Connection::new(Arc::clone(&self.target), controller, link, number, patience))
    }

    /// The controller there is, or a new one. One of the callers makes it, and the others wait for that.
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
                        // A connection of its epoch has broken.
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
        // It is only ever assigned whole.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
