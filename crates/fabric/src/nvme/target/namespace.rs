use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_store::{Lease, StoreError};

use super::controller::Controller;

/// A lease as the namespace of a subsystem: blocks of 4096 bytes, thin.
///
/// It can be smaller than the lease, and be resized while hosts use it: they are told.
#[derive(Debug)]
pub struct Namespace {
    lease: Arc<Lease>,
    /// In bytes, a multiple of the page size.
    size: AtomicU64,
    watchers: Mutex<Vec<Weak<Controller>>>,
    pub(super) tally: Tally,
}

/// What hosts have done with a namespace, for its SMART log.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) reads: AtomicU64,
    pub(super) blocks_read: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) blocks_written: AtomicU64,
}

/// Why a namespace is not resized.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// Not a size that the lease can give.
    #[error("a namespace of lease {lease} cannot have {size}: it must be a multiple of {PAGE_SIZE} bytes, more than none and at most {most}", lease = .lease.id(), most = .lease.capacity())]
    Size {
        /// The lease.
        lease: Arc<Lease>,
        /// What was asked for.
        size: Bytes,
    },
    /// What is cut off could not be given back.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Namespace {
    /// All of a lease.
    pub fn new(lease: Arc<Lease>) -> Self {
        let size = lease.capacity().0.into();
        Self { lease, size, watchers: Mutex::default(), tally: Tally::default() }
    }

    /// The lease.
    pub fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    /// Its size now.
    pub fn size(&self) -> Bytes {
        Bytes(self.size.load(Ordering::Relaxed))
    }

    /// Changes its size and tells the hosts that use it. What is beyond the new end is gone, and its RAM is given back.
    ///
    /// # Errors
    /// [`ResizeError::Size`], with nothing changed. [`ResizeError::Store`]: it has its new size, but takes more RAM than it
    /// should.
    pub fn resize(&self, size: Bytes) -> Result<(), ResizeError> {
        let capacity = self.lease.capacity();
        if size == Bytes::ZERO || size > capacity || !size.0.is_multiple_of(PAGE_SIZE as u64) {
            return Err(ResizeError::Size { lease: Arc::clone(&self.lease), size });
        }
        let mut watchers = self.locked();
        self.size.store(size.0, Ordering::Relaxed);
        let discarded = self.lease.discard(size.0, capacity.0 - size.0);
        watchers.retain(|watcher| {
            watcher.upgrade().is_some_and(|controller| controller.tell_namespace_changed())
        });
        Ok(discarded?)
    }

    /// Tells this controller of changes, as long as it lives.
    pub(super) fn watch(&self, controller: &Arc<Controller>) {
        let mut watchers = self.locked();
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(Arc::downgrade(controller));
    }

    fn locked(&self) -> MutexGuard<'_, Vec<Weak<Controller>>> {
        // Watchers come and go whole, so a panic elsewhere cannot have left the list half written.
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
