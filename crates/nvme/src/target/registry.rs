//! The registry of a target's controllers.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use aquifer_page::{LeaseId, lock};

use super::controller::{Controller, notice};
use super::{Host, Namespace};
use crate::proto::Nqn;

/// The existing controllers, by identifier.
#[derive(Debug)]
pub(super) struct Registry {
    book: Mutex<Book>,
}

#[derive(Debug)]
struct Book {
    next: u16,
    /// Number of changes of the discovery log.
    generation: u64,
    controllers: BTreeMap<u16, Arc<Controller>>,
}

/// Identifiers from here on are reserved (Base, Figure 381 "Connect Command Data").
const RESERVED: u16 = 0xFFF0;

impl Registry {
    pub(super) fn new() -> Self {
        // A random start: a host that outlives a restart of the target may still know old
        // controllers. Such a host would take a new controller with the same identifier for an old
        // one.
        let next = LeaseId::random().0 as u16 % RESERVED;
        Self { book: Mutex::new(Book { next, generation: 0, controllers: BTreeMap::new() }) }
    }

    /// Makes a controller; `None` if all identifiers are in use.
    pub(super) fn create(
        &self,
        subsystem: Nqn,
        host: Host,
        namespace: Option<Arc<Namespace>>,
    ) -> io::Result<Option<Arc<Controller>>> {
        let mut book = self.locked();
        let after = (0..RESERVED)
            .map(|step| (u32::from(book.next) + u32::from(step)) % u32::from(RESERVED));
        let free =
            after.map(|id| id as u16).find(|id| *id != 0 && !book.controllers.contains_key(id));
        let Some(id) = free else { return Ok(None) };
        book.next = id + 1;
        let controller = Arc::new(Controller::new(id, subsystem, host, namespace)?);
        book.controllers.insert(id, Arc::clone(&controller));
        Ok(Some(controller))
    }

    pub(super) fn get(&self, id: u16) -> Option<Arc<Controller>> {
        self.locked().controllers.get(&id).cloned()
    }

    pub(super) fn remove(&self, id: u16) {
        self.locked().controllers.remove(&id);
    }

    /// Returns the number of the last change of the discovery log.
    pub(super) fn generation(&self) -> u64 {
        self.locked().generation
    }

    /// Records a change of the discovery log, and notifies the discovering hosts.
    pub(super) fn changed(&self) {
        let mut book = self.locked();
        book.generation += 1;
        for controller in book.controllers.values().filter(|controller| controller.is_discovery()) {
            controller.tell(notice::DISCOVERY);
        }
    }

    fn locked(&self) -> MutexGuard<'_, Book> {
        // Controllers are added and removed whole, so a panic leaves no partial change.
        lock(&self.book)
    }
}
