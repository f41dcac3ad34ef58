//! Namespaces of the target.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use aquifer_page::export::{Export, ExportError};
use aquifer_page::{Bytes, LeaseId, PAGE_SIZE, lock};

use super::controller::Controller;

/// A lease as the namespace of a subsystem, with thin provisioning and blocks of 4096 bytes.
///
/// The namespace can be smaller than the lease. On a resize, the hosts that use the namespace get
/// an event.
#[derive(Debug)]
pub struct Namespace {
    lease: Arc<dyn Export>,
    /// Size in bytes, a multiple of the page size.
    size: AtomicU64,
    watchers: Mutex<Vec<Weak<Controller>>>,
    pub(super) tally: Tally,
}

/// The hosts' use of a namespace, for its SMART log.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) reads: AtomicU64,
    pub(super) blocks_read: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) blocks_written: AtomicU64,
}

/// The reason why a namespace is not resized.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// The lease cannot provide this size.
    #[error(
        "a namespace of lease {lease} cannot have {size}: give a positive multiple of \
         {PAGE_SIZE} bytes, at most {most}"
    )]
    Size {
        /// The lease.
        lease: LeaseId,
        /// The requested size.
        size: Bytes,
        /// The capacity of the lease.
        most: Bytes,
    },
    /// The pages beyond the new end could not be freed.
    #[error(transparent)]
    Export(#[from] ExportError),
}

impl Namespace {
    /// Makes a namespace of a whole lease.
    pub fn new(lease: Arc<dyn Export>) -> Self {
        let size = lease.capacity().0.into();
        Self { lease, size, watchers: Mutex::default(), tally: Tally::default() }
    }

    /// Returns the lease.
    pub fn lease(&self) -> &Arc<dyn Export> {
        &self.lease
    }

    /// Returns the current size.
    pub fn size(&self) -> Bytes {
        Bytes(self.size.load(Ordering::Relaxed))
    }

    /// Changes the size, frees the RAM beyond the new end and its content, and sends an event to
    /// the hosts that use it.
    ///
    /// # Errors
    /// [`ResizeError::Size`], without any change. [`ResizeError::Export`], with the new size, but
    /// with RAM beyond it still in use.
    pub fn resize(&self, size: Bytes) -> Result<(), ResizeError> {
        let most = self.lease.capacity();
        if size == Bytes::ZERO || size > most || !size.0.is_multiple_of(PAGE_SIZE as u64) {
            return Err(ResizeError::Size { lease: self.lease.id(), size, most });
        }
        let mut watchers = self.locked();
        self.size.store(size.0, Ordering::Relaxed);
        let discarded = self.lease.discard(size.0, most.0 - size.0);
        watchers.retain(|watcher| {
            watcher.upgrade().is_some_and(|controller| controller.tell_namespace_changed())
        });
        Ok(discarded?)
    }

    /// Reports later changes to this controller, as long as it exists.
    pub(super) fn watch(&self, controller: &Arc<Controller>) {
        let mut watchers = self.locked();
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(Arc::downgrade(controller));
    }

    fn locked(&self) -> MutexGuard<'_, Vec<Weak<Controller>>> {
        // Watchers are added and removed whole, so a panic leaves no partial change.
        lock(&self.watchers)
    }
}
